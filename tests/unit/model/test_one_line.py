"""What a user asks wrongly in a task of their own is one line on the command line."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from inspect_ai import Task, eval
from inspect_ai.dataset import Sample

from inspect_lens.errors import SpecError
from inspect_lens.model._host import end_in_a_line
from tests.kit.forks import run_python

TASK = """
from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_lens import probe_score, with_capture

@task
def own(probe: str = "organism/deception-lr", layers: list[int] | str = "all") -> Task:
    return Task([Sample(input="x")], solver=with_capture(layers), scorer=probe_score(probe))
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "own.py").write_text(TASK, encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("-T probe=nobody", "own.py:8: probe='nobody' was not found; allowed are a folder"),
        ("-T layers=x", "own.py:8: capture.layers='x'; allowed are 'all', or a list"),
        ("--solver inspect_lens/with_capture -S site=x", "site='x'; allowed is "),
        (
            "--solver inspect_lens/with_capture -S layer=4",
            "with_capture: takes no layer=…; did you",
        ),
    ],
)
def test_a_task_of_a_user(folder: Path, option: str, said: str) -> None:
    words = ["eval", "own.py", "--model", "mockllm/model", "--display", "plain", *option.split()]
    done = run_python("-m", "inspect_ai", *words, cwd=folder)
    assert done.returncode == 1
    assert "Traceback" not in done.stdout
    assert done.stdout.rstrip().splitlines()[-1].startswith(said)


@pytest.mark.parametrize("option", ["probe=nobody", "prob=nobody"])
def test_a_scorer_that_is_asked_wrongly_is_not_called_missing(folder: Path, option: str) -> None:
    task = Task([Sample(input="x")], name="own")
    (log,) = eval(task, model="mockllm/model", log_dir=str(folder), display="none")
    words = [log.location, "--scorer", "inspect_lens/probe_score", "-S", option]
    done = run_python("-m", "inspect_ai", "score", *words, "--overwrite", cwd=folder)
    assert done.returncode == 1
    (line,) = [one for one in done.stdout.splitlines() if one.strip()]
    assert line.startswith(("probe='nobody' was not found", "probe_score: takes no prob=…"))


def test_so_is_a_server_that_does_not_answer(folder: Path) -> None:
    task = Task([Sample(input="x")], name="own")
    (log,) = eval(task, model="mockllm/model", log_dir=str(folder), display="none")
    words = [log.location, "--scorer", "inspect_lens/coherence", "--model", "lens/a"]
    options = ["--model-base-url", "http://localhost:9", "--action", "append", "--overwrite"]
    done = run_python("-m", "inspect_ai", "score", *words, *options, cwd=folder)
    assert done.returncode == 1
    assert "Traceback" not in done.stdout
    assert "no server answers at http://localhost:9" in done.stdout


def test_who_debugs_errors_gets_the_traceback(folder: Path) -> None:
    words = [
        "eval",
        "own.py",
        "--model",
        "mockllm/model",
        "--display",
        "plain",
        "-T",
        "probe=nobody",
    ]
    done = run_python("-m", "inspect_ai", *words, "--debug-errors", cwd=folder)
    assert "Traceback" in done.stdout
    assert "probe='nobody' was not found" in done.stdout


def test_so_does_who_says_it_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    def theirs(kind: type[BaseException], error: BaseException, trace: object) -> None: ...

    theirs.__module__ = "inspect_ai._util.error"
    monkeypatch.setattr("sys.excepthook", theirs)
    monkeypatch.setenv("INSPECT_DEBUG_ERRORS", "true")
    end_in_a_line()
    assert sys.excepthook is theirs


def test_what_an_error_says_beside_its_line_is_not_lost(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def theirs(kind: type[BaseException], error: BaseException, trace: object) -> None: ...

    theirs.__module__ = "inspect_ai._util.error"
    monkeypatch.setattr("sys.excepthook", theirs)
    end_in_a_line()
    error = SpecError("wrong")
    error.add_note("the file has no end")
    sys.excepthook(SpecError, error, None)
    assert capsys.readouterr().err == "\nwrong\nthe file has no end\n\n"


def test_a_script_keeps_its_traceback(folder: Path) -> None:
    (folder / "script.py").write_text(
        "from inspect_ai import eval\nfrom own import own\n"
        "eval(own(), model='mockllm/model', limit=0, display='none')\nown(probe='nobody')\n"
    )
    done = run_python("-m", "script", cwd=folder)
    assert "Traceback" in done.stdout
    assert done.stdout.rstrip().splitlines()[-1].startswith("inspect_lens.errors.ArtifactError: ")


def test_another_error_is_left_to_the_hook_that_was_there(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[type[BaseException]] = []

    def theirs(kind: type[BaseException], error: BaseException, trace: object) -> None:
        found.append(kind)

    monkeypatch.setattr("sys.excepthook", theirs)
    end_in_a_line()
    assert sys.excepthook is theirs, "a hook that is not Inspect's stays"
    theirs.__module__ = "inspect_ai._util.error"
    end_in_a_line()
    sys.excepthook(KeyError, KeyError("x"), None)
    assert found == [KeyError]
