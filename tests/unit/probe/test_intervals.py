from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from scipy.stats import beta, t

from inspect_lens.errors import SpecError
from inspect_lens.probe import (
    auroc,
    average_precision,
    bootstrap_interval,
    clopper_pearson,
    conformal_threshold,
    delong_interval,
    recall_at_fpr,
)


def test_none_of_299_has_an_upper_bound_near_one_percent() -> None:
    assert clopper_pearson(0, 299, confidence=0.9).high == pytest.approx(1 - 0.05 ** (1 / 299))
    assert clopper_pearson(0, 299).low == 0.0


def test_its_upper_bound_is_the_exact_quantile_of_the_true_rate_after_calibration() -> None:
    n = 300
    scores = np.arange(float(n))
    above = int((scores > conformal_threshold(scores, 0.01)).sum())
    high = clopper_pearson(above, n).high
    assert high == pytest.approx(beta.ppf(0.975, above + 1, n - above))


def test_clopper_pearson_refuses_impossible_counts() -> None:
    for k, n in [(0, 0), (-1, 5), (6, 5)]:
        with pytest.raises(SpecError):
            clopper_pearson(k, n)


def _gaussian(rng: np.random.Generator, n: int, d: float) -> tuple[np.ndarray, np.ndarray]:
    return np.repeat([1, 0], n), np.concatenate([rng.normal(d, 1, n), rng.normal(0, 1, n)])


def test_delong_variance_equals_its_definition() -> None:
    rng = np.random.default_rng(3)
    labels, scores = _gaussian(rng, 30, 1.0)
    scores = np.round(scores, 1)  # ties
    x, y = scores[labels == 1], scores[labels == 0]
    psi = (x[:, None] > y) + 0.5 * (x[:, None] == y)
    parts = psi.mean(1).var(ddof=1) / 30, psi.mean(0).var(ddof=1) / 30
    a = psi.mean()
    free = sum(parts) ** 2 / (parts[0] ** 2 / 29 + parts[1] ** 2 / 29)
    q1, q2 = a / (2 - a), 2 * a**2 / (1 + a)
    exponential = (a * (1 - a) + 29 * (q1 - a**2) + 29 * (q2 - a**2)) / 900
    z = t.ppf(0.975, free) * math.sqrt(max(sum(parts), exponential)) / (a * (1 - a))
    logit = math.log(a / (1 - a))
    interval = delong_interval(labels, scores)
    assert interval.low == pytest.approx(1 / (1 + math.exp(z - logit)))
    assert interval.high == pytest.approx(1 / (1 + math.exp(-z - logit)))


def test_perfect_separation_gets_a_conservative_interval_not_a_point() -> None:
    interval = delong_interval([1] * 50 + [0] * 80, list(range(130, 80, -1)) + list(range(80)))
    assert (interval.low, interval.high) == (clopper_pearson(50, 50).low, 1.0)
    assert "smaller class" in interval.method


def test_one_class_has_no_interval() -> None:
    assert math.isnan(delong_interval([1, 1], [0.0, 1.0]).low)
    assert math.isnan(bootstrap_interval([0, 0], [0.0, 1.0], n_resamples=10).high)
    with pytest.raises(SpecError, match="allowed is 1 or more"):
        bootstrap_interval([0, 1], [0.0, 1.0], n_resamples=0)


@pytest.mark.parametrize("method", ["percentile", "bca"])
@pytest.mark.parametrize("statistic", [auroc, average_precision])
def test_draws_that_are_all_alike_are_no_certainty(method: Any, statistic: Any) -> None:
    """Ten positives that all lie above had a recall of [1, 1]."""
    labels, scores = [1] * 10 + [0] * 50, list(range(60, 0, -1))
    made = bootstrap_interval(labels, scores, statistic=statistic, method=method, n_resamples=100)
    assert math.isnan(made.low)
    assert math.isnan(made.high)


def test_bootstrap_agrees_with_delong_and_repeats() -> None:
    labels, scores = _gaussian(np.random.default_rng(5), 150, 1.0)
    one = bootstrap_interval(labels, scores, n_resamples=1000, seed=7)
    assert one == bootstrap_interval(labels, scores, n_resamples=1000, seed=7)
    assert one != bootstrap_interval(labels, scores, n_resamples=1000, seed=8)
    delong = delong_interval(labels, scores)
    assert one.low == pytest.approx(delong.low, abs=0.015)
    assert one.high == pytest.approx(delong.high, abs=0.015)


def test_cluster_bootstrap_is_wider_when_groups_are_copies() -> None:
    labels, scores = _gaussian(np.random.default_rng(6), 30, 1.0)
    groups = [str(i % 30) for i in range(60)]
    many = (np.tile(labels, 5), np.tile(scores, 5))
    naive = bootstrap_interval(*many, n_resamples=500)
    clustered = bootstrap_interval(*many, groups=groups * 5, n_resamples=500)
    assert clustered.high - clustered.low > 1.5 * (naive.high - naive.low)
    assert clustered.method == "cluster bootstrap"


def test_a_missing_class_hides_no_wrong_argument() -> None:
    assert math.isnan(bootstrap_interval([1, 1], [0.0, 1.0]).low)
    with pytest.raises(SpecError, match="n_resamples=0"):
        bootstrap_interval([1, 1], [0.0, 1.0], n_resamples=0)
    assert math.isnan(recall_at_fpr([], [1.0]).recall)
    with pytest.raises(SpecError, match="fpr"):
        recall_at_fpr([], [1.0], fpr=2.0)


def test_draws_without_a_value_are_not_left_out_in_silence() -> None:
    labels, scores = _gaussian(np.random.default_rng(8), 40, 1.0)

    def often(y: Any, s: Any) -> float:
        return math.nan if s[0] > 0 else auroc(y, s)

    some = bootstrap_interval(labels, scores, statistic=often, n_resamples=100)
    assert math.isnan(some.low)
    assert math.isnan(some.high)
