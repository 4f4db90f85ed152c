"""Latents of an autoencoder in planted rows: values, tokens, turns, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from inspect_ai import score

from inspect_lens.errors import ArtifactError, SpecError
from inspect_lens.reading import read_token_scores
from inspect_lens.sae import SparseEncoder
from inspect_lens.scorer import sae_feature, threshold_accuracy
from tests.kit.mock_evals import WIDTH, call, metric_values, run, scores

THRESHOLD = np.full(WIDTH, 1.5, dtype=np.float32)
EYE = np.eye(WIDTH, dtype=np.float32)
OUTPUTS = [([1.0, 3.0, 2.0], [0.0, 1.0, 0.5]), ([-5.0, 1.5], [4.0, 0.0])]


def encoder(**facts: Any) -> SparseEncoder:
    known: dict[str, Any] = {"threshold": THRESHOLD, "hook": "blocks.1.hook_resid_post"}
    return SparseEncoder(weight=EYE, bias=np.zeros(WIDTH, np.float32), **known | facts)


def outputs(folder: Path | None = None) -> list[Any]:
    return [call(*axes, folder=folder) for axes in OUTPUTS]


def test_a_latent_is_pooled_over_the_tokens_of_the_completion(tmp_path: Path) -> None:
    log = run(outputs(), sae_feature(encoder(), [0, 1]), folder=tmp_path)
    first, second = scores(log)
    assert first.value == {"latent_0": 3.0, "latent_1": 0.0}
    assert second.value == {"latent_0": 0.0, "latent_1": 4.0}
    assert first.answer is None
    assert first.metadata is not None
    assert first.metadata["latents"]["latent_0"] == {
        "latent": 0, "n_active": 2, "n_tokens": 3, "peak": 3, "source": "rows", "turn": 0,
    }  # fmt: skip
    assert first.metadata["latents"]["latent_1"]["peak"] is None
    assert (first.metadata["layer"], first.metadata["site"]) == (1, "resid_post")
    assert "active on 2, most at position 3" in (first.explanation or "")
    records = read_token_scores(log)
    assert [r.probe for r in records] == ["latent_0", "latent_1"] * 2
    assert [r.scores.tolist() for r in records[:2]] == [[0.0, 3.0, 2.0], [0.0, 0.0, 0.0]]
    assert records[0].positions.tolist() == [2, 3, 4]
    assert records[0].probe_sha256 != records[1].probe_sha256
    assert log.results is not None
    means = {each.name: each.metrics["mean"].value for each in log.results.scores}
    assert means == {"latent_0": 1.5, "latent_1": 2.0}


def test_pools_positions_and_other_kinds_of_encoders(tmp_path: Path) -> None:
    for options, kind, value in (
        ({"pool": "mean"}, {}, 5 / 3),
        ({"positions": "last"}, {}, 2.0),
        ({"pool": "mean"}, {"threshold": None}, 2.0),
        ({"positions": [2]}, {}, 0.0),
        ({"pool": "mean", "positions": "all"}, {}, 41.0),
    ):
        made = sae_feature(encoder(**kind), {"axis": 0}, **options)
        (found,) = scores(run(outputs()[:1], made, folder=tmp_path))
        got: Any = found.value
        assert got == {"axis": pytest.approx(value)}
    # Of two that are positive, a TopK of one keeps the larger.
    rows = [call([2.0, 1.0], [1.0, 3.0])]
    made = sae_feature(encoder(threshold=None, top_k=1), [0, 1], pool="mean", token_scores=False)
    log = run(rows, made, folder=tmp_path)
    assert scores(log)[0].value == {"latent_0": 1.0, "latent_1": 1.5}
    assert read_token_scores(log) == []


def test_a_threshold_makes_a_verdict_and_serves_the_metrics(tmp_path: Path) -> None:
    made = sae_feature(encoder(), 0, threshold=2.5)
    log = run(outputs(tmp_path), made, folder=tmp_path, labels=[1, 0])
    assert [s.answer for s in scores(log)] == ["above threshold", "below threshold"]
    metrics = {"*": [threshold_accuracy(key="latent_0")]}
    again = score(log, made, metrics=metrics, action="overwrite", display="none")
    assert list(metric_values(again).values()) == [1.0]
    with pytest.raises(SpecError, match="allowed is a number"):
        sae_feature(encoder(), 0, threshold="fpr=0.01")  # type: ignore[arg-type]


def test_a_file_is_read_by_its_path(tmp_path: Path) -> None:
    file = tmp_path / "params.npz"
    np.savez(file, W_enc=EYE, b_enc=np.zeros(WIDTH), threshold=THRESHOLD)
    with pytest.raises(SpecError, match="pass layer="):
        sae_feature(str(file), 0)
    log = run(outputs(), sae_feature(str(file), [0], layer=1), folder=tmp_path)
    assert [s.value for s in scores(log)] == [{"latent_0": 3.0}, {"latent_0": 0.0}]
    assert log.eval.scorers is not None
    assert (log.eval.scorers[0].options or {})["sae"] == str(file)
    with pytest.raises(ArtifactError, match="needed are"):
        sae_feature(str(tmp_path / "nowhere"), 0)


@pytest.mark.parametrize(
    ("latents", "options", "words"),
    [
        (WIDTH, {}, f"0 to {WIDTH - 1}"),
        ([], {}, "at least one"),
        ([1, 1], {}, "twice"),
        ({"a": True}, {}, "allowed is an integer"),
        (0, {"source": "engine"}, "source="),
        (0, {"over": "some"}, "over="),
        (0, {"norm_scale": 2.0}, "norm_scale"),
        (0, {"pool": "attention"}, "attention"),
    ],
)
def test_wrong_arguments_are_refused_at_once(
    latents: Any, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(SpecError, match=words):
        sae_feature(encoder(), latents, **options)


def test_rows_that_are_not_there_or_of_another_width_are_errors(tmp_path: Path) -> None:
    narrow = SparseEncoder(weight=EYE[:, :3], bias=np.zeros(WIDTH, np.float32))
    for made, words in (
        (sae_feature(narrow, 0, layer=1), r"allowed is \(rows, 3\)"),
        (sae_feature(encoder(hook="blocks.7.hook_resid_post"), 0, source="captured"), "layer 7"),
    ):
        log = run(outputs(), made, folder=tmp_path)
        assert log.error is not None
        with pytest.raises(AssertionError, match=words):
            raise AssertionError(log.error.message)
