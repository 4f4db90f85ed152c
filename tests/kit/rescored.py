"""`inspect score` as a user runs it: in a fresh process, from a log and its files alone."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from inspect_ai.log import EvalLog, read_eval_log

from .repository import PACKAGE, ROOT

__all__ = ["command_of", "rescore", "rescore_each"]

NOWHERE = "http://127.0.0.1:9/v1"
"""Where no server of activations is."""
TIMEOUT_S = 300


def command_of(name: str, options: dict[str, Any]) -> list[str]:
    """Arguments of `inspect score` for a scorer as a log names it.

    Args:
        name: of the scorer; Inspect logs it without its package.
        options: its arguments as the log has them.

    Returns:
        `--scorer` and one `-S` for each argument.
    """
    settings = [f"{key}={json.dumps(value)}" for key, value in options.items()]
    return ["--scorer", f"{PACKAGE}/{name}", *(part for s in settings for part in ("-S", s))]


def rescore(
    log: EvalLog, commands: Sequence[Sequence[str]], folder: Path, *, url: str = NOWHERE
) -> list[EvalLog]:
    """Score a log with each command, all of them in one fresh process.

    Args:
        log: that stands in a file.
        commands: arguments of `inspect score` beside the log and where to write.
        folder: for the scored logs.
        url: of the model under evaluation; by default there is none.

    Returns:
        The scored logs, in order.
    """
    return rescore_each([(log, command) for command in commands], folder, url=url)


def rescore_each(
    jobs: Sequence[tuple[EvalLog, Sequence[str]]], folder: Path, *, url: str = NOWHERE
) -> list[EvalLog]:
    """Score logs, each with a command of its own, all of them in one fresh process.

    Args:
        jobs: logs that stand in files, and arguments of `inspect score`.
        folder: for the scored logs.
        url: of the model under evaluation; by default there is none.

    Returns:
        The scored logs, in order.
    """
    outputs = [folder / f"again-{i}.eval" for i in range(len(jobs))]
    each = [
        [
            "score", log.location, *command, "--action", "overwrite", "--display", "none",
            "--output-file", str(output), "--model", log.eval.model, "--model-base-url", url,
        ]
        for (log, command), output in zip(jobs, outputs, strict=True)
    ]  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", __name__],
        input=json.dumps(each),
        cwd=ROOT,
        env=os.environ | {"JUDGE_API_KEY": "none", "VLLM_API_KEY": "none"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [read_eval_log(str(output)) for output in outputs]


def _main() -> None:
    for arguments in json.load(sys.stdin):
        sys.argv = ["inspect", *arguments]
        try:
            runpy.run_module("inspect_ai", run_name="__main__")
        except SystemExit as end:
            if end.code:
                raise RuntimeError(f"{arguments} ended with {end.code}") from end


if __name__ == "__main__":
    _main()
