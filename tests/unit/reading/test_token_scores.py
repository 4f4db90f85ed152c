from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from inspect_ai.log import read_eval_log

from inspect_lens.errors import ArtifactError
from inspect_lens.model import Activations, ProbeScores
from inspect_lens.model._places import know_root
from inspect_lens.model._scores import Column, ScoreData, ScoredBy
from inspect_lens.reading import TokenScores, read_token_scores
from inspect_lens.reading._token_scores import engine_records, save_token_scores
from inspect_lens.scorer import probe_score
from tests.kit.mock_evals import call, planted_probe, run, scores

PROBE = planted_probe()


def record(values: list[float], **more: Any) -> TokenScores:
    facts: dict[str, Any] = {
        "probe": "p", "probe_sha256": "a" * 64, "layers": (1, 3), "site": "resid_post",
        "pool": "mean", "threshold": None, "value": 0.5, "message_id": "m", "turn": 0,
        "source": "rows", "n_prompt": 3,
    }  # fmt: skip
    return TokenScores(
        **{**facts, **more},
        positions=np.arange(3, 3 + len(values)),
        token_ids=np.arange(len(values)),
        scores=np.array(values),
    )


def beside(folder: Path) -> Activations:
    output = call([1.0], folder=folder)
    assert output.metadata is not None
    handle: Activations = output.metadata["activations"]
    return handle


@given(st.lists(st.lists(st.floats(allow_nan=False), max_size=5), min_size=1, max_size=3))
def test_what_is_read_is_what_was_written(
    tmp_path_factory: pytest.TempPathFactory, rows: list[list[float]]
) -> None:
    folder = tmp_path_factory.mktemp("log")
    made = [record(row, turn=i, threshold=[None, 0.25][i % 2]) for i, row in enumerate(rows)]
    reference = save_token_scores(made, beside=beside(folder))
    assert reference is not None
    assert len(str(reference)) < 300
    found = read_token_scores(reference)
    for old, new in zip(made, found, strict=True):
        np.testing.assert_array_equal(new.scores, old.scores)
        np.testing.assert_array_equal(new.positions, old.positions)
        assert (new.turn, new.threshold, new.layers) == (old.turn, old.threshold, old.layers)


@pytest.mark.parametrize("is_absolute", [False, True])
def test_they_lie_beside_activations_that_are_in_no_folder_of_their_own(
    tmp_path: Path, is_absolute: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    handle = beside(tmp_path)
    (file,) = tmp_path.glob("**/*.safetensors")
    moved = file.rename(tmp_path / "mine.safetensors")
    uri, root = (str(moved), None) if is_absolute else (moved.name, str(tmp_path))
    alone = handle.model_copy(update={"uri": uri, "root": root})
    reference = save_token_scores([record([1.0])], beside=alone)
    assert [path.parent for path in tmp_path.glob("**/scores-*")] == [tmp_path]
    assert read_token_scores(reference)[0].scores.tolist() == [1.0]  # type: ignore[arg-type]


def test_from_a_score_a_sample_a_log_and_its_path(tmp_path: Path) -> None:
    log = run([call([1.0, 4.0]), call([2.0])], probe_score(PROBE), folder=tmp_path)
    assert log.samples is not None
    (first, second) = read_token_scores(log)
    assert (first.sample_id, first.epoch, first.scorer) == (0, 1, "probe_score")
    np.testing.assert_array_equal(first.scores, [1.0, 4.0])
    np.testing.assert_array_equal(first.positions, [2, 3])
    np.testing.assert_array_equal(first.token_ids, [100, 101])
    assert (first.n_prompt, first.threshold, first.value) == (2, 2.5, 2.5)
    assert first.message_id == log.samples[0].output.message.id
    assert second.scores.tolist() == [2.0]
    for source in (log.location, log.samples[0], scores(log)[0], scores(log)[0].metadata):
        assert read_token_scores(source)[0].scores.tolist() == [1.0, 4.0]  # type: ignore[arg-type]


def test_they_can_be_left_out_and_then_there_are_none(tmp_path: Path) -> None:
    log = run([call([1.0])], probe_score(PROBE, token_scores=False), folder=tmp_path)
    assert read_token_scores(log) == []
    assert not list(tmp_path.glob("**/scores-*"))


def test_without_a_place_nothing_is_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("INSPECT_LENS_DIR", raising=False)
    assert save_token_scores([record([1.0])]) is None
    monkeypatch.setenv("INSPECT_LENS_DIR", str(tmp_path))
    reference = save_token_scores([record([1.0])])
    assert reference is not None
    assert (tmp_path / reference["uri"]).is_file()


def test_a_moved_folder_is_found_and_a_missing_or_other_file_is_named(tmp_path: Path) -> None:
    log = run([call([1.0])], probe_score(PROBE), folder=tmp_path / "old")
    shutil.move(tmp_path / "old", tmp_path / "new")
    know_root(str(tmp_path / "new"))
    moved = next((tmp_path / "new").glob("*.eval"))
    log = read_eval_log(str(moved))
    assert read_token_scores(log)[0].scores.tolist() == [1.0]
    (file,) = (tmp_path / "new").glob("*.lens/scores-*")
    file.write_bytes(file.read_bytes()[:-1] + b"\x01")
    with pytest.raises(ArtifactError, match="restore"):
        read_token_scores(log)
    file.unlink()
    with pytest.raises(ArtifactError, match="is missing"):
        read_token_scores(log)
    with pytest.raises(ArtifactError, match="not a reference"):
        read_token_scores({"$lens": "activations/1", "uri": "x"})


@pytest.mark.parametrize(
    "where",
    [{"positions": [2, 10**13]}, {"positions": [2, 10**40]}, {"range": [2, 10**40]},
     {"range": [2, 6, 2]}],
)  # fmt: skip
def test_a_log_may_refer_to_any_positions_of_the_engines_scores(
    tmp_path: Path, where: dict[str, list[int]]
) -> None:
    by = ScoredBy("p", "a" * 64, "b" * 64, "tokens", (1,), "resid_post", "completion")
    column = Column(by, range(2, 6), np.arange(4, dtype=np.float32))
    data = ScoreData(columns=(column,), prompt_token_ids=(7, 8), token_ids=(1, 2, 3, 4))
    file = tmp_path / "mine.scores"
    handle, content = ProbeScores.keep(data, uri=str(file), root=None)
    file.write_bytes(content)
    know_root(str(tmp_path))
    reference = save_token_scores(engine_records(handle))
    assert reference is not None
    (found,) = read_token_scores(reference)
    assert found.positions.tolist() == [2, 3, 4, 5]
    assert (found.scores.tolist(), found.token_ids.tolist()) == ([0, 1, 2, 3], [1, 2, 3, 4])
    (said,) = json.loads(reference["records"])
    other = {k: v for k, v in said.items() if k != "range"} | where
    with pytest.raises(ArtifactError, match="does not hold the scores that the log refers to"):
        read_token_scores(reference | {"records": json.dumps([other])})
