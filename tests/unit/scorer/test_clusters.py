"""Metrics where samples come in clusters: against the library's own functions, and on copies."""

from __future__ import annotations

import logging
import math
from typing import Any

import numpy as np
import pytest
from inspect_ai.scorer import SampleScore, Score

from inspect_lens.errors import SpecError
from inspect_lens.probe import average_precision as area_under_precision
from inspect_lens.probe import (
    bootstrap_interval,
    count_groups,
    delong_interval,
    expected_calibration_error,
    rate_interval,
)
from inspect_lens.scorer import (
    at_threshold,
    auroc_metric,
    average_precision_metric,
    calibration_error,
    recall_at_fpr_metric,
    threshold_accuracy,
)

METRICS: dict[str, Any] = {
    "auroc": auroc_metric,
    "average_precision": average_precision_metric,
    "recall_at_fpr": lambda **k: recall_at_fpr_metric(k.pop("fpr", 0.1), allow_few=True, **k),
    "threshold_accuracy": lambda **k: threshold_accuracy(0.5, **k),
    "fpr": lambda **k: at_threshold(k.pop("threshold", 1.0), **k),
    "recall": lambda **k: at_threshold(k.pop("threshold", 0.6), **k),
    "calibration_error": lambda **k: calibration_error(value="probability", **k),
}


def drawn(n: int, *, copies: int = 1, seed: int = 0) -> list[SampleScore]:
    """Samples of clusters that hold one thing each, `copies` times."""
    rng = np.random.default_rng(seed)
    made = []
    for i in range(n):
        value = float(np.clip(0.5 + 0.3 * rng.standard_normal() + 0.2 * (i % 2), 0.0, 1.0))
        made += [
            SampleScore(
                score=Score(value=value),
                sample_id=f"{i}-{k}",
                sample_metadata={"label": i % 2, "scenario": f"s{i}"},
            )
            for k in range(copies)
        ]
    return made


def width(found: dict[str, float], name: str) -> float:
    return found[f"{name}_high"] - found[f"{name}_low"]


@pytest.mark.parametrize("name", METRICS)
def test_copies_of_a_sample_make_nobody_surer(name: str) -> None:
    once, thrice = drawn(60), drawn(60, copies=3)
    alone = METRICS[name](interval=True)(once)
    copied = METRICS[name](interval=True)(thrice)
    clustered = METRICS[name](interval=True, cluster="scenario")(thrice)
    assert clustered[name] == pytest.approx(copied[name])
    if name == "recall_at_fpr":
        # Its threshold is an order statistic, and there are three times as many to choose from.
        assert width(clustered, name) > width(copied, name)
        return
    assert alone[name] == pytest.approx(copied[name])
    assert width(copied, name) < 0.75 * width(alone, name)
    assert 0.85 < width(clustered, name) / width(alone, name) < 1.25


def test_the_intervals_are_those_of_the_library() -> None:
    scores = drawn(40, copies=2)
    y = [s.sample_metadata["label"] for s in scores if s.sample_metadata]
    v = [s.score.as_float() for s in scores]
    g = [s.sample_metadata["scenario"] for s in scores if s.sample_metadata]

    def bounds(name: str) -> tuple[float, float]:
        found = METRICS[name](interval=True, cluster="scenario")(scores)
        return found[f"{name}_low"], found[f"{name}_high"]

    exact = delong_interval(y, v, groups=g)
    if exact.method == "delong":  # which takes samples as independent
        exact = bootstrap_interval(y, v, groups=g, n_resamples=1000)
    assert bounds("auroc") == (exact.low, exact.high)
    wanted = bootstrap_interval(y, v, statistic=area_under_precision, groups=g, n_resamples=1000)
    assert bounds("average_precision") == (wanted.low, wanted.high)
    right = [(value > 0.5) == bool(label) for value, label in zip(v, y, strict=True)]
    wanted = rate_interval(right, g)
    assert bounds("threshold_accuracy") == (wanted.low, wanted.high)
    assert METRICS["calibration_error"](cluster="scenario")(scores) == pytest.approx(
        expected_calibration_error(y, v, n_bins=15)
    )


def test_too_few_clusters_say_so(caplog: pytest.LogCaptureFixture) -> None:
    scores = drawn(6, copies=20)
    y = [s.sample_metadata["label"] for s in scores if s.sample_metadata]
    g = [s.sample_metadata["scenario"] for s in scores if s.sample_metadata]
    assert count_groups(y, g).too_few
    with caplog.at_level(logging.WARNING):
        found = METRICS["average_precision"](interval=True, cluster="scenario")(scores)
    assert math.isnan(found["average_precision_low"])
    assert "too few groups (6; 3 with positives" in caplog.text
    # The AUROC has an exact interval of three clusters a class, which says next to nothing.
    area = METRICS["auroc"](interval=True, cluster="scenario")(scores)
    assert width(area, "auroc") > 0.5 > width(METRICS["auroc"](interval=True)(scores), "auroc")


def test_control_samples_have_clusters_too() -> None:
    scores = drawn(40, copies=2)
    for i, sample in enumerate(scores):
        assert sample.sample_metadata is not None
        sample.sample_metadata["control"] = i < 20
    rate = METRICS["fpr"](threshold=0.5, control="control", interval=True, cluster="scenario")(
        scores
    )
    wanted = rate_interval(
        [s.score.as_float() > 0.5 for s in scores[:20]], [i // 2 for i in range(20)]
    )
    assert (rate["fpr_low"], rate["fpr_high"]) == (wanted.low, wanted.high)
    found = METRICS["recall_at_fpr"](fpr=0.2, control="control", interval=True, cluster="scenario")
    bounds = found(scores)
    assert bounds["recall_at_fpr_low"] <= bounds["recall_at_fpr"]


def test_a_sample_without_a_cluster_is_named() -> None:
    with pytest.raises(SpecError, match="cluster='town': sample 0-0 has no such metadata"):
        METRICS["auroc"](cluster="town")(drawn(4))
    scores = drawn(4)
    assert scores[1].sample_metadata is not None
    scores[1].sample_metadata["scenario"] = float("nan")
    with pytest.raises(SpecError, match="sample 1-0"):
        METRICS["auroc"](cluster="scenario")(scores)
