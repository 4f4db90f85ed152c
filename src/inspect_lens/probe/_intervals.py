"""Intervals: exact for a proportion, DeLong and bootstrap for rankings. numpy and stdlib only."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from statistics import NormalDist

import numpy as np
from numpy.typing import ArrayLike, NDArray

from inspect_lens.errors import SpecError

from ._card import Interval
from ._metrics import auroc, midranks, split_classes

__all__ = ["bootstrap_interval", "clopper_pearson", "delong_interval"]


def clopper_pearson(successes: int, n: int, *, confidence: float = 0.95) -> Interval:
    """Exact interval of a proportion.

    Each bound solves a binomial tail for alpha / 2, so coverage is never below `confidence`.
    For the threshold of `conformal_threshold`, with `n` calibration scores of which
    `successes` lie above it, the upper bound is also the exact quantile of the true false
    positive rate, which then follows Beta(successes + 1, n - successes) [no ties].

    Args:
        successes: how often it happened.
        n: how often it could have; positive.
        confidence: two-sided level.

    Returns:
        The interval; it reaches 0 or 1 when `successes` is 0 or `n`.

    Raises:
        SpecError: the counts are impossible, or the level is not inside (0, 1).

    Source:
        Clopper and Pearson 1934; checked against scipy in `tests/unit/probe/`.
    """
    if n < 1 or not 0 <= successes <= n:
        raise SpecError(
            f"clopper_pearson: {successes} of {n}; allowed are 0 <= successes <= n with n >= 1; "
            "count the samples before asking for an interval"
        )
    tail = (1.0 - _level(confidence)) / 2.0
    low = 0.0 if successes == 0 else 1.0 - _upper(n - successes, n, tail)
    high = 1.0 if successes == n else _upper(successes, n, tail)
    return Interval(low=low, high=high, confidence=confidence, method="clopper-pearson")


def _upper(k: int, n: int, tail: float) -> float:
    """The p at which P(X <= k) = tail, X ~ Binomial(n, p); k < n. Bisection, to 1 ulp."""
    i = np.arange(k + 1, dtype=np.float64)
    choose = np.array(
        [math.lgamma(n + 1) - math.lgamma(j + 1) - math.lgamma(n - j + 1) for j in range(k + 1)]
    )
    low, high = k / n, 1.0
    while True:
        p = (low + high) / 2.0
        if p in (low, high):
            return p
        logs = choose + i * math.log(p) + (n - i) * math.log1p(-p)
        top = float(logs.max())
        if math.exp(top) * float(np.exp(logs - top).sum()) > tail:
            low = p
        else:
            high = p


def delong_interval(labels: ArrayLike, scores: ArrayLike, *, confidence: float = 0.95) -> Interval:
    """DeLong's interval of the AUROC, on the logit scale so that it stays inside [0, 1].

    Perfect separation has no sampling variance to measure. There the bound is exact for
    `min(n_pos, n_neg)` Bernoulli trials, which is conservative: A (1 - A) / min(n_pos, n_neg)
    bounds the variance of every AUROC A (Birnbaum and Klose 1957).

    Args:
        labels: (samples,) 0 and 1, or bools.
        scores: (samples,) float; larger means more positive.
        confidence: two-sided level.

    Returns:
        The interval, with the method that made it. NaN bounds when a class is missing.

    Raises:
        SpecError: shapes disagree, or a score is NaN.

    Source:
        DeLong et al. 1988 with the midranks of Sun and Xu 2014; logit scale as in Pepe 2003.
    """
    level = _level(confidence)
    positive, negative = split_classes(labels, scores)
    m, n = positive.size, negative.size
    if m == 0 or n == 0:
        return Interval(low=math.nan, high=math.nan, confidence=confidence, method="delong")
    ranks = midranks(np.concatenate([positive, negative]))
    above = (ranks[:m] - midranks(positive)) / n
    below = 1.0 - (ranks[m:] - midranks(negative)) / m
    area = float(above.mean())
    spread = sum(float(v.var(ddof=1)) / v.size for v in (above, below) if v.size > 1)
    if spread <= 0.0 or area in (0.0, 1.0):
        k = min(m, n)
        exact = clopper_pearson(round(area * k), k, confidence=confidence)
        return exact.model_copy(update={"method": "clopper-pearson, n = smaller class"})
    z = NormalDist().inv_cdf(0.5 + level / 2.0)
    logit, step = math.log(area / (1.0 - area)), z * math.sqrt(spread) / (area * (1.0 - area))
    return Interval(
        low=_expit(logit - step), high=_expit(logit + step), confidence=confidence, method="delong"
    )


def bootstrap_interval(
    labels: ArrayLike,
    scores: ArrayLike,
    *,
    statistic: Callable[[NDArray[np.bool_], NDArray[np.float64]], float] = auroc,
    groups: Sequence[Hashable] | None = None,
    confidence: float = 0.95,
    n_resamples: int = 10_000,
    seed: int = 0,
) -> Interval:
    """Percentile bootstrap of a statistic of labels and scores.

    Without `groups`, samples are drawn with replacement inside each class. With `groups`,
    whole groups are drawn (cluster bootstrap), because samples of one scenario are not
    independent; draws that lost a class are drawn again.

    Args:
        labels: (samples,) 0 and 1, or bools.
        scores: (samples,) float.
        statistic: of (labels, scores); the AUROC by default.
        groups: (samples,) group of each sample.
        confidence: two-sided level.
        n_resamples: draws.
        seed: of the generator; the same seed gives the same interval.

    Returns:
        The interval. NaN bounds when a class is missing.

    Raises:
        SpecError: shapes disagree, a score is NaN, or so few groups hold a class that draws
            with both classes are rare.
    """
    level = _level(confidence)
    positive, negative = split_classes(labels, scores)
    method = "stratified bootstrap" if groups is None else "cluster bootstrap"
    if positive.size == 0 or negative.size == 0:
        return Interval(low=math.nan, high=math.nan, confidence=confidence, method=method)
    y, s = np.asarray(labels).astype(bool), np.asarray(scores, dtype=np.float64)
    rng = np.random.default_rng(seed)
    draw = _stratified(y, rng) if groups is None else _clustered(y, groups, rng)
    if statistic is auroc:
        # The area depends on ranks only, so scores are coded once and counted in each draw.
        s, statistic = np.unique(s, return_inverse=True)[1].astype(np.float64), _area_of_codes
    values = np.empty(n_resamples)
    for b in range(n_resamples):
        index = draw()
        values[b] = statistic(y[index], s[index])
    low, high = np.quantile(values, [(1.0 - level) / 2.0, (1.0 + level) / 2.0])
    return Interval(low=float(low), high=float(high), confidence=confidence, method=method)


def _area_of_codes(y: NDArray[np.bool_], codes: NDArray[np.float64]) -> float:
    """`auroc` for scores (samples,) that are small non-negative integers."""
    whole = codes.astype(np.int64)
    top = int(whole.max()) + 1
    positive = np.bincount(whole[y], minlength=top)
    negative = np.bincount(whole[~y], minlength=top)
    below = np.cumsum(negative) - negative / 2.0
    return float((positive * below).sum() / (positive.sum() * negative.sum()))


def _stratified(y: NDArray[np.bool_], rng: np.random.Generator) -> Callable[[], NDArray[np.int64]]:
    classes = [np.flatnonzero(y), np.flatnonzero(~y)]
    return lambda: np.concatenate([rng.choice(c, size=c.size) for c in classes])


def _clustered(
    y: NDArray[np.bool_], groups: Sequence[Hashable], rng: np.random.Generator
) -> Callable[[], NDArray[np.int64]]:
    if len(groups) != y.size:
        raise SpecError(
            f"groups: {len(groups)} groups for {y.size} samples; allowed is one group per "
            "sample; pass the groups of the same samples as the labels"
        )
    members: dict[Hashable, list[int]] = {}
    for i, group in enumerate(groups):
        members.setdefault(group, []).append(i)
    blocks = [np.array(m) for m in members.values()]

    def draw() -> NDArray[np.int64]:
        for _ in range(1000):
            picks = rng.integers(len(blocks), size=len(blocks))
            index: NDArray[np.int64] = np.concatenate([blocks[p] for p in picks])
            if y[index].any() and not y[index].all():
                return index
        raise SpecError(
            f"groups: {len(blocks)} groups, and a draw with both classes is too rare; allowed "
            "are several groups per class; leave `groups` out to resample samples"
        )

    return draw


def _level(confidence: float) -> float:
    if not 0.0 < confidence < 1.0:
        raise SpecError(
            f"confidence={confidence!r}; allowed is a number between 0 and 1; 0.95 is usual"
        )
    return confidence


def _expit(x: float) -> float:
    return 1.0 / (1.0 + math.exp(-x)) if x >= 0 else math.exp(x) / (1.0 + math.exp(x))
