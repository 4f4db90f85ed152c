from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binomtest, bootstrap
from scipy.stats import t as student
from sklearn.calibration import calibration_curve
from sklearn.metrics import (
    average_precision_score,
    brier_score_loss,
    roc_auc_score,
)
from sklearn.metrics import roc_curve as sklearn_roc_curve

from inspect_lens.errors import SpecError
from inspect_lens.probe import (
    auroc,
    average_precision,
    bootstrap_interval,
    brier_score,
    clopper_pearson,
    compare_auroc,
    expected_calibration_error,
    partial_auroc,
    reliability_curve,
    roc_band,
    roc_curve,
)


@st.composite
def scored(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    """Labels of both classes, and scores with many ties."""
    n = draw(st.integers(2, 40))
    y = np.array(draw(st.lists(st.booleans(), min_size=n, max_size=n)))
    y[0], y[1] = True, False
    grid = draw(st.sampled_from([3, 10, 1000]))
    s = np.array(draw(st.lists(st.integers(0, grid), min_size=n, max_size=n))) / grid
    return y, s


@settings(max_examples=200, deadline=None)
@given(scored(), st.sampled_from([0.01, 0.1, 0.35, 1.0]))
def test_rankings_equal_scikit_learn(case: tuple[np.ndarray, np.ndarray], rate: float) -> None:
    y, s = case
    assert average_precision(y, s) == pytest.approx(average_precision_score(y, s), abs=1e-9)
    assert brier_score(y, s) == pytest.approx(brier_score_loss(y, s))
    curve, (fpr, tpr, _) = roc_curve(y, s), sklearn_roc_curve(y, s, drop_intermediate=False)
    np.testing.assert_allclose(curve.fpr, fpr, atol=1e-12)
    np.testing.assert_allclose(curve.tpr, tpr, atol=1e-12)
    x, up = (
        np.append(fpr[fpr <= rate], rate),
        np.append(tpr[fpr <= rate], np.interp(rate, fpr, tpr)),
    )
    assert partial_auroc(y, s, max_fpr=rate) == pytest.approx(np.trapezoid(up, x) / rate, abs=1e-9)
    assert float(np.trapezoid(curve.tpr, curve.fpr)) == pytest.approx(auroc(y, s))


def test_calibration_equals_scikit_learn() -> None:
    rng = np.random.default_rng(0)
    p = rng.beta(2, 3, size=4000)
    y = rng.random(4000) < p**1.3
    observed, predicted = calibration_curve(y, p, n_bins=15)
    curve = reliability_curve(y, p)
    np.testing.assert_allclose(curve.observed, observed)
    np.testing.assert_allclose(curve.predicted, predicted)
    by_hand = sum(
        m.mean() * abs(p[m].mean() - y[m].mean())
        for k in range(15)
        if (m := (p >= k / 15) & (p < (k + 1) / 15)).any()
    )
    assert expected_calibration_error(y, p) == pytest.approx(by_hand)
    with pytest.raises(SpecError, match="calibrate scores first"):
        brier_score([0, 1], [0.5, 1.5])


def test_delong_equals_its_definition() -> None:
    rng = np.random.default_rng(0)
    y = np.arange(41) % 3 == 0
    a, b = (np.round(rng.normal(size=41) + shift * y, 1) for shift in (1.0, 0.4))
    kernel = {}
    for name, s in (("a", a), ("b", b)):
        d = s[y][:, None] - s[~y][None]
        kernel[name] = (d > 0) + 0.5 * (d == 0)
    m, n = kernel["a"].shape
    s10 = np.cov([kernel["a"].mean(1), kernel["b"].mean(1)])
    s01 = np.cov([kernel["a"].mean(0), kernel["b"].mean(0)])
    covariance = s10 / m + s01 / n
    spread = math.sqrt(covariance[0, 0] + covariance[1, 1] - 2 * covariance[0, 1])
    made = compare_auroc(y, a, b)
    z = (kernel["a"].mean() - kernel["b"].mean()) / spread
    assert made.z == pytest.approx(z, abs=1e-9)
    # Student's t, with the degrees of freedom of two independent variances.
    parts = [v[0, 0] + v[1, 1] - 2 * v[0, 1] for v in (s10 / m, s01 / n)]
    free = sum(parts) ** 2 / (parts[0] ** 2 / (m - 1) + parts[1] ** 2 / (n - 1))
    assert made.p_value == pytest.approx(2 * student.sf(abs(z), free), abs=1e-9)
    assert made.auroc_a == pytest.approx(roc_auc_score(y, a))
    assert made.interval.high - made.difference == pytest.approx(
        student.ppf(0.975, free) * spread, abs=1e-9
    )
    assert compare_auroc(y, a, a).p_value == 1.0


def test_bca_equals_scipy() -> None:
    rng = np.random.default_rng(1)
    positive, negative = rng.normal(1.5, 1, size=25), rng.exponential(size=35)
    y, s = np.repeat([1, 0], [25, 35]), np.concatenate([positive, negative])
    ours = bootstrap_interval(y, s, method="bca", n_resamples=20_000)

    def area(p: np.ndarray, q: np.ndarray, axis: int = -1) -> np.ndarray:
        d = p[..., :, None] - q[..., None, :]
        return ((d > 0) + 0.5 * (d == 0)).mean(axis=(-2, -1))

    theirs = bootstrap(
        (positive, negative), area, method="BCa", n_resamples=4000, rng=rng, vectorized=True
    ).confidence_interval
    assert ours.low == pytest.approx(theirs.low, abs=0.01)
    assert ours.high == pytest.approx(theirs.high, abs=0.01)
    percentile = bootstrap_interval(y, s, n_resamples=20_000)
    assert abs(percentile.low - ours.low) > 0.005


def test_bootstrap_of_any_statistic_and_of_clusters_agree_with_the_fast_way() -> None:
    rng = np.random.default_rng(0)
    y, s = np.arange(60) % 2, np.round(rng.normal(size=60) + np.arange(60) % 2, 1)
    groups = [i // 4 for i in range(60)]
    for method in ("percentile", "bca"):
        for g in (None, groups):
            fast = bootstrap_interval(y, s, groups=g, method=method, n_resamples=300)
            slow = bootstrap_interval(
                y, s, groups=g, method=method, n_resamples=300, statistic=lambda a, b: auroc(a, b)
            )
            assert (fast.low, fast.high) == pytest.approx((slow.low, slow.high), abs=0.004)


class TestCoverage:
    """Each interval holds the truth in 93 to 97 of 100 simulated sets."""

    SETS = 1000
    D = 1.2
    TRUTH = 0.5 * (1.0 + math.erf(D / 2.0))

    @staticmethod
    def share(hits: list[bool]) -> float:
        assert len(hits) >= 1000
        return sum(hits) / len(hits)

    def sets(self, n: int, seed: int) -> list[tuple[np.ndarray, np.ndarray]]:
        rng, y = np.random.default_rng(seed), np.repeat([0, 1], n)
        return [(y, rng.normal(size=2 * n) + self.D * y) for _ in range(self.SETS)]

    def test_delong(self) -> None:
        from inspect_lens.probe import delong_interval

        made = [delong_interval(y, s) for y, s in self.sets(60, 1)]
        assert 0.93 <= self.share([i.low <= self.TRUTH <= i.high for i in made]) <= 0.98

    def test_stratified_bootstrap(self) -> None:
        made = [
            bootstrap_interval(y, s, n_resamples=400, seed=i)
            for i, (y, s) in enumerate(self.sets(60, 2))
        ]
        assert 0.93 <= self.share([i.low <= self.TRUTH <= i.high for i in made]) <= 0.98

    def test_difference_of_two_probes(self) -> None:
        rng, y = np.random.default_rng(4), np.repeat([0, 1], 80)
        hits = []
        for _ in range(self.SETS):
            shared = rng.normal(size=160)
            a, b = (shared + rng.normal(size=160) + d * y for d in (2.0, 1.4))
            truth = 0.5 * (math.erf(1.0 / math.sqrt(2)) - math.erf(0.7 / math.sqrt(2)))
            made = compare_auroc(y, a, b).interval
            hits.append(made.low <= truth <= made.high)
        assert 0.93 <= self.share(hits) <= 0.97

    def test_threshold(self) -> None:
        """The realised rate is the nominal one, and its interval holds the true one."""
        from inspect_lens.probe import conformal_threshold

        rng, n, rate = np.random.default_rng(6), 1999, 0.05
        above = n - math.ceil((1 - rate) * (n + 1))
        interval, truths = clopper_pearson(above, n), []
        for _ in range(self.SETS):
            scores = rng.normal(size=n)
            threshold = conformal_threshold(scores, rate)
            assert int((scores > threshold).sum()) == above
            truths.append(0.5 * math.erfc(threshold / math.sqrt(2)))
        assert 0.93 <= self.share([interval.low <= t <= interval.high for t in truths]) <= 0.97
        error = math.sqrt(rate * (1 - rate) / n / self.SETS)
        assert abs(float(np.mean(truths)) - rate) < 4 * error


def test_groups_of_one_sample_are_samples_and_copies_count_once() -> None:
    rng, y = np.random.default_rng(0), np.arange(80) % 2
    a, b = (rng.normal(size=80) + d * y for d in (2.0, 1.0))
    plain = compare_auroc(y, a, b)
    assert compare_auroc(y, a, b, groups=range(80)) == plain
    # Every sample four times: DeLong's test takes them for new ones, the groups do not.
    four = [np.repeat(v, 4) for v in (y, a, b)]
    groups = np.repeat(np.arange(80), 4).tolist()
    copies = compare_auroc(*four, groups=groups)
    assert copies.difference == pytest.approx(plain.difference)
    assert copies.z == pytest.approx(plain.z, rel=0.1)
    assert copies.p_value == pytest.approx(plain.p_value, abs=0.02)
    assert compare_auroc(*four).z == pytest.approx(2 * plain.z, rel=0.02)
    other = compare_auroc(four[0], four[2], four[1], groups=groups)
    assert (other.difference, other.p_value) == (-copies.difference, copies.p_value)
    same = compare_auroc(four[0], four[1], four[1], groups=groups)
    assert (same.z, same.p_value) == (0.0, 1.0)
    assert compare_auroc(y, a, b, groups=["x"] * 80).too_few


def test_the_band_holds_the_true_curve() -> None:
    rng, d = np.random.default_rng(0), 1.5
    from scipy.stats import norm

    inside = []
    for seed in range(25):
        y = np.repeat([0, 1], 150)
        s = rng.normal(size=300) + d * y
        grid, low, high = roc_band(y, s, grid=[0.1, 0.2, 0.4], n_resamples=200, seed=seed)
        truth = norm.sf(norm.isf(grid) - d)
        inside.append((low <= truth) & (truth <= high))
    assert np.mean(inside) > 0.88
    assert (low < high).all()


def test_a_class_of_one_sample_has_a_variance_too() -> None:
    """Its share of the error is not measurable, so the interval has to be the careful one."""
    from inspect_lens.probe import delong_interval

    rng, truth, hits = np.random.default_rng(0), 0.5 * (1.0 + math.erf(0.6)), []
    y = np.r_[1, np.zeros(200)]
    for _ in range(300):
        made = delong_interval(y, rng.normal(size=201) + 1.2 * y)
        hits.append(made.low <= truth <= made.high)
    assert np.mean(hits) >= 0.95


def test_a_bin_holds_its_upper_edge_as_in_scikit_learn() -> None:
    p = np.array([0.0, 0.2, 0.2, 0.4, 0.6, 0.8, 1.0, 0.1, 0.30000000000000004])
    y = np.array([0, 1, 0, 1, 1, 0, 1, 0, 1])
    for n_bins in (5, 10, 15):
        observed, predicted = calibration_curve(y, p, n_bins=n_bins)
        curve = reliability_curve(y, p, n_bins=n_bins)
        np.testing.assert_allclose(curve.observed, observed)
        np.testing.assert_allclose(curve.predicted, predicted)
    with pytest.raises(SpecError, match="n_bins=0"):
        reliability_curve(y, p, n_bins=0)


def test_rates_of_a_curve_are_the_rates_that_were_counted() -> None:
    for n in range(1, 60):
        curve = roc_curve(np.r_[np.zeros(n), 1], np.arange(n + 1.0))
        assert set(curve.fpr.tolist()) == {k / n for k in range(n + 1)}


def test_one_group_is_no_cluster_bootstrap() -> None:
    y, s = np.arange(20) % 2, np.random.default_rng(0).normal(size=20)
    with pytest.raises(SpecError, match="two groups or more"):
        bootstrap_interval(y, s, groups=["a"] * 20)
    # One group of each class: what is left without either has no area, so BCa is not defined.
    made = bootstrap_interval(y, s, groups=y.tolist(), method="bca", n_resamples=50)
    assert math.isnan(made.low)


def test_groups_may_be_an_array_and_many() -> None:
    import tracemalloc

    rng, n = np.random.default_rng(0), 6000
    y, groups = np.arange(n) % 2, np.arange(n) // 2
    s = rng.normal(size=n) + y
    few = bootstrap_interval(y, s, groups=groups, n_resamples=40)  # type: ignore[arg-type]
    assert few == bootstrap_interval(y, s, groups=groups.tolist(), n_resamples=40)
    tracemalloc.start()
    bootstrap_interval(y, s, groups=groups.tolist(), n_resamples=20, method="bca")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2.5e8, "grows with groups times scores"


@pytest.mark.parametrize("n", [1, 2, 7, 150, 20_000])
def test_the_exact_interval_of_a_proportion_is_that_of_scipy(n: int) -> None:
    for hits in {0, 1, n // 3, n - 1, n}:
        for confidence in (0.5, 0.95, 0.999):
            expected = binomtest(hits, n).proportion_ci(confidence, method="exact")
            found = clopper_pearson(hits, n, confidence=confidence)
            assert (found.low, found.high) == pytest.approx(expected, abs=1e-10)
