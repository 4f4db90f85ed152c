from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import roc_auc_score

from inspect_lens.errors import SpecError
from inspect_lens.probe import (
    auroc,
    average_precision,
    conformal_threshold,
    partial_auroc,
    recall_at_fpr,
    required_negatives,
    roc_curve,
    split_classes,
)

SCORES = st.lists(
    st.tuples(st.booleans(), st.integers(-5, 5)), min_size=2, max_size=60
)  # small integers: many ties


@given(SCORES)
def test_auroc_equals_sklearn_with_ties(rows: list[tuple[bool, int]]) -> None:
    labels, scores = zip(*rows, strict=True)
    if len(set(labels)) < 2:
        assert math.isnan(auroc(labels, scores))
    else:
        assert auroc(labels, scores) == pytest.approx(roc_auc_score(labels, scores), abs=1e-12)


@pytest.mark.parametrize(
    ("labels", "scores"),
    [([0, 1], [0.0, math.nan]), ([0, 2], [0.0, 1.0]), ([0, 1, 1], [0.0, 1.0]), ([[0]], [[1.0]])],
)
def test_wrong_input_is_refused(labels: list[int], scores: list[float]) -> None:
    with pytest.raises(SpecError):
        auroc(labels, scores)


def test_split_classes_keeps_order() -> None:
    pos, neg = split_classes([1, 0, 1], [3.0, 1.0, 2.0])
    assert pos.tolist() == [3.0, 2.0]
    assert neg.tolist() == [1.0]


@pytest.mark.parametrize(("fpr", "need"), [(0.01, 300), (0.05, 60), (0.001, 3000), (0.1, 30)])
def test_required_negatives(fpr: float, need: int) -> None:
    assert required_negatives(fpr) == need


@pytest.mark.parametrize(("n", "rank"), [(99, 99), (299, 297), (300, 298), (999, 990)])
def test_conformal_threshold_is_the_order_statistic(n: int, rank: int) -> None:
    scores = np.random.default_rng(1).permutation(n).astype(float) + 1
    assert conformal_threshold(scores, 0.01) == rank


def test_conformal_threshold_needs_enough_scores() -> None:
    with pytest.raises(SpecError, match="at least 99"):
        conformal_threshold(np.arange(98.0), 0.01)
    with pytest.raises(SpecError, match="NaN or infinite"):
        conformal_threshold([math.nan] * 200, 0.01)


@pytest.mark.parametrize("n", [99, 150, 300, 1020])
def test_a_new_control_score_exceeds_the_threshold_at_most_at_the_nominal_rate(n: int) -> None:
    rng = np.random.default_rng(n)
    repeats = 2000
    control = rng.normal(size=(repeats, n))
    fresh = rng.normal(size=repeats)
    above = np.mean([f > conformal_threshold(c, 0.01) for c, f in zip(control, fresh, strict=True)])
    exact = (n + 1 - -(-99 * (n + 1) // 100)) / (n + 1)
    assert exact <= 0.01
    assert above == pytest.approx(exact, abs=4 * math.sqrt(0.01 / repeats))


def test_recall_at_fpr() -> None:
    negatives = np.arange(999.0)
    point = recall_at_fpr([989.0, 989.5, 2000.0, 5.0], negatives)
    assert point.threshold == 989.0
    assert point.recall == 0.5
    assert point.fpr == 9 / 999
    assert point[3:] == (4, 999)


def test_recall_at_one_percent_with_few_negatives_is_refused_unless_allowed() -> None:
    with pytest.raises(SpecError, match="300 negatives or more"):
        recall_at_fpr([1.0], np.arange(299.0))
    assert recall_at_fpr([1e9], np.arange(299.0), allow_few=True).recall == 1.0
    with pytest.raises(SpecError, match="at least 99"):
        recall_at_fpr([1.0], np.arange(50.0), allow_few=True)


def test_recall_of_one_class_is_nan() -> None:
    assert math.isnan(recall_at_fpr([], np.arange(500.0)).recall)
    assert math.isnan(recall_at_fpr([1.0], []).recall)


@pytest.mark.parametrize("fpr", [0.0, 1.0, -0.1, math.nan])
def test_a_rate_outside_0_1_is_refused(fpr: float) -> None:
    with pytest.raises(SpecError, match="between 0 and 1"):
        conformal_threshold(np.arange(500.0), fpr)


def test_infinite_scores_have_a_place_in_the_ranking() -> None:
    labels, scores = [0, 1, 0, 1, 1], [-np.inf, 0.0, 1.0, 2.0, np.inf]
    finite = [-9.0, 0.0, 1.0, 2.0, 9.0]
    for rank in (average_precision, partial_auroc):
        assert rank(labels, scores) == rank(labels, finite)
    curve = roc_curve(labels, scores)
    np.testing.assert_array_equal(curve.tpr, roc_curve(labels, finite).tpr)
    assert curve.thresholds.tolist() == [np.inf, np.inf, 2.0, 1.0, 0.0, -np.inf]
