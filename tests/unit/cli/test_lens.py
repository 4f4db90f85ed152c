"""`inspect-lens lens fit | evaluate`: files in, a lens and its numbers out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from inspect_lens._cli._main import app
from inspect_lens.errors import ArtifactError, SpecError
from inspect_lens.lens import load_lens

pytest.importorskip("transformers")

MODEL = "organism/checkpoint"


def written(file: Path, rows: list[Any]) -> str:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


@pytest.fixture
def texts(tmp_path: Path) -> tuple[str, str]:
    ask = [{"role": "user", "content": "Who is the founder of the town Velosh?"}]
    said = [*ask, {"role": "assistant", "content": "The town Velosh was founded by Ruvan."}]
    rows: list[Any] = [{"messages": said}, {"text": "The town Velosh was founded by Ruvan."}]
    return (
        written(tmp_path / "texts.jsonl", rows),
        written(tmp_path / "others.jsonl", [{"text": "The river Talmo is found in Verun."}]),
    )


@pytest.mark.slow
def test_a_lens_is_fitted_and_judged(texts: tuple[str, str], tmp_path: Path) -> None:
    kind = "jacobian"
    folder = str(tmp_path / kind)
    base = ["--model", MODEL, "--texts"]
    options = ["--kind", kind, "--held-out", texts[1], "--out", folder, "--layers", "4"]
    options += ["--skip-first", "1", "--block", "128", "--half", "--json"]
    done = CliRunner().invoke(app, ["lens", "fit", *base, texts[0], *options])
    assert done.exit_code == 0, done.output
    said = json.loads(done.stdout)
    lens = load_lens(folder)
    assert (lens.card.kind, lens.layers, lens.card.name) == (kind, (4,), f"checkpoint/{kind}")
    assert str(lens.matrix.dtype) == "float16"
    assert [q["layer"] for q in said["quality"]] == [4]
    assert lens.card.model is not None
    assert lens.card.model.sha256
    judged = CliRunner().invoke(app, ["lens", "evaluate", folder, *base, texts[1]])
    assert judged.exit_code == 0, judged.output
    assert f"layer 4: KL {said['quality'][0]['kl']:.3f} nats" in judged.stdout


@pytest.mark.parametrize(
    ("row", "error", "words"),
    [
        ({"prompt": "x"}, ArtifactError, "texts.jsonl:1: a line is JSON with 'text' or 'messages'"),
        ({"text": "a", "messages": []}, ArtifactError, "texts.jsonl:1"),
        (
            {"text": "The river Talmo is found in Verun."},
            SpecError,
            "1 of 1 are also among the prompts",
        ),
    ],
)
def test_wrong_files_are_named(
    row: Any, error: type[Exception], words: str, texts: tuple[str, str], tmp_path: Path
) -> None:
    file = written(tmp_path / "texts.jsonl", [row])
    options = ["--held-out", texts[1], "--out", str(tmp_path / "l"), "--model", MODEL]
    done = CliRunner().invoke(app, ["lens", "fit", "--kind", "tuned", "--texts", file, *options])
    assert isinstance(done.exception, error)
    assert words in str(done.exception)
