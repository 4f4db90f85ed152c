"""What `--help` shows: choices that the library takes, examples that its own parser takes."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from typing import Any, Literal, get_args

import pytest
import typer

from inspect_lens._cli import _choices, _main
from inspect_lens._cli._main import app
from inspect_lens._cli._output import Interrupted, kept_fits, running, typed_command
from inspect_lens.probe import LIE_DETECTORS
from inspect_lens.train import FAMILIES, VectorMethod
from inspect_lens.train.judging._select import SelectBy
from inspect_lens.vector import VectorFormat
from tests.kit.commands import commands, run_command
from tests.kit.shell import commands as words_of

COMMANDS = commands()


def test_choices_are_those_of_the_library() -> None:
    assert [one.value for one in _choices.Family] == list(FAMILIES)
    assert tuple(one.value for one in _choices.VectorMethod) == get_args(VectorMethod)
    assert get_args(_choices.SelectBy) == get_args(SelectBy)
    assert set(get_args(_choices.LieDetector)) == set(LIE_DETECTORS) - {"unrelated"}
    assert set(get_args(_choices.ExportFormat)) < set(get_args(VectorFormat))


@pytest.mark.parametrize("words", COMMANDS)
def test_each_help_has_an_example_that_the_parser_takes(
    words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(words, "--help") == 0
    shown = capsys.readouterr().out
    _, _, text = shown.partition("Examples:\n")
    typed = list(words_of(text))
    assert typed, shown
    for line in typed:
        assert line[: 1 + len(words.split())] == ["inspect-lens", *words.split()], shlex.join(line)
        command: Any = COMMANDS[words]
        command.make_context(words, line[1 + len(words.split()) :])  # raises where one is unknown
    assert max(map(len, shown.splitlines())) <= 100


Mistake = tuple[str, int, Literal["UsageError", "SpecError", "ArtifactError", ""], str]
MISTAKES: tuple[Mistake, ...] = (
    ("lens fit --kind other", 2, "UsageError", "not one of 'tuned', 'jacobian'"),
    ("lens fit --kind tuned --jsn", 2, "UsageError", "--json"),
    ("probe train --heldout x", 2, "UsageError", "--held-out"),
    ("probe sweep --train x --family linear", 2, "UsageError", "'mass-mean'"),
    ("nothing", 2, "UsageError", "inspect-lens --help shows what it takes"),
    ("store", 2, "UsageError", "Did you mean 'score'? inspect-lens --help shows what it takes"),
    ("probe collect", 2, "UsageError", "inspect-lens probe collect --help shows what it takes"),
    ("view /nowhere.eval --limit x", 2, "UsageError", "--limit"),
    ("view /nowhere.eval --out /", 4, "ArtifactError", "--out=/: is a folder"),
    ("lens import x.pt --name m/l --out /dev/null", 4, "ArtifactError", "is no folder"),
    ("lens fit --kind tuned --lr nan", 2, "UsageError", "'--lr'"),
    ("probe train --out=", 3, "SpecError", "--out: is empty"),
    ("probe train --out x --memory nan", 3, "SpecError", "--memory=nan"),
    ("probe train --out x --recall-floor 7", 2, "UsageError", "--recall-floor"),
    ("probe train --out x --disjoint a", 3, "SpecError", "--disjoint 'a'"),
    ("probe train --out x --recipe CITATION.cff --work w", 4, "ArtifactError", "not a recipe ("),
    ("probe train --out x --setting D=3", 3, "SpecError", "'lr': has no setting 'D'"),
    ("probe sweep --train x --layers 8-2", 3, "SpecError", "--layers='8-2'"),
    ("probe sweep --train x --layers 0-99999999999", 3, "SpecError", "--layers='0-9"),
    ("probe evaluate organism/deception-lt x", 4, "ArtifactError", "did you mean 'organism/dec"),
    ("probe evaluate pyproject.toml x", 4, "ArtifactError", "probe='pyproject.toml' was not"),
    ("vector extract --store x --out v --layer -5", 2, "UsageError", "--layer"),
    (
        "vector export organism/truth-resid x.gguf --format repeng",
        3,
        "SpecError",
        "--model-hint: is",
    ),
    (
        "vector export organism/truth-resid x.pt --format persona",
        3,
        "SpecError",
        "--n-layers: layers [",
    ),
    (
        "probe collect --model lens/x --out x --dataset lines",
        3,
        "SpecError",
        "--option label=false for a control set and pass --path",
    ),
)


@pytest.mark.parametrize("mistake", MISTAKES, ids=[m[0] for m in MISTAKES])
@pytest.mark.parametrize("as_json", [False, True])
def test_a_wrong_word_is_one_line(
    mistake: Mistake, as_json: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    line, code, kind, told = mistake
    words = [*line.split(), *(["--json"] if as_json else [])]
    assert run_command("", *words) == code
    out, err = capsys.readouterr()
    assert not out
    (said,) = err.splitlines()
    assert told in said
    assert said.startswith(f'{{"error": "{kind}"' if as_json else f"{kind}: ")


@pytest.mark.parametrize("line", ["--version", "probe train --help", "settings all --json"])
def test_a_pipe_that_closed_ends_it_silently(line: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"}
    program = [sys.executable, "-c", "from inspect_lens._cli import main; main()"]
    ended = subprocess.run(
        [*program, *line.split()], stdout=writer, stderr=subprocess.PIPE, env=environment,
        check=False,
    )  # fmt: skip
    os.close(writer)
    assert (ended.returncode, ended.stderr) == (141, b"")


@pytest.mark.parametrize("closed", [1, 2])
def test_a_stream_that_is_closed_is_not_written_to(closed: int) -> None:
    """It ended with a traceback, as of a service that starts commands without streams."""
    program = f"exec {sys.executable} -c 'from inspect_lens._cli import main; main()' --version"
    ended = subprocess.run(
        ["bash", "-c", f"{program} {closed}>&-"], capture_output=True, text=True, check=False
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.startswith("inspect-lens") is (closed == 2)


def test_the_version_has_a_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command("", "--version") == 0
    assert capsys.readouterr().out.startswith("inspect-lens 0.")


def test_the_command_that_runs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["inspect-lens", "probe", "sweep", "--train", "view"])
    assert running(app) == "inspect-lens probe sweep"


@pytest.mark.parametrize(
    "given",
    [
        ["-M", "api_key=S3"],
        ["--model-arg=api_key=S3"],
        ["-MAPI_KEY=S3"],
        ["-Mtoken=S3"],
        ["-M", "api_keys=S3,S3"],
        ["-M", 'client={"api_key": "S3"}'],
        ["-M", 'headers={"Authorization" : "Bearer S3"}'],
        ["--base-url", "https://host/v1?a=1&key=S3"],
    ],
)
def test_a_key_is_no_part_of_the_command_on_a_card(
    given: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    others = [
        "-M",
        '{"max_tokens": 9}',
        "-M",
        "max_tokens=9",
        "--option",
        "key=a",
        "--disjoint",
        "a b=group",
    ]
    monkeypatch.setattr("sys.argv", ["inspect-lens", "probe", "train", *given, *others])
    made = typed_command()
    assert "S3" not in made
    assert "***" in made
    assert made.endswith(
        "-M '{\"max_tokens\": 9}' -M max_tokens=9 --option key=a --disjoint 'a b=group'"
    )


@pytest.mark.parametrize("user", ["anna:S3", "S3", "anna:S3@x"])
def test_a_password_in_an_address_is_no_part_of_it(
    user: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = ["--base-url", f"https://{user}@host:8000/v1", f"--out=s3://{user}@bucket/a@b", "a@S4"]
    monkeypatch.setattr("sys.argv", ["inspect-lens", "probe", "train", *given])
    made = typed_command()
    assert "S3" not in made
    assert made.endswith("'https://***@host:8000/v1' '--out=s3://***@bucket/a@b' a@S4")


def test_ctrl_c_says_where_finished_fits_are() -> None:
    told = "finished fits are in work/fits, and the same command"
    with pytest.raises(Interrupted, match=told), kept_fits("work/fits"):
        raise KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt), kept_fits(""):
        raise KeyboardInterrupt


def test_an_input_that_ends_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def ended(**_: Any) -> None:
        raise typer.Abort

    monkeypatch.setattr(_main, "app", ended)
    with pytest.raises(SystemExit) as ending:
        _main.main()
    assert ending.value.code == 130
    assert capsys.readouterr().err.count("\n") == 1
