"""The interval of a share of samples, such as recall, where samples come in groups."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.stats import beta, t

from inspect_lens.probe import MIN_EFFECTIVE, MIN_GROUPS_PER_CLASS, Interval, clopper_pearson

__all__ = ["rate_interval"]


def rate_interval(
    hits: NDArray[np.bool_], groups: Sequence[Hashable] | None, *, confidence: float = 0.95
) -> Interval:
    """Clopper and Pearson's interval, of as many samples as the groups are worth.

    The variance between groups says how many independent samples would vary as much, and a factor
    of t quantiles allows for its own error; its degrees of freedom are the effective number of
    groups, so that one large group beside many small ones does not count as many. It is not
    trusted where fewer than 5 groups have a hit, or fewer than 5 a miss; there each effective
    group counts as one sample, which is careful.

    Args:
        hits: (samples,) of what share; at least one sample.
        groups: (samples,) what is independent; None, or one sample each, takes samples.
        confidence: two-sided level.

    Returns:
        The interval; its method says what n is.

    Source:
        Korn and Graubard 1998, Survey Methodology 24, 193-201.
    """
    n, share = hits.size, float(hits.mean())
    number: dict[Hashable, int] = {}
    codes = [number.setdefault(g, len(number)) for g in (range(n) if groups is None else groups)]
    k = len(number)
    if k == n:
        return clopper_pearson(int(hits.sum()), n, confidence=confidence)
    size = np.bincount(codes, minlength=k)
    equal = float(n**2 / (size**2).sum())
    of_group = [np.bincount(codes, weights=side, minlength=k) for side in (hits, ~hits)]
    held = min(int((side > 0).sum()) for side in of_group)
    if held < MIN_GROUPS_PER_CLASS or equal < MIN_EFFECTIVE:
        trials = max(1, math.floor(equal))
        exact = clopper_pearson(round(share * trials), trials, confidence=confidence)
        few = f"; too few groups ({k})" if min(k, equal) < MIN_GROUPS_PER_CLASS else ""
        worth_of = "" if trials == k else f", worth {trials} of equal size"
        method = f"clopper-pearson, n = {k} groups{worth_of}{few}"
        return exact.model_copy(update={"method": method})
    away = np.bincount(codes, weights=hits - share, minlength=k)
    variance = float((away**2 / (1.0 - size / n)).sum()) / n**2
    tail = (1.0 - confidence) / 2.0
    worth = float(n) if variance == 0 else min(share * (1.0 - share) / variance, float(n))
    worth *= float(t.ppf(tail, n - 1) / t.ppf(tail, equal - 1.0)) ** 2
    hit = share * worth
    return Interval(
        low=float(beta.ppf(tail, hit, worth - hit + 1.0)),
        high=float(beta.ppf(1.0 - tail, hit + 1.0, worth - hit)),
        confidence=confidence,
        method=f"korn-graubard, {k} groups",
    )
