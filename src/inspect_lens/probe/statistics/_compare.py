"""Bootstrap draws, of samples inside each class or of whole groups, and tests of two probes.

A draw is how often each sample is in it, so that the AUROC of many draws, which depends on ranks
only, is a few array operations.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, Final, Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from inspect_lens._base.arguments import judged_arguments
from inspect_lens.errors import SpecError
from inspect_lens.spec import check_word

from ._measured import MIN_GROUPS, GroupCounts, Interval, count_groups, group_codes
from ._metrics import (
    auroc,
    between_groups,
    check_level,
    clopper_pearson,
    independent,
    midranks,
    placements,
    split_classes,
)

__all__ = [
    "Comparison",
    "bootstrap_interval",
    "compare_auroc",
    "draws_of",
    "format_p_value",
    "percentile_interval",
    "permutation_test",
]

Statistic = Callable[[NDArray[np.bool_], NDArray[np.float64]], float]
Floats = NDArray[np.float64]
CELLS: Final = 4_000_000  # numbers held at once
_NONE: Final = 1e-12  # a standard error this small is rounding


@judged_arguments
def bootstrap_interval(
    labels: ArrayLike,
    scores: ArrayLike,
    *,
    statistic: Statistic = auroc,
    groups: Sequence[Hashable] | None = None,
    method: Literal["percentile", "bca"] = "percentile",
    confidence: float = 0.95,
    n_resamples: int = 10_000,
    seed: int = 0,
) -> Interval:
    """Bootstrap interval of a statistic of labels and scores.

    Without `groups`, samples are drawn with replacement inside each class. With `groups`, whole
    groups are drawn (cluster bootstrap); draws that lost a class are drawn again.

    Args:
        labels: (samples,) 0 and 1, or bools.
        scores: (samples,) float.
        statistic: of (labels, scores); the AUROC by default, which is fast.
        groups: (samples,) group of each sample.
        method: `percentile`, or `bca`, which corrects bias and skewness.
        confidence: two-sided level.
        n_resamples: draws.
        seed: of the generator; the same seed gives the same interval.

    Returns:
        The interval. NaN bounds when a class is missing, and where all draws are alike, as of
        perfect separation, which shows no variance. With too few groups (`count_groups`) it is too
        narrow, and its method says so.

    Raises:
        SpecError: shapes disagree, a score is NaN, there is one group only, or so few groups
            hold a class that draws with both classes are rare.

    Source:
        Efron and Tibshirani 1993, chapters 13 and 14; BCa by `scipy.stats.bootstrap`.

    Example:
        ```python
        import numpy as np

        from inspect_lens.probe import auroc, bootstrap_interval

        rng = np.random.default_rng(0)
        labels = np.arange(80) % 2
        scores = rng.standard_normal(80) + labels
        interval = bootstrap_interval(labels, scores, groups=np.arange(80) // 2, n_resamples=500)
        assert interval.low < auroc(labels, scores) < interval.high
        ```
    """
    level = check_level(confidence)
    check_word("method", method, ("percentile", "bca"))
    if n_resamples < 1:
        raise SpecError(f"n_resamples={n_resamples}: nothing is drawn; allowed is 1 or more")
    positive, negative = split_classes(labels, scores)
    name = "stratified bootstrap" if groups is None else "cluster bootstrap"
    name += " BCa" if method == "bca" else ""
    if positive.size == 0 or negative.size == 0:
        return Interval(low=math.nan, high=math.nan, confidence=confidence, method=name)
    y, s = np.asarray(labels).astype(bool), np.asarray(scores, dtype=np.float64)
    weigh = weighted_areas(y, s) if statistic is auroc else _weighted(y, s, statistic)
    draws = draw_samples(y, groups, n_resamples=n_resamples, seed=seed)
    values = np.concatenate([weigh(part) for part in draws])
    if method == "bca":
        low, high = _bca(y, groups, weigh, values, level)
        made = Interval(low=float(low), high=float(high), confidence=confidence, method=name)
    else:
        made = percentile_interval(values, confidence=level, method=name)
    few = count_groups(y, groups).too_few
    return made.model_copy(update={"method": f"{made.method}; {few}"}) if few else made


def percentile_interval(
    drawn: Floats,
    *,
    method: str,
    n: int = MIN_GROUPS,
    ends: Sequence[float] = (),
    confidence: float = 0.95,
) -> Interval:
    """Interval of bootstrap draws of n things; NaN, and its method says why, where they tell none.

    Of few things the percentiles miss the truth in a third to a half of all sets, and draws that
    are all alike would pass for certainty: of a mean that is between `ends`, n of n things came out
    as they did, and the others are anything.
    """
    low = high = math.nan
    if n < MIN_GROUPS:
        method = f"none: {n} are too few to draw from; {MIN_GROUPS} or more are needed"
    elif not drawn.size:
        method = "none: no draw has a value"
    elif np.ptp(drawn) >= _NONE or np.isnan(drawn).any():
        tail = (1.0 - check_level(confidence)) / 2.0
        low, high = np.quantile(drawn, [tail, 1.0 - tail]).tolist()
    elif len(set(ends)) > 1:
        exact = clopper_pearson(n, n, confidence=confidence)
        low, high = (drawn[0] * exact.low + (1.0 - exact.low) * end for end in ends)
        method = f"{exact.method}, n = {n}"
    else:
        method = "none: all draws are alike, and do not show how far it varies"
    return Interval(low=low, high=high, confidence=confidence, method=method)


def draw_samples(
    y: NDArray[np.bool_], groups: Sequence[Hashable] | None, *, n_resamples: int, seed: int
) -> Iterator[Floats]:
    """How often each sample is in each draw, in parts of (draws, samples) with both classes."""
    rng = np.random.default_rng(seed)
    if groups is None:
        for size in _steps(y.size, n_resamples):
            weights = np.empty((size, y.size))
            for side in (y, ~y):
                weights[:, side] = _counts(int(side.sum()), size, rng)
            yield weights
        return
    code, n = _group_codes(y, groups)
    totals = np.stack([np.bincount(code[side], minlength=n) for side in (y, ~y)], axis=1)
    for size in _steps(y.size, n_resamples):
        weights = _counts(n, size, rng)
        for _ in range(1000):
            bad = ((weights @ totals) == 0).any(axis=1)
            if not bad.any():
                break
            weights[bad] = _counts(n, int(bad.sum()), rng)
        else:
            raise SpecError(
                f"groups: {n} groups, and a draw with both classes is too rare; allowed are "
                "several groups per class; leave `groups` out to resample samples"
            )
        yield weights[:, code]


def draws_of(
    n: int, groups: Sequence[Hashable] | None, n_draws: int, rng: np.random.Generator
) -> Iterator[Floats]:
    """The same of one class: (draws, samples) of samples, or of whole groups."""
    code, k = (np.arange(n), n) if groups is None else group_codes(n, groups)
    return (_counts(k, size, rng)[:, code] for size in _steps(n, n_draws))


def _steps(n: int, n_draws: int) -> list[int]:
    """Numbers of draws to hold at once."""
    step = max(1, CELLS // n)
    return [min(step, n_draws - first) for first in range(0, n_draws, step)]


def _counts(n: int, size: int, rng: np.random.Generator) -> Floats:
    """How often each of n things is in each draw of n, (size, n)."""
    picks = rng.integers(n, size=(size, n)) + np.arange(size)[:, None] * n
    return np.bincount(picks.ravel(), minlength=size * n).reshape(size, n).astype(np.float64)


def weighted_areas(y: NDArray[np.bool_], s: Floats) -> Callable[[Floats], Floats]:
    """A function from weights of the samples (draws, samples) to the AUROC of each draw."""
    order = np.argsort(s, kind="stable")
    ranked, positive = s[order], y[order].astype(np.float64)
    starts = np.append(0, 1 + np.flatnonzero(ranked[1:] != ranked[:-1]))

    def weigh(weights: Floats) -> Floats:
        drawn = weights[:, order]
        above, below = (
            np.add.reduceat(drawn * side, starts, axis=1) for side in (positive, 1.0 - positive)
        )
        lower = np.cumsum(below, axis=1) - below / 2.0
        with np.errstate(invalid="ignore"):
            areas: Floats = (above * lower).sum(axis=1) / (above.sum(axis=1) * below.sum(axis=1))
        return areas

    return weigh


def _weighted(y: NDArray[np.bool_], s: Floats, statistic: Statistic) -> Callable[[Floats], Floats]:
    def weigh(weights: Floats) -> Floats:
        made = np.full(len(weights), math.nan)
        for i, row in enumerate(weights.astype(np.int64)):
            index = np.repeat(np.arange(y.size), row)
            if 0 < y[index].sum() < index.size:
                made[i] = statistic(y[index], s[index])
        return made

    return weigh


def _bca(
    y: NDArray[np.bool_],
    groups: Sequence[Hashable] | None,
    weigh: Callable[[Floats], Floats],
    values: Floats,
    level: float,
) -> tuple[float, float]:
    """Scipy's BCa of draws that are made: it leaves each unit of the data out in turn."""
    from scipy.stats import bootstrap

    data: tuple[NDArray[np.int64], ...] = (np.flatnonzero(y), np.flatnonzero(~y))
    code = np.arange(y.size)
    if groups is not None:
        code, n = _group_codes(y, groups)
        data = (np.arange(n),)

    def of(*units: NDArray[np.int64], axis: int) -> Floats:
        rows = np.broadcast_shapes(*(u.shape[:-1] for u in units))
        weights = np.zeros((math.prod(rows), int(code.max()) + 1))
        for part in units:
            whole = np.broadcast_to(part, (*rows, part.shape[-1])).reshape(len(weights), -1)
            np.add.at(weights, (np.arange(len(weights))[:, None], whole), 1.0)
        step = max(1, CELLS // y.size)
        parts = [weigh(weights[i : i + step][:, code]) for i in range(0, len(weights), step)]
        return np.concatenate(parts).reshape(rows)

    if min(part.size for part in data) < 2:
        return math.nan, math.nan
    made: Any = SimpleNamespace(bootstrap_distribution=values)
    with warnings.catch_warnings(), np.errstate(invalid="ignore", divide="ignore"):
        warnings.simplefilter("ignore")  # of a degenerate distribution, which is NaN here
        found = bootstrap(
            data, of, n_resamples=0, bootstrap_result=made, method="BCa", confidence_level=level,
            vectorized=True, axis=-1, batch=max(1, CELLS // y.size),
        )  # fmt: skip
    low, high = found.confidence_interval
    return float(low), float(high)


def _group_codes(y: NDArray[np.bool_], groups: Sequence[Hashable]) -> tuple[NDArray[np.int64], int]:
    code, n = group_codes(y.size, groups)
    if n < 2:
        raise SpecError(
            f"groups: all {y.size} samples are of one group; allowed are two groups or more, as "
            "every draw of one is the same; leave `groups` out to resample samples"
        )
    return code, n


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
    (variance, free), name = independent(*terms), "delong"
    if groups is not None and counts.several:
        variance = between_groups(labels, groups, *(t - t.mean() for t in terms))
        free, name = counts.effective - 1.0, f"obuchowski, {counts.total} groups"
    spread = math.sqrt(variance)
    if spread < _NONE:
        z, p = (0.0, 1.0) if abs(difference) < _NONE else (math.nan, math.nan)
        interval = _unvaried(difference, counts, level)
        return Comparison(first, second, difference, interval, z, p)
    from scipy.stats import t as student

    z = difference / spread

    step = float(student.ppf(0.5 + level / 2.0, free)) * spread
    interval = Interval(
        low=difference - step, high=difference + step, confidence=confidence, method=name
    )
    p = 2.0 * float(student.sf(abs(z), free))
    return Comparison(first, second, difference, interval, z, p)


def _unvaried(difference: float, counts: GroupCounts, level: float) -> Interval:
    """Interval of a difference that shows no variance: a point would pass for certainty."""
    # In k of k disjoint pairs of a positive and a negative the difference came out as it is; where
    # it does not, it is anything from -1 to 1.
    exact = clopper_pearson(counts.smaller, counts.smaller, confidence=level)
    other = 1.0 - exact.low
    unit = "groups of the smaller class" if counts.several else "smaller class"
    return Interval(
        low=max(-1.0, difference * exact.low - other),
        high=min(1.0, difference * exact.low + other),
        confidence=level,
        method=f"clopper-pearson, n = {unit}",
    )


def format_p_value(p: float | None) -> str:
    """A p-value as reports show it: two digits, `< 1e-4`, or `n/a`.

    Near an AUROC of 1 the normal tail of DeLong's test ends at 0 or 1e-273, which no set of samples
    can show; draws and permutations end where they are as many as they are.

    Args:
        p: the value; None or NaN where there is none.

    Example:
        ```python
        from inspect_lens.probe import format_p_value

        assert [format_p_value(p) for p in (0.0312, 1.7e-273, None)] == ["0.031", "< 1e-4", "n/a"]
        ```
    """
    if p is None or math.isnan(p):
        return "n/a"
    return f"{p:.2g}" if p >= 1e-4 else "< 1e-4"


@judged_arguments
def permutation_test(
    labels: ArrayLike,
    scores: ArrayLike,
    *,
    groups: Sequence[Hashable] | None = None,
    n_permutations: int = 10_000,
    seed: int = 0,
) -> float:
    """Probability of an AUROC this large if labels meant nothing; one-sided, never 0.

    Args:
        labels: (samples,) 0 and 1, both.
        scores: (samples,) float.
        groups: (samples,) what is independent. Labels are shuffled within groups of both classes
            only, which keeps what groups differ by; where every group has one class, whole groups
            exchange their labels, as samples of one group go together. None shuffles all.
        n_permutations: shuffles.
        seed: of the generator.

    Raises:
        SpecError: shapes disagree, a score is NaN, or a class is missing.

    Source:
        Exchangeability blocks, Winkler et al. 2014, NeuroImage 92, 381-397.

    Example:
        ```python
        import numpy as np

        from inspect_lens.probe import permutation_test

        labels = np.arange(40) % 2
        scores = np.random.default_rng(0).standard_normal(40) + 2 * labels
        assert permutation_test(labels, scores, n_permutations=500) < 0.01
        ```
    """
    positive, negative = split_classes(labels, scores)
    y, s = np.asarray(labels).astype(bool), np.asarray(scores, dtype=np.float64)
    if not positive.size or not negative.size:
        raise SpecError("labels: one class is missing; allowed are both; there is nothing to tell")
    # What exchanges labels, and within what: samples of all, of each group, or whole groups.
    total, label, block = midranks(s), y, np.zeros(y.size, dtype=np.int64)
    size: NDArray[Any] = np.ones(y.size)
    if groups is not None:
        codes, k = group_codes(y.size, groups)
        every, marked = np.bincount(codes), np.bincount(codes, weights=y)
        if ((marked > 0) & (marked < every)).any():
            block = codes
        else:
            total, size = np.bincount(codes, weights=total).astype(np.float64), every
            label, block = marked > 0, np.zeros(k, dtype=np.int64)
    members = [np.flatnonzero(block == b) for b in range(int(block.max()) + 1)]

    def areas(labels: NDArray[np.bool_]) -> NDArray[np.float64]:
        m = labels @ size
        return np.asarray((labels @ total - m * (m + 1.0) / 2.0) / (m * (y.size - m)))

    rng, observed, above = np.random.default_rng(seed), float(areas(label[None])[0]), 0
    step = max(1, CELLS // label.size)
    for first in range(0, n_permutations, step):
        drawn = np.tile(label, (min(step, n_permutations - first), 1))
        for units in members:
            drawn[:, units] = rng.permuted(drawn[:, units], axis=1)
        above += int((areas(drawn) >= observed - 1e-12).sum())
    return (above + 1) / (n_permutations + 1)
