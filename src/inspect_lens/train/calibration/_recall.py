"""Recall at a false positive rate, with the uncertainty of the threshold and of the positives."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from inspect_lens.probe import Interval

__all__ = ["RecallDraws", "recall_draws"]

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

    Args:
        positives: (n_positive,) scores.
        control: (n_control,) scores of negatives.
        fpr: false positive rate of the threshold.
        groups: (n_positive,) what is drawn whole; None draws samples.
        control_groups: (n_control,) of the control samples.
        n_draws: of the bootstrap.
        seed: of the generator.

    Returns:
        The draws.
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
