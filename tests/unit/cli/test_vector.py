"""`inspect-lens vector`: from a store to a vector, and between the files of other tools."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from inspect_lens._cli._main import app
from inspect_lens.errors import ArtifactError, SpecError
from inspect_lens.vector import load_vector
from tests.kit.planted_store import HIDDEN, LAYER, plant

HALF = [0, 1] * 40


@pytest.fixture(autouse=True)
def _stores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    plant("s/train", HALF, seed=1, gap=4.0)
    plant("s/test", HALF, seed=2, gap=4.0)


def run(*args: str) -> Any:
    made = CliRunner().invoke(app, ["vector", *args, "--json"])
    if made.exception is not None and not isinstance(made.exception, SystemExit):
        raise made.exception
    assert made.exit_code == 0, made.output
    return json.loads(made.output)


def test_a_planted_direction_is_found_and_measured() -> None:
    made = run("extract", "--store", "s/train", "--out", "v", "--rows", "mean")
    assert (made["layers"], made["layer"]) == ([LAYER], LAYER)
    assert made["auroc"][0] > 0.95
    vector = load_vector("v")
    assert abs(float(vector.direction[0] @ np.eye(HIDDEN)[0])) > 0.97
    assert vector.raw(LAYER)[0] == pytest.approx(4.0, rel=0.2)
    assert vector.card.model is not None
    assert vector.card.model.sha256 == "a" * 64
    assert vector.card.command.startswith("inspect-lens")

    # Samples that it was found on, or its layer chosen on, say nothing of new ones.
    with pytest.raises(
        SpecError, match=r"60 of 80 samples were in training.*20 of 80 samples chos"
    ):
        run("evaluate", "v", "s/train")
    (score,) = run("evaluate", "v", "s/train", "--allow-seen")["scores"]
    assert score["n_seen"] == 80
    (score,) = run("evaluate", "v", "s/test")["scores"]
    assert score["n_seen"] == 0
    assert score["auroc"] > 0.98
    assert 0.5 < score["random_auroc"] < score["auroc"]
    assert score["length"] == pytest.approx(4.0, rel=0.2)

    plant("s/other", HALF, seed=3, gap=4.0, weights="b")
    with pytest.raises(ArtifactError, match="allowed is that model; collect there, or pass --any"):
        run("evaluate", "v", "s/test", "s/other")
    assert len(run("evaluate", "v", "s/test", "s/other", "--any-model")["scores"]) == 2


@pytest.mark.parametrize(("asked", "is_chosen"), [((), True), (("--layer", "3"), False)])
def test_a_layer_that_was_chosen_has_a_mark_that_is_explained(
    asked: tuple[str, ...], is_chosen: bool
) -> None:
    plant("s/two", HALF, seed=1, layers=(3, LAYER))
    words = ["vector", "extract", "--store", "s/two", "--out", "v", *asked]
    said = CliRunner().invoke(app, words).output
    assert [line.endswith(" *") for line in said.splitlines()].count(True) == is_chosen
    assert ("* was chosen on the samples that its row is measured on" in said) == is_chosen


def test_methods_are_compared_on_a_part_that_none_has_seen() -> None:
    made = run("sweep", "--train", "s/train", "--rows", "mean", "--method", "pca", "--method",
               "mean_difference")  # fmt: skip
    assert [row["method"] for row in made["sweep"]] == ["pca", "mean_difference"]
    assert all(row["chosen"] for row in made["sweep"])
    other = run("sweep", "--train", "s/train", "--selection", "s/test", "--rows", "-1")
    assert len(other["sweep"]) == 4
    assert other["selection"] == "test"


def test_a_vector_goes_out_and_comes_back() -> None:
    run("extract", "--store", "s/train", "--out", "v", "--name", "m/planted", "--layer", "4")
    made = run("export", "v", "v.gguf", "--format", "repeng", "--model-hint", "llama")
    assert made == {"file": "v.gguf", "format": "repeng", "layers": [LAYER]}
    back = run("import", "v.gguf", "--out", "w", "--name", "m/back")
    assert back["layers"] == [LAYER]
    np.testing.assert_allclose(load_vector("w").raw(LAYER), load_vector("v").raw(LAYER), rtol=1e-5)


def test_a_method_that_there_is_not_is_wrong_usage() -> None:
    words = ["vector", "extract", "--store", "s/train", "--out", "v", "--method", "best"]
    made = CliRunner().invoke(app, words)
    assert made.exit_code == 2
    assert "'mean_difference'" in made.output
    assert not Path("v").exists()


@pytest.mark.parametrize(
    ("args", "match"),
    [
        (("extract", "--store", "s/train", "--out", "v", "--rows", "some"), "an index such as -2"),
        (("extract", "--store", "", "--out", "v"), "is missing"),
    ],
)
def test_wrong_options_are_refused_and_nothing_is_written(args: Any, match: str) -> None:
    with pytest.raises(SpecError, match=match):
        run(*args)
    assert not Path("v").exists()
