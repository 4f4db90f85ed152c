"""The page of a log whose activations are elsewhere: what scorers kept, and what is missing."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from inspect_ai.event import ModelEvent
from inspect_ai.log import read_eval_log, write_eval_log

from inspect_lens.errors import ArtifactError
from inspect_lens.view import WrittenView, write_view
from tests.kit.page import Page, read_page
from tests.kit.planted_log import (
    TOKENIZER,
    Planted,
    lose_activations,
    plant_log,
    planted_probe,
)

TURNS = ("Where is it?", "And who made it?", "Sure?")
REPLY = "It is found in Verun."


def shown(planted: Planted, folder: Path, **options: object) -> tuple[WrittenView, Page]:
    options = {"tokenizer": str(TOKENIZER)} | options
    made = write_view(planted.log.location, folder / "p.html", **options)  # type: ignore[arg-type]
    return made, read_page(made.path)


def test_a_scored_completion_stands_behind_the_texts_of_its_prompt(tmp_path: Path) -> None:
    planted = plant_log(tmp_path, planted_probe(tmp_path), n=2)
    lose_activations(tmp_path)
    made, page = shown(planted, tmp_path)
    assert (made.n_samples, made.n_kept, made.n_lost) == (2, 2, 0)
    assert "token scores that probe_score kept beside the log" in made.notes[0]
    assert "INSPECT_LENS_DIR" in made.notes[1]
    for sample, block, rows, (prompt, completion) in zip(
        page.facts["samples"], page.blocks, planted.scores, planted.ids, strict=True
    ):
        assert sample["origin"] == "kept by probe_score"
        assert sample["values"][0] == pytest.approx(sample["scores"][0], rel=1e-5)
        assert block.tokens[:2] == ["Be <b>kind</b>.", "Where is it?"]
        assert block.ids == [-1, -1, *completion[:-1]]
        assert np.isnan(block.scores[:, :2]).all()
        truth = rows.mean(axis=0)[len(prompt) :]
        assert np.abs(block.scores[0, 2:] - truth).max() <= page.step() / 2 + 1e-6
        # The scorer read the mean of the layers; of each of them nothing is known.
        assert np.isnan(block.scores[1:]).all()
        assert [turn[0] for turn in block.calls[0]["turns"]] == ["system", "user", "assistant"]
        assert block.calls[0]["at"] == [-1, -1, *range(len(prompt), len(prompt) + len(truth))]
        assert "".join(block.tokens[2:]) == REPLY


def test_where_every_token_was_scored_the_page_is_as_with_activations(tmp_path: Path) -> None:
    planted = plant_log(tmp_path, planted_probe(tmp_path), n=1, positions="all", pool="max",
                        score_positions="all")  # fmt: skip
    _, before = shown(planted, tmp_path)
    lose_activations(tmp_path)
    made, after = shown(planted, tmp_path)
    (full,), (kept,) = before.blocks, after.blocks
    assert made.n_kept == 1
    assert kept.ids == full.ids[:-1], "the last token was never read"
    assert kept.tokens == full.tokens[:-1]
    assert kept.scores[0] == pytest.approx(full.scores[0, :-1], abs=1e-3)
    assert [t[:2] for t in kept.calls[0]["turns"]] == [t[:2] for t in full.calls[0]["turns"]]


def test_the_probe_need_not_be_here(tmp_path: Path) -> None:
    probe = planted_probe(tmp_path)
    planted = plant_log(tmp_path, probe, n=1)
    lose_activations(tmp_path)
    shutil.rmtree(probe)
    made, page = shown(planted, tmp_path)
    assert made.series == ("t/p",)
    (series,) = page.facts["series"]
    assert (series["threshold"], series["layers"]) == (1.0, [1, 2])
    assert any("which is not here" in note for note in made.notes)
    assert np.isfinite(page.blocks[0].scores[0, 2:]).all()


def test_a_probe_that_is_not_here_is_noted_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    probe = planted_probe(Path("mine"))
    planted = plant_log(tmp_path, probe, n=1)
    shutil.rmtree(probe)
    made, _ = shown(planted, tmp_path)
    noted = [note for note in made.notes if note.startswith("The log was scored with")]
    assert len(noted) == 1
    assert f"{probe!r}, which is not here" in noted[0], "by its path, not also by name"


def test_calls_of_which_nothing_was_kept_are_text(tmp_path: Path) -> None:
    planted = plant_log(tmp_path, planted_probe(tmp_path), turns=TURNS, n=1)
    lose_activations(tmp_path)
    made, page = shown(planted, tmp_path)
    # The scorer read the last answer.
    assert (made.n_calls, made.n_kept, made.n_lost) == (3, 1, 2)
    assert any("2 of 3 calls are not here, and no scorer kept" in note for note in made.notes)
    (block,) = page.blocks
    assert [call["origin"] for call in block.calls] == ["none", "none", "kept"]
    turns = [turn for call in block.calls for turn in call["turns"]]
    texts = ["".join(block.tokens[a:b]) for _, a, b, _ in turns]
    assert texts == ["Be <b>kind</b>.", TURNS[0], REPLY, TURNS[1], REPLY, TURNS[2], REPLY]
    assert np.isfinite(block.scores[0]).sum() == len(planted.ids[-1][1]) - 1


def test_what_was_never_captured_is_not_missing(tmp_path: Path) -> None:
    planted = plant_log(tmp_path, planted_probe(tmp_path), n=2)
    for sample in planted.log.samples or []:
        calls = [event.output for event in sample.events if isinstance(event, ModelEvent)]
        for output in (sample.output, *calls):
            output.metadata = None
    write_eval_log(planted.log)
    made, page = shown(planted, tmp_path)
    assert (made.n_kept, made.n_lost) == (2, 0)
    (note,) = made.notes
    assert note.startswith("2 of 2 calls captured no activations. Their colours are the token")
    assert [s["origin"] for s in page.facts["samples"]] == ["kept by probe_score"] * 2
    other = planted_probe(tmp_path, layers=(2,), name="t/other")
    with pytest.raises(ArtifactError, match="its 2 calls captured no activations, and probe_score"):
        shown(planted, tmp_path, probes=[other])


def test_some_are_here_and_some_are_not(tmp_path: Path) -> None:
    planted = plant_log(tmp_path, planted_probe(tmp_path), n=3)
    lose_activations(tmp_path, keep=1)
    made, page = shown(planted, tmp_path)
    assert (made.n_calls, made.n_kept) == (3, 2)
    assert [s["origin"] for s in page.facts["samples"]] == ["", *["kept by probe_score"] * 2]
    assert np.isfinite(page.blocks[0].scores[1]).any(), "layers of what is here are computed"


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    planted = plant_log(tmp_path, planted_probe(tmp_path), n=1)
    other = planted_probe(tmp_path, layers=(2,), name="t/other")
    lose_activations(tmp_path)
    with pytest.raises(ArtifactError, match=r"probe_score kept .* other probes only"):
        shown(planted, tmp_path, probes=[other])
    scores = next(p for p in tmp_path.rglob("scores-*.safetensors"))
    scores.unlink()
    with pytest.raises(ArtifactError, match=rf"{scores.name} is not here either. Put the .lens"):
        shown(planted, tmp_path)
    bare = plant_log(tmp_path / "bare", planted_probe(tmp_path), n=1, token_scores=False)
    lose_activations(tmp_path / "bare")
    with pytest.raises(ArtifactError, match="no scorer kept token scores"):
        shown(bare, tmp_path)
    assert not (tmp_path / "p.html").exists()


def test_a_damaged_file_is_not_passed_over(tmp_path: Path) -> None:
    planted = plant_log(tmp_path, planted_probe(tmp_path), n=1)
    (file,) = (tmp_path / "planted.lens").iterdir()
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(ArtifactError, match=file.name):
        shown(planted, tmp_path)


def test_scores_that_were_kept_of_a_call_that_captured_nothing(tmp_path: Path) -> None:
    """As where a scorer fed the tokens again."""
    planted = plant_log(tmp_path, planted_probe(tmp_path), n=2)
    log = read_eval_log(planted.log.location)
    assert log.samples is not None
    for event in log.samples[1].events:
        if event.event == "model":
            event.output.metadata = None
    log.samples[1].output.metadata = None
    made = write_view(log, tmp_path / "p.html", tokenizer=str(TOKENIZER))
    assert (made.n_calls, made.n_kept) == (2, 1)
