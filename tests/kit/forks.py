"""Runs modules in fresh processes that are forked: Inspect and what it loads take eight seconds.

A helper imports the packages of others once, and nothing of this one, and forks for each run.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from importlib import import_module, invalidate_caches
from pathlib import Path

__all__ = ["run_python"]

ROOT = Path(__file__).resolve().parents[2]
_PACKAGES = (
    "inspect_ai._cli.main",
    "inspect_ai.model._openai_responses",
    "inspect_ai.model._providers.anthropic",
    "inspect_petri._registry",
    "inspect_scout",
    "control_arena",
    "inspect_swe._registry",
    "scipy.stats",
    "sklearn.linear_model",
    "transformers.models.auto.tokenization_auto",
)


def run_python(
    *words: str, cwd: Path = ROOT, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run `python -m module …` or `python -c code …`, and wait for its end.

    Args:
        *words: the command line of Python.
        cwd: folder that it runs in.
        environment: of the process; by default that of this one.

    Returns:
        What `subprocess.run` would return; standard output and error are both in `stdout`.
    """
    helper = _helper()
    with tempfile.NamedTemporaryFile("r", errors="replace") as output:
        job = [words, str(cwd), dict(environment or os.environ), output.name]
        assert helper.stdin is not None
        assert helper.stdout is not None
        helper.stdin.write(json.dumps(job) + "\n")
        helper.stdin.flush()
        code = int(helper.stdout.readline())
        return subprocess.CompletedProcess(words, code, output.read(), "")


@functools.cache
def _helper() -> subprocess.Popen[str]:
    helper = subprocess.Popen(
        [sys.executable, "-m", __name__],
        cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    atexit.register(helper.communicate)
    return helper


def _serve() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what an import prints is no answer
    for name in _PACKAGES:
        import_module(name)
    assert "inspect_lens" not in sys.modules, "a package of others loads this one"
    for line in sys.stdin:
        if not (pid := os.fork()):
            _run(*json.loads(line))
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        answers.write(f"{code}\n")
        answers.flush()


def _run(words: list[str], cwd: str, env: dict[str, str], output: str) -> None:
    code = 1
    try:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(os.open(output, os.O_WRONLY), 1)
        os.dup2(1, 2)
        for name in os.environ.keys() - env.keys():
            del os.environ[name]
        os.environ.update(env)
        os.chdir(cwd)
        sys.path[:1] = [cwd, *filter(None, env.get("PYTHONPATH", "").split(os.pathsep))]
        invalidate_caches()
        kind, text, *sys.argv[1:] = words
        sys.argv[0] = text
        if kind == "-m":
            runpy.run_module(text, run_name="__main__", alter_sys=True)
        else:
            exec(compile(text, "<string>", "exec"), {"__name__": "__main__"})
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001 - as the interpreter does it
        sys.excepthook(*sys.exc_info())
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    _serve()
    os._exit(0)  # tearing down all that is imported takes seconds, and nothing needs it
