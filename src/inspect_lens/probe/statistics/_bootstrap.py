"""Bootstrap intervals: percentile and BCa, by sample or by cluster.

The AUROC depends on ranks only, so its draws are counted instead of sorted: all of them are a
few array operations.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from statistics import NormalDist
from typing import Final, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from inspect_lens.errors import SpecError

from ._measured import Interval, count_groups, group_codes
from ._metrics import auroc, check_level, placements, split_classes

__all__ = ["CELLS", "areas_of_counts", "bootstrap_interval", "bootstrap_values", "resample"]

Statistic = Callable[[NDArray[np.bool_], NDArray[np.float64]], float]
Floats = NDArray[np.float64]
CELLS: Final = 4_000_000  # numbers held at once


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

    Without `groups`, samples are drawn with replacement inside each class. With `groups`,
    whole groups are drawn (cluster bootstrap), because samples of one scenario are not
    independent; draws that lost a class are drawn again.

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
        The interval. NaN bounds when a class is missing. With fewer than 8 groups, or 5 with a
        class, it is too narrow, and its method says so (`count_groups`).

    Raises:
        SpecError: shapes disagree, a score is NaN, there is one group only, or so few groups
            hold a class that draws with both classes are rare.

    Source:
        Efron and Tibshirani 1993, chapters 13 and 14.

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
    if method not in ("percentile", "bca"):
        raise SpecError(f"method={method!r}; allowed are 'percentile' and 'bca'")
    positive, negative = split_classes(labels, scores)
    name = "stratified bootstrap" if groups is None else "cluster bootstrap"
    name += " BCa" if method == "bca" else ""
    if positive.size == 0 or negative.size == 0:
        return Interval(low=math.nan, high=math.nan, confidence=confidence, method=name)
    y, s = np.asarray(labels).astype(bool), np.asarray(scores, dtype=np.float64)
    values = bootstrap_values(
        y, s, statistic=statistic, groups=groups, n_resamples=n_resamples, seed=seed
    )
    tails = [(1.0 - level) / 2.0, (1.0 + level) / 2.0]
    if method == "bca":
        tails = _corrected(tails, values, statistic(y, s), _jackknife(y, s, statistic, groups))
    low, high = np.quantile(values, tails)
    few = count_groups(y, groups).too_few
    name += f"; {few}" if few else ""
    return Interval(low=float(low), high=float(high), confidence=confidence, method=name)


def bootstrap_values(
    y: NDArray[np.bool_],
    s: Floats,
    *,
    statistic: Statistic = auroc,
    groups: Sequence[Hashable] | None = None,
    n_resamples: int = 10_000,
    seed: int = 0,
) -> Floats:
    """The statistic in every draw."""
    rng = np.random.default_rng(seed)
    if statistic is auroc:
        if groups is not None:
            return _cluster_areas(y, s, groups, n_resamples, rng)
        return np.concatenate(
            [areas_of_counts(*part) for part in _strata_counts(y, s, n_resamples, rng)]
        )
    draws = resample(y, groups, n_resamples=n_resamples, rng=rng)
    return np.array([statistic(y[index], s[index]) for index in draws])


def resample(
    y: NDArray[np.bool_],
    groups: Sequence[Hashable] | None,
    *,
    n_resamples: int,
    rng: np.random.Generator,
) -> Iterator[NDArray[np.int64]]:
    """Indices of each draw: samples inside each class, or whole groups."""
    if groups is None:
        positive, negative = np.flatnonzero(y), np.flatnonzero(~y)
        for above, below in _strata_draws(y, n_resamples, rng):
            for i, j in zip(above, below, strict=True):
                yield np.concatenate([positive[i], negative[j]])
        return
    code, n = _group_codes(y, groups)
    order = np.argsort(code, kind="stable")
    blocks = np.split(order, np.cumsum(np.bincount(code, minlength=n))[:-1])
    totals = _class_totals(y, code, n)
    for size in _steps(y, n_resamples):
        for weights in _group_weights(totals, size, rng).astype(np.int64):
            yield np.concatenate([np.tile(blocks[g], w) for g, w in enumerate(weights) if w])


def _steps(y: NDArray[np.bool_], n_resamples: int) -> list[int]:
    """Numbers of draws to hold at once; the same for every statistic, so that draws agree."""
    step = max(1, CELLS // y.size)
    return [min(step, n_resamples - first) for first in range(0, n_resamples, step)]


def _strata_draws(
    y: NDArray[np.bool_], n_resamples: int, rng: np.random.Generator
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    m, n = int(y.sum()), int((~y).sum())
    for size in _steps(y, n_resamples):
        yield rng.integers(m, size=(size, m)), rng.integers(n, size=(size, n))


def _codes(s: Floats) -> tuple[NDArray[np.int64], int]:
    values, code = np.unique(s, return_inverse=True)
    return code.astype(np.int64), values.size


def areas_of_counts(positive: Floats, negative: Floats) -> Floats:
    """AUROC of each row of counts (draws, distinct scores, ascending)."""
    below = np.cumsum(negative, axis=1) - negative / 2.0
    total = positive.sum(axis=1) * negative.sum(axis=1)
    areas: Floats = (positive * below).sum(axis=1) / total
    return areas


def _strata_counts(
    y: NDArray[np.bool_], s: Floats, n_resamples: int, rng: np.random.Generator
) -> Iterator[tuple[Floats, Floats]]:
    code, k = _codes(s)
    for draws in _strata_draws(y, n_resamples, rng):
        made = []
        for side, picks in zip((code[y], code[~y]), draws, strict=True):
            cells = side[picks] + np.arange(len(picks))[:, None] * k
            counted = np.bincount(cells.ravel(), minlength=len(picks) * k)
            made.append(counted.reshape(len(picks), k).astype(np.float64))
        yield made[0], made[1]


def _cluster_areas(
    y: NDArray[np.bool_],
    s: Floats,
    groups: Sequence[Hashable],
    n_resamples: int,
    rng: np.random.Generator,
) -> Floats:
    group, n = _group_codes(y, groups)
    totals, weigh = _class_totals(y, group, n), _weigher(y, s, group)
    sizes = _steps(y, n_resamples)
    return np.concatenate([weigh(_group_weights(totals, size, rng)) for size in sizes])


def _weigher(
    y: NDArray[np.bool_], s: Floats, group: NDArray[np.int64]
) -> Callable[[Floats], Floats]:
    """A function from weights of the groups (draws, groups) to the AUROC of each draw.

    Samples are weighted in the order of their scores, so that what it holds grows with the
    samples, and not with groups times scores.
    """
    order = np.argsort(s, kind="stable")
    ranked = s[order]
    starts = np.append(0, 1 + np.flatnonzero(ranked[1:] != ranked[:-1]))
    owner, positive = group[order], y[order].astype(np.float64)

    def weigh(weights: Floats) -> Floats:
        drawn = weights[:, owner]
        sides = (drawn * side for side in (positive, 1.0 - positive))
        return areas_of_counts(*(np.add.reduceat(side, starts, axis=1) for side in sides))

    return weigh


def _group_codes(y: NDArray[np.bool_], groups: Sequence[Hashable]) -> tuple[NDArray[np.int64], int]:
    code, n = group_codes(y.size, groups)
    if n < 2:
        raise SpecError(
            f"groups: all {y.size} samples are of one group; allowed are two groups or more, as "
            "every draw of one is the same; leave `groups` out to resample samples"
        )
    return code, n


def _class_totals(y: NDArray[np.bool_], code: NDArray[np.int64], n: int) -> Floats:
    """(groups, 2) samples of each class."""
    sides = [np.bincount(code[side], minlength=n) for side in (y, ~y)]
    return np.stack(sides, axis=1).astype(np.float64)


def _group_weights(totals: Floats, n_resamples: int, rng: np.random.Generator) -> Floats:
    """How often each group is in each draw, (draws, groups); draws without a class are redrawn."""
    n = len(totals)
    even = np.full(n, 1.0 / n)
    weights = rng.multinomial(n, even, size=n_resamples).astype(np.float64)
    for _ in range(1000):
        bad = ((weights @ totals) == 0).any(axis=1)
        if not bad.any():
            return weights
        weights[bad] = rng.multinomial(n, even, size=int(bad.sum()))
    raise SpecError(
        f"groups: {n} groups, and a draw with both classes is too rare; allowed are several groups "
        "per class; leave `groups` out to resample samples"
    )


def _jackknife(
    y: NDArray[np.bool_], s: Floats, statistic: Statistic, groups: Sequence[Hashable] | None
) -> list[Floats]:
    """The statistic without each sample (by class) or without each group."""
    if groups is not None:
        code, n = _group_codes(y, groups)
        if statistic is auroc:
            totals, weigh = _class_totals(y, code, n), _weigher(y, s, code)
            whole = np.flatnonzero((totals.sum(axis=0) > totals).all(axis=1))
            step = max(1, CELLS // y.size)
            parts = [whole[i : i + step] for i in range(0, whole.size, step)]
            return [np.concatenate([weigh(_without(p, n)) for p in parts])] if parts else []
        made = []
        for g in range(n):
            kept = code != g
            if 0 < y[kept].sum() < kept.sum():
                made.append(statistic(y[kept], s[kept]))
        return [np.array(made)] if made else []
    if statistic is auroc:
        above, below = placements(s[y], s[~y])
        return [(v.sum() - v) / (v.size - 1) if v.size > 1 else v for v in (above, below)]
    every = np.arange(y.size)
    return [
        np.array([statistic(y[every != i], s[every != i]) for i in np.flatnonzero(side)])
        for side in (y, ~y)
        if side.sum() > 1
    ]


def _without(left_out: NDArray[np.int64], n: int) -> Floats:
    """Weights (left_out, n) of all groups but one each."""
    weights = np.ones((left_out.size, n))
    weights[np.arange(left_out.size), left_out] = 0.0
    return weights


def _corrected(
    tails: list[float], values: Floats, observed: float, left_out: list[Floats]
) -> list[float]:
    """Tail probabilities of BCa; those of the percentile method where nothing varies."""
    normal = NormalDist()
    share = float((values < observed).mean() + (values == observed).mean() / 2.0)
    # One draw in all of them at least: an infinite correction says nothing.
    edge = 1.0 / (values.size + 1)
    bias = normal.inv_cdf(min(max(share, edge), 1.0 - edge))
    cubes = squares = 0.0
    for side in left_out:
        influence = (side.size - 1) * (side.mean() - side)
        cubes += float((influence**3).sum()) / side.size**3
        squares += float((influence**2).sum()) / side.size**2
    skew = cubes / (6.0 * squares**1.5) if squares > 0 else 0.0
    made = []
    for tail in tails:
        z = bias + normal.inv_cdf(tail)
        made.append(normal.cdf(bias + z / (1.0 - skew * z)))
    return made
