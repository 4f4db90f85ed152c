"""Is one probe better than another: DeLong's test, and draws of groups."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from inspect_lens.errors import SpecError

from ._bootstrap import bootstrap_values
from ._card import Interval
from ._groups import GroupCounts, count_groups, stretch
from ._intervals import check_level, clopper_pearson, placements
from ._metrics import auroc, split_classes

__all__ = [
    "Comparison",
    "compare_auroc",
    "format_p_value",
]

_NONE = 1e-12  # a standard error this small is rounding


class Comparison(NamedTuple):
    """Two probes on the same samples."""

    auroc_a: float
    auroc_b: float
    difference: float
    """a minus b."""
    interval: Interval
    """Of the difference."""
    z: float
    """The difference in its standard errors."""
    p_value: float
    """Two-sided, of no difference; NaN where groups are too few, and where areas that do not vary
    differ."""
    too_few: str = ""
    """Why there is no test, as `GroupCounts.too_few` says it; empty where there is one."""


def compare_auroc(
    labels: ArrayLike,
    a: ArrayLike,
    b: ArrayLike,
    *,
    groups: Sequence[Hashable] | None = None,
    confidence: float = 0.95,
    n_resamples: int = 10_000,
    seed: int = 0,
) -> Comparison:
    """Test of two probes that scored the same samples.

    DeLong's test takes samples as independent. With `groups`, of which some hold several samples,
    whole groups are drawn instead (cluster bootstrap, both probes on the same draws): p is the
    share of draws that lie as far from the difference as it lies from 0, at least
    2 / (n_resamples + 1), and the interval is that of the percentiles; both after draws are spread
    by what draws of few groups lack, 2% for 100 groups and 21% for 10 (Hesterberg 2015). With fewer
    than 8 groups, or 5 with a class, there is no test (`count_groups`): z and p are NaN, and the
    interval is all that is possible, [-1, 1].

    Args:
        labels: (samples,) 0 and 1, at least two of each.
        a: (samples,) scores of one probe.
        b: (samples,) scores of the other.
        groups: (samples,) what is independent, such as the scenario; None, or groups of one
            sample each, takes DeLong's test.
        confidence: of the interval.
        n_resamples: draws of groups.
        seed: of the draws.

    Returns:
        Both areas, their difference with its interval, whose `method` says which test it was, and
        the test. With no variance at all (both perfect, say) z is 0 and p 1 for equal areas, and
        NaN otherwise; the interval then is that of a trial that came out the same in each sample,
        or group, of the smaller class.

    Raises:
        SpecError: shapes disagree, a score is NaN, or a class has fewer than two samples.

    Source:
        DeLong, DeLong and Clarke-Pearson 1988; Davison and Hinkley 1997, chapters 3.8 and 4;
        Hesterberg 2015, The American Statistician 69, section 3.2 (expanded percentiles).

    Example:
        ```python
        import numpy as np

        from inspect_lens.probe import compare_auroc

        rng = np.random.default_rng(0)
        labels = np.arange(200) % 2
        good, bad = (rng.standard_normal(200) + strength * labels for strength in (2.0, 0.5))
        made = compare_auroc(labels, good, bad)
        assert made.difference > 0
        assert made.p_value < 0.01
        ```
    """
    level = check_level(confidence)
    sides = [split_classes(labels, s) for s in (a, b)]
    m, n = sides[0][0].size, sides[0][1].size
    if m < 2 or n < 2:
        raise SpecError(
            f"labels: {m} positive and {n} negative; allowed are two or more of each; a variance "
            "needs them"
        )
    counts = count_groups(labels, groups)
    if groups is not None and counts.several:
        return _compare_groups(labels, a, b, groups, counts, level, n_resamples, seed)
    above, below = (
        np.stack(part) for part in zip(*(placements(p, q) for p, q in sides), strict=True)
    )
    areas = above.mean(axis=1)
    covariance = np.cov(above) / m + np.cov(below) / n
    contrast = np.array([1.0, -1.0])
    difference = float(contrast @ areas)
    spread = math.sqrt(max(float(contrast @ covariance @ contrast), 0.0))
    z = _in_errors(difference, spread)
    step = NormalDist().inv_cdf(0.5 + level / 2.0) * spread
    interval = Interval(
        low=difference - step, high=difference + step, confidence=confidence, method="delong"
    )
    if spread < _NONE:
        interval = _unvaried(difference, counts, level)
    return Comparison(
        float(areas[0]), float(areas[1]), difference, interval, z, math.erfc(abs(z) / math.sqrt(2))
    )


def _compare_groups(
    labels: ArrayLike,
    a: ArrayLike,
    b: ArrayLike,
    groups: Sequence[Hashable],
    counts: GroupCounts,
    level: float,
    n_resamples: int,
    seed: int,
) -> Comparison:
    y = np.asarray(labels).astype(bool)
    sides = [np.asarray(scores, dtype=np.float64) for scores in (a, b)]
    areas = [auroc(y, s) for s in sides]
    difference = areas[0] - areas[1]
    if counts.too_few:
        anything = Interval(low=-1.0, high=1.0, confidence=level, method=counts.too_few)
        none = math.nan
        return Comparison(areas[0], areas[1], difference, anything, none, none, counts.too_few)
    # The same seed draws the same groups, whatever the scores.
    first, second = (
        bootstrap_values(y, s, groups=groups, n_resamples=n_resamples, seed=seed) for s in sides
    )
    away = stretch(counts.total) * (first - second - difference)
    made = difference + away
    tails = [(np.sum(side * away >= abs(difference) - 1e-12) + 1) for side in (1.0, -1.0)]
    tail = tails[0] if difference > 0 else tails[1]
    spread = float(made.std(ddof=1))
    z = _in_errors(difference, spread)
    p = min(1.0, 2.0 * float(tail) / (n_resamples + 1))
    low, high = np.quantile(made, [(1.0 - level) / 2.0, (1.0 + level) / 2.0])
    interval = Interval(
        low=float(low), high=float(high), confidence=level, method="cluster bootstrap"
    )
    if spread < _NONE:
        interval = _unvaried(difference, counts, level)
    return Comparison(areas[0], areas[1], difference, interval, z, z if math.isnan(z) else p)


def _in_errors(difference: float, spread: float) -> float:
    if spread < _NONE:
        return 0.0 if abs(difference) < _NONE else math.nan
    return difference / spread


def _unvaried(difference: float, counts: GroupCounts, level: float) -> Interval:
    """Interval of a difference that shows no variance: a point would pass for certainty.

    In k of k disjoint pairs of a positive and a negative the difference came out as it is; where
    it does not, it is anything from -1 to 1.
    """
    exact = clopper_pearson(counts.smaller, counts.smaller, confidence=level)
    other, unit = (
        1.0 - exact.low,
        "groups of the smaller class" if counts.several else "smaller class",
    )
    return Interval(
        low=max(-1.0, difference * exact.low - other),
        high=min(1.0, difference * exact.low + other),
        confidence=level,
        method=f"clopper-pearson, n = {unit}",
    )


def format_p_value(p: float | None) -> str:
    """A p-value as reports show it, never below 1e-4.

    Near an AUROC of 1 the normal tail of DeLong's test ends at 0 or 1e-273, which no set of samples
    can show; draws and permutations end where they are as many as they are.

    Args:
        p: the value; None or NaN where there is none.

    Returns:
        Two digits, `< 1e-4`, or `n/a`.

    Example:
        ```python
        from inspect_lens.probe import format_p_value

        assert [format_p_value(p) for p in (0.0312, 1.7e-273, None)] == ["0.031", "< 1e-4", "n/a"]
        ```
    """
    if p is None or math.isnan(p):
        return "n/a"
    return f"{p:.2g}" if p >= 1e-4 else "< 1e-4"
