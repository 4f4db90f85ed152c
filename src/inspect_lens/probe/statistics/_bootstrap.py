"""Bootstrap draws, of samples inside each class or of whole groups, and intervals of them.

A draw is how often each sample is in it, so that the AUROC of many draws, which depends on ranks
only, is a few array operations.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from inspect_lens.errors import SpecError

from ._measured import Interval, count_groups, group_codes
from ._metrics import auroc, check_level, split_classes

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
        The interval. NaN bounds when a class is missing, and of `bca` where it is not defined, as
        where one group alone holds a class. With fewer than 8 groups, or 5 with a
        class, it is too narrow, and its method says so (`count_groups`).

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
    if method not in ("percentile", "bca"):
        raise SpecError(f"method={method!r}; allowed are 'percentile' and 'bca'")
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
    else:
        low, high = np.quantile(values, [(1.0 - level) / 2.0, (1.0 + level) / 2.0])
    few = count_groups(y, groups).too_few
    name += f"; {few}" if few else ""
    return Interval(low=float(low), high=float(high), confidence=confidence, method=name)


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
    if groups is None and values.size and np.all(values == values[0]):
        return float(values[0]), float(values[0])
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
