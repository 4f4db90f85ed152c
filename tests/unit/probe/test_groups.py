from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.stats import norm

from inspect_lens.errors import SpecError
from inspect_lens.probe import (
    bootstrap_interval,
    clopper_pearson,
    compare_auroc,
    conformal_threshold,
    count_groups,
    delong_interval,
    rate_interval,
)


def test_groups_are_counted_by_class() -> None:
    found = count_groups([1, 0, 1, 0, 0], ["a", "a", "b", "c", "c"])
    assert found[:4] == (3, 2, 2, True)
    assert found.smaller == 2
    assert found.too_few == "too few groups (3; 2 with positives, 2 with negatives)"
    # Samples are never too few groups: DeLong's test is for them.
    assert count_groups([1, 0, 1], "abc") == (3, 2, 1, False, 1.0)
    assert not count_groups([1, 0], "ab").too_few
    both, apart = [0, 1] * 10, [0] * 12 + [1] * 8
    assert not count_groups(both, [i // 2 for i in range(20)]).too_few
    assert count_groups(both, [i // 4 for i in range(20)]).too_few
    assert count_groups(apart, [i // 2 for i in range(20)]).smaller == 4
    assert count_groups(apart, [i // 2 for i in range(20)]).too_few
    # One group of 100 beside nine of 2 is worth little more than itself.
    unequal = [0] * 100 + [1 + i // 2 for i in range(18)]
    found = count_groups([0, 1] * 59, unequal)
    assert found.effective == pytest.approx(59**2 / (50**2 + 9))
    assert "worth 1.4 of equal size" in found.too_few
    with pytest.raises(SpecError, match="3 groups for 2 samples"):
        count_groups([0, 1], "abc")


@pytest.mark.parametrize("n_groups", [1, 2, 5, 7])
def test_few_groups_give_no_test(n_groups: int) -> None:
    """Two probes of noise on two scenarios of twenty samples had p = 0.0002."""
    rng, y = np.random.default_rng(0), np.tile([0, 1], 20)
    groups = np.sort(np.arange(40) % n_groups).tolist()
    made = compare_auroc(y, *rng.normal(size=(2, 40)), groups=groups)
    assert math.isnan(made.p_value)
    assert math.isnan(made.z)
    assert (made.interval.low, made.interval.high) == (-1.0, 1.0)
    assert made.interval.method == made.too_few == count_groups(y, groups).too_few != ""
    if n_groups > 1:
        drawn = bootstrap_interval(y, rng.normal(size=40), groups=groups, n_resamples=50)
        assert drawn.method == f"cluster bootstrap; {made.too_few}"


@pytest.mark.parametrize(("k", "classes"), [(8, "both"), (9, "both"), (10, "one")])
def test_equal_probes_on_the_fewest_groups_are_seldom_found_different(k: int, classes: str) -> None:
    """With the plain percentiles 9 to 10 of 100 pairs of equal probes were."""
    rng, size, found = np.random.default_rng(1), 8, 0
    group = np.repeat(np.arange(k), size)
    y = np.tile([0, 1], k * size // 2) if classes == "both" else group % 2
    for _ in range(200):
        if classes == "both":
            strengths = rng.normal(1.0, 0.7, size=(2, k))[:, group]
            a, b = rng.normal(size=(2, y.size)) + strengths * y
        else:
            a, b = y + rng.normal(size=(2, k))[:, group] + 0.6 * rng.normal(size=(2, y.size))
        made = compare_auroc(y, a, b, groups=group.tolist())
        assert made.too_few == ""
        found += made.p_value < 0.05
    assert found / 200 < 0.085


def test_perfect_separation_of_few_scenarios_is_worth_few_samples() -> None:
    y = np.repeat([0, 1], 100)
    two, many = y.tolist(), (np.arange(200) // 10).tolist()
    exact = clopper_pearson(1, 1)
    made = delong_interval(y, y, groups=two)
    assert (made.low, made.high) == (exact.low, exact.high)
    assert made.method.startswith("clopper-pearson, n = groups of the smaller class; too few")
    made = delong_interval(y, y, groups=many)
    assert made.low == clopper_pearson(10, 10).low
    assert made.method == "clopper-pearson, n = groups of the smaller class"
    assert delong_interval(y, y).low == clopper_pearson(100, 100).low
    # Groups of one sample are samples.
    assert delong_interval(y, y, groups=range(200)) == delong_interval(y, y)


@pytest.mark.parametrize("k", [1, 2, 3, 5, 7])
def test_the_careful_interval_is_the_same_from_either_side(k: int) -> None:
    """What groups are worth was rounded to whole hits, half of one to none: 0.5 had [0, 0.975]."""
    groups = np.repeat(np.arange(k), 4).tolist()
    y, hits = np.tile([0, 0, 1, 1], k), np.tile([1, 0, 1, 0], k)
    for made in (delong_interval(y, np.zeros(4 * k), groups=groups), rate_interval(hits, groups)):
        assert made.low == pytest.approx(1.0 - made.high)
    rng = np.random.default_rng(k)
    s = rng.normal(size=4 * k)
    one, other = (delong_interval(labels, s, groups=groups) for labels in (y, 1 - y))
    assert (one.low, one.high) == pytest.approx((1.0 - other.high, 1.0 - other.low))


def test_a_difference_without_variance_is_no_point() -> None:
    y = np.arange(60) % 2
    perfect, flat = y * 1.0, np.zeros(60)
    same = compare_auroc(y, perfect, perfect * 2)
    assert (same.difference, same.p_value) == (0.0, 1.0)
    edge = 1.0 - clopper_pearson(30, 30).low
    assert (same.interval.low, same.interval.high) == pytest.approx((-edge, edge))
    lost = compare_auroc(y, perfect, -perfect)
    assert lost.difference == 1.0
    assert math.isnan(lost.p_value)
    assert (lost.interval.low, lost.interval.high) == pytest.approx((1.0 - 2 * edge, 1.0))
    half = compare_auroc(y, perfect, flat).interval
    assert half.low < 0.5 < half.high
    grouped = compare_auroc(y, perfect, perfect, groups=(np.arange(60) // 5).tolist())
    assert grouped.interval.high == pytest.approx(1.0 - clopper_pearson(12, 12).low)
    assert grouped.interval.method == "clopper-pearson, n = groups of the smaller class"


def test_a_threshold_by_group_holds_the_rate_for_new_groups() -> None:
    rng, rate, true, k = np.random.default_rng(3), 0.05, [], 40
    for _ in range(400):
        sizes = 1 + 60 // np.arange(1, k + 1)
        group = np.repeat(np.arange(k), rng.permutation(sizes))
        s = 2.0 * rng.normal(size=k)[group] + rng.normal(size=group.size)
        value = conformal_threshold(s, rate, groups=group.tolist())
        true.append(norm.sf(value / 5.0**0.5))
    error = float(np.std(true)) / 400**0.5
    assert np.mean(true) <= rate + 3 * error
    assert np.mean(true) > rate / 2, "as sharp as it can be, but for the group that is new"
    # Groups of one sample are samples, and too few groups are refused, however many samples.
    s = rng.normal(size=200)
    assert conformal_threshold(s, rate, groups=range(200)) == conformal_threshold(s, rate)
    with pytest.raises(SpecError, match=r"200 scores of 10 groups .* at least 19 groups"):
        conformal_threshold(s, rate, groups=(np.arange(200) // 20).tolist())
