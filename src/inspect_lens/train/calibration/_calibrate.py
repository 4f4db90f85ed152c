"""The threshold on a control set."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.stats import beta, t

from inspect_lens.errors import SpecError
from inspect_lens.probe import (
    MIN_EFFECTIVE,
    MIN_GROUPS_PER_CLASS,
    Interval,
    Statistic,
    Threshold,
    clopper_pearson,
    conformal_threshold,
    count_groups,
    required_negatives,
)

__all__ = [
    "RecallDraws",
    "fit_threshold",
    "rate_interval",
    "recall_draws",
]


def rate_interval(
    hits: NDArray[np.bool_], groups: Sequence[Hashable] | None, *, confidence: float = 0.95
) -> Interval:
    """Clopper and Pearson's interval, of as many samples as the groups are worth.

    The variance between groups says how many independent samples would vary as much, and a factor
    of t quantiles allows for its own error; its degrees of freedom are the effective number of
    groups, so that one large group beside many small ones does not count as many. It is not
    trusted where fewer than 5 groups have a hit, or fewer than 5 a miss; there each effective
    group counts as one sample, which is careful.

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


def fit_threshold(
    control_scores: ArrayLike,
    fpr: float = 0.01,
    *,
    statistic: Statistic | None = None,
    n_tokens: tuple[int, int] | None = None,
    control: str = "control",
    control_sha256: str | None = None,
    groups: Sequence[Hashable] | None = None,
    allow_few: bool = False,
) -> Threshold:
    """Set a threshold that new control samples exceed with probability at most `fpr`.

    Args:
        control_scores: (samples,) scores of harmless samples, written by the same model.
        fpr: false positive rate to allow.
        statistic: what the scores are, which the threshold acts on alone; None for scores of
            whole answers by the pool of the probe.
        n_tokens: tokens of the shortest and the longest control answer.
        control: name of the control set.
        control_sha256: its hash.
        groups: (samples,) what is independent, such as the scenario; None takes samples. Groups
            are what is counted: ten answers to one question are one. Where they hold several
            samples and are as many as the rate asks for (99 for 1%), each has the same weight
            in the quantile (`Threshold.rule`); fewer cannot have it, and samples are counted.
        allow_few: accept fewer than `required_negatives(fpr)` groups.

    Returns:
        The threshold, with the realised rate and its interval: Clopper and Pearson's of
        independent samples, else of as many as the groups are worth (Korn and Graubard 1998).

    Raises:
        SpecError: too few samples or groups, or a score is NaN.

    Source:
        Rule and limits: `conformal_threshold`, `required_negatives`.

    Example:
        ```python
        import numpy as np

        from inspect_lens.train import fit_threshold

        control = np.random.default_rng(0).standard_normal(500)
        threshold = fit_threshold(control, fpr=0.01)
        assert threshold.n_above <= 5
        print(threshold.value, threshold.interval)
        ```
    """
    scores = np.asarray(control_scores, dtype=np.float64).ravel()
    need = required_negatives(fpr)
    found = count_groups(np.zeros(scores.size), groups).total
    if found < need and not allow_few:
        size = f"{scores.size}"
        size += "" if found == scores.size else f", but {found} independent groups"
        raise SpecError(
            f"control_scores: {size} of {control!r} for a false positive rate of {fpr:g}; allowed "
            f"are {need} or more, as fewer cannot show that rate; score more control samples of "
            "other groups, ask for a larger rate, or pass allow_few=True (--allow-few) and read "
            "the interval"
        )
    by_group = groups is not None and found < scores.size and found + 1 >= 1.0 / fpr - 1e-9
    value = conformal_threshold(scores, fpr, groups=groups if by_group else None)
    above = scores > value
    return Threshold(
        value=value,
        statistic=statistic,
        n_tokens=n_tokens,
        fpr=fpr,
        control=control,
        control_sha256=control_sha256,
        n_control=scores.size,
        n_groups=None if groups is None else found,
        n_above=int(above.sum()),
        interval=rate_interval(above, groups),
        rule="groups" if by_group else "samples",
    )


Floats = NDArray[np.float64]
_CELLS: Final = 4_000_000  # numbers held at once


class RecallDraws(NamedTuple):
    """Recall in bootstrap draws of positives and control samples."""

    values: Floats
    """(draws,)."""

    @property
    def mean(self) -> float:
        """Mean over the draws: a smoothed estimate, which one lucky control sample moves little."""
        return float(self.values.mean())

    @property
    def interval(self) -> Interval:
        """Percentiles of the draws."""
        low, high = np.quantile(self.values, [0.025, 0.975])
        return Interval(low=float(low), high=float(high), method="bootstrap of both sets")


def recall_draws(
    positives: Floats,
    control: Floats,
    fpr: float,
    *,
    groups: Sequence[Hashable] | None = None,
    control_groups: Sequence[Hashable] | None = None,
    n_draws: int = 400,
    seed: int = 0,
) -> RecallDraws:
    """Draw both sets, set the threshold on the drawn control samples, count the drawn positives.

    The same seed draws the same samples, so that layers scored on the same sets are compared in
    pairs. Where the control set is too small for the rate, its largest score is the threshold.
    """
    rng = np.random.default_rng(seed)
    thresholds = _thresholds(control, control_groups, fpr, n_draws, rng)
    order = np.argsort(positives, kind="stable")
    ranked = positives[order]
    # How many positives lie at or below each draw's threshold, in its own draw of them.
    place = np.searchsorted(ranked, thresholds, side="right")
    made, first = np.empty(n_draws), 0
    for weights in _weights(positives.size, groups, n_draws, rng):
        last = first + len(weights)
        total = np.concatenate(
            [np.zeros((len(weights), 1)), np.cumsum(weights[:, order], axis=1)], axis=1
        )
        below = total[np.arange(len(weights)), place[first:last]]
        made[first:last] = 1.0 - below / total[:, -1]
        first = last
    return RecallDraws(made)


def _thresholds(
    control: Floats,
    groups: Sequence[Hashable] | None,
    fpr: float,
    n_draws: int,
    rng: np.random.Generator,
) -> Floats:
    """(draws,) the conformal quantile of each draw of the control samples."""
    order = np.argsort(control, kind="stable")
    ranked, parts = control[order], []
    for weights in _weights(control.size, groups, n_draws, rng):
        total = np.cumsum(weights[:, order], axis=1)
        n = total[:, -1:]
        rank = np.minimum(np.ceil(round(1.0 - fpr, 12) * (n + 1.0)), n)
        parts.append(ranked[np.argmax(total >= rank - 1e-9, axis=1)])
    return np.concatenate(parts)


def _weights(
    n: int, groups: Sequence[Hashable] | None, n_draws: int, rng: np.random.Generator
) -> list[Floats]:
    """How often each sample is in each draw, in parts of (draws, samples)."""
    number: dict[Hashable, int] = {}
    codes = np.array(
        [number.setdefault(g, len(number)) for g in (range(n) if groups is None else groups)]
    )
    k, step = len(number), max(1, _CELLS // n)
    sizes = [min(step, n_draws - i * step) for i in range(math.ceil(n_draws / step))]
    return [
        rng.multinomial(k, np.full(k, 1.0 / k), size=size)[:, codes].astype(np.float64)
        for size in sizes
    ]
