"""Is one probe better than another: DeLong's test, and draws of groups."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import NamedTuple

from numpy.typing import ArrayLike

from inspect_lens.errors import SpecError

from ._groups import GroupCounts, count_groups
from ._intervals import between_groups, check_level, clopper_pearson, independent, placements
from ._measured import Interval
from ._metrics import split_classes

__all__ = [
    "Comparison",
    "compare_auroc",
    "format_p_value",
]

_NONE = 1e-12  # a standard error this small is rounding


class Comparison(NamedTuple):
    """Difference of the AUROC of two probes on the same samples, with interval and p-value."""

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
) -> Comparison:
    """Test whether two probes differ in AUROC on the same samples.

    DeLong's test takes samples as independent. With `groups`, of which some hold several samples,
    it is Obuchowski's: the terms of the difference are added up inside each group before their
    variance is taken (in the CR2 form of `delong_interval`). Both compare with Student's t: Welch
    and Satterthwaite's degrees of freedom, with groups their effective number less one. With fewer
    than 8 groups, or 5 with a class, or groups so unequal that they are worth fewer than 3, there
    is no test (`count_groups`): z and p are NaN, and the interval is all that is possible, [-1, 1].

    Args:
        labels: (samples,) 0 and 1, at least two of each.
        a: (samples,) scores of one probe.
        b: (samples,) scores of the other.
        groups: (samples,) what is independent, such as the scenario; None, or groups of one
            sample each, takes DeLong's test.
        confidence: of the interval.

    Returns:
        Both areas, their difference with its interval, whose `method` says which test it was, and
        the test. With no variance at all (both perfect, say) z is 0 and p 1 for equal areas, and
        NaN otherwise; the interval then is that of a trial that came out the same in each sample,
        or group, of the smaller class.

    Raises:
        SpecError: shapes disagree, a score is NaN, or a class has fewer than two samples.

    Source:
        DeLong, DeLong and Clarke-Pearson 1988; Obuchowski 1997, Biometrics 53, 567-578.

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
    (above, below), (other_above, other_below) = (placements(p, q) for p, q in sides)
    first, second = float(above.mean()), float(other_above.mean())
    difference = first - second
    if counts.too_few:
        anything = Interval(low=-1.0, high=1.0, confidence=level, method=counts.too_few)
        none = math.nan
        return Comparison(first, second, difference, anything, none, none, counts.too_few)
    terms = (above - other_above, below - other_below)
    variance, free, name = independent(*terms), 0.0, "delong"
    if groups is not None and counts.several:
        spread = math.sqrt(between_groups(labels, groups, *(t - t.mean() for t in terms)))
        free, name = counts.effective - 1.0, f"obuchowski, {counts.total} groups"
    else:
        spread, free = math.sqrt(variance.total), variance.free
    z = _in_errors(difference, spread)
    if spread < _NONE:
        interval = _unvaried(difference, counts, level)
        return Comparison(first, second, difference, interval, z, 1.0 if z == 0.0 else z)
    from scipy.stats import t as student

    step = float(student.ppf(0.5 + level / 2.0, free)) * spread
    interval = Interval(
        low=difference - step, high=difference + step, confidence=confidence, method=name
    )
    p = 2.0 * float(student.sf(abs(z), free))
    return Comparison(first, second, difference, interval, z, p)


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
