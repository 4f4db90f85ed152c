"""`inspect score` as a user runs it: in a fresh process, from a log and its files alone."""

from __future__ import annotations

import json
import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from inspect_ai.log import EvalLog, read_eval_log

from inspect_lens import scorer as _room

from .certificates import read_no_authorities
from .forks import run_python
from .quiet import draw_nothing_in_quiet
from .repository import PACKAGE

__all__ = ["assert_same_scores", "command_of", "commands_of", "rescore", "rescore_each"]

NOWHERE = "http://127.0.0.1:9/v1"
"""Where no server of activations is."""


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


def commands_of(log: EvalLog) -> list[list[str]]:
    """Arguments of `inspect score` for each scorer of a log.

    Args:
        log: with the names of its scorers.

    Returns:
        Those of the package by their full names; others by that of the log, which Inspect looks
        for in the file of the task.
    """
    commands = []
    for spec in log.eval.scorers or []:
        command = command_of(spec.name, spec.options or {})
        is_ours = hasattr(_room, spec.name)
        commands.append(command if is_ours else ["--scorer", spec.name, *command[2:]])
    return commands


def assert_same_scores(log: EvalLog, again: Sequence[EvalLog]) -> None:
    """Compare a log with what each of its scorers, run alone, makes of it.

    Args:
        log: as the eval wrote it.
        again: scored with each of `commands_of`.

    Raises:
        AssertionError: a value, an answer or a metric differs.
    """
    assert log.results is not None
    made = [score for scored in again for score in (scored.results and scored.results.scores) or []]
    for new, old in zip(made, log.results.scores, strict=True):
        assert (new.scorer, new.reducer) == (old.scorer, old.reducer)
        np.testing.assert_equal(
            {k: m.value for k, m in new.metrics.items()},
            {k: m.value for k, m in old.metrics.items()},
        )
    for i, scored in enumerate(again):
        for after, before in zip(scored.samples or [], log.samples or [], strict=True):
            assert (after.id, after.epoch) == (before.id, before.epoch)
            (found,) = (after.scores or {}).values()
            name, score = list((before.scores or {}).items())[i]
            np.testing.assert_equal(found.value, score.value, err_msg=name)
            assert (found.answer, found.reason) == (score.answer, score.reason), name


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
        jobs: logs that stand in files, and arguments of `inspect score`, which come after all
            others, so that a scorer that asks the model has `--model-base-url` of its own.
        folder: for the scored logs.
        url: of the model under evaluation; by default there is none.

    Returns:
        The scored logs, in order.
    """
    # A log keeps its format, whatever its name says.
    outputs = [folder / f"again-{i}{Path(log.location).suffix}" for i, (log, _) in enumerate(jobs)]
    each = [
        [
            "score", log.location, "--action", "overwrite", "--display", "none",
            "--output-file", str(output), "--model", log.eval.model, "--model-base-url", url,
            *command,
        ]
        for (log, command), output in zip(jobs, outputs, strict=True)
    ]  # fmt: skip
    environment = os.environ | {"JUDGE_API_KEY": "none", "VLLM_API_KEY": "none"}
    done = run_python("-m", __name__, json.dumps(each), environment=environment)
    assert done.returncode == 0, done.stdout
    return [read_eval_log(str(output)) for output in outputs]


def _main() -> None:
    draw_nothing_in_quiet()
    read_no_authorities()
    for arguments in json.loads(sys.argv[1]):
        sys.argv = ["inspect", *arguments]
        try:
            runpy.run_module("inspect_ai", run_name="__main__")
        except SystemExit as end:
            if end.code:
                raise RuntimeError(f"{arguments} ended with {end.code}") from end


if __name__ == "__main__":
    _main()
