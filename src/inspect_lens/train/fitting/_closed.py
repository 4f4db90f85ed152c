"""Families that end in a formula, fitted at several layers from one pass over a store.

Means and covariances are summed; LAT needs 2 · `n_pairs` rows, which labels and groups name in
advance. Scaling needs medians of 40,000 rows at most, which are read once more where variances say
that a few dimensions may be huge. So all of it is what a fit in memory has.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import lstsq

from inspect_lens.errors import SpecError
from inspect_lens.train.families._binary import dominated, find_scale, rows_for_scale, scale_bytes
from inspect_lens.train.families._direction import (
    DirectionEstimator,
    LATProbe,
    LDAProbe,
    MassMeanProbe,
    MeanDifferenceProbe,
    inverse_times,
)

from ._moments import ClassMoments, Moments, prefetch, read_blocks
from ._row_view import RowView

__all__ = [
    "check_shrinkage",
    "closed_bytes",
    "finish",
    "fit_closed",
]

Floats = NDArray[np.float64]


def finish(estimator: Any, moments: Moments, scale: Floats | None) -> None:
    """Set what a family learns."""
    low, high = moments.class_means()
    estimator.classes_, estimator.n_features_in_ = np.array([0, 1]), low.size
    estimator.mean_ = (high + low) / 2.0
    estimator.scale_ = np.ones_like(low) if scale is None else scale
    estimator.intercept_ = 0.0
    gap = (high - low) / estimator.scale_
    if isinstance(estimator, MeanDifferenceProbe):
        norm = float(np.linalg.norm(gap))
        estimator.coef_ = gap / norm if estimator.normalize and norm > 0.0 else gap
    elif isinstance(estimator, MassMeanProbe):
        estimator.coef_ = gap
        if estimator.iid:
            covariance = _within(moments, scale)
            estimator.coef_ = inverse_times(covariance, gap, atol=estimator.atol)
    else:
        covariance = _shrunk(_within(moments, scale), estimator.shrinkage)
        estimator.coef_ = np.linalg.lstsq(covariance, gap, rcond=None)[0]
        if not estimator.equal_priors:
            estimator.intercept_ = float(np.log(moments.n[1] / moments.n[0]))


def check_shrinkage(estimator: Any) -> None:
    """Refuse a shrinkage that is none, before rows are read."""
    value = getattr(estimator, "shrinkage", None)
    named = value in ("ridge", "ledoit-wolf")
    if value is not None and not named and (isinstance(value, str) or not 0.0 <= value <= 1.0):
        raise SpecError(
            f"shrinkage={value!r}; allowed are 'ledoit-wolf', 'ridge', a number in [0, 1] and "
            "None; correct the value"
        )


def _within(moments: Moments, scale: Floats | None) -> Floats:
    covariance = moments.within()
    if scale is not None:
        covariance /= scale[:, None]
        covariance /= scale
    return covariance


def _shrunk(covariance: Floats, shrinkage: Any) -> Floats:
    level = float(np.trace(covariance)) / len(covariance)
    diagonal = np.diag_indices_from(covariance)
    if shrinkage == "ridge":
        covariance[diagonal] += 0.01 * level or 1.0
    elif shrinkage is not None:
        covariance *= 1.0 - shrinkage
        covariance[diagonal] += shrinkage * level
    return covariance


_CLOSED: Final = (MeanDifferenceProbe, MassMeanProbe, LDAProbe, LATProbe)
_MAYBE_HUGE: Final = 0.3
"""Share of the variance in 1% of the dimensions below which medians need not be looked at: squares
around a median are at most twice those around the mean, so they call no dimension huge there."""
_SOLVING: Final = 6
"""Matrices of hidden x hidden that solving for a direction takes, beside the sums of the layers."""


def closed_bytes(estimator: Any, data: RowView) -> tuple[int, int] | None:
    """What a fit holds: bytes per layer, and bytes once, whatever the number of layers."""
    if type(estimator) not in _CLOSED:
        return None
    n, hidden = len(data), data.hidden
    matrices, paired = _matrices(estimator), 0
    if isinstance(estimator, LATProbe):
        paired = 2 * min(estimator.n_pairs or n, n // 2)
    each = 8 * matrices * hidden**2 + 4 * paired * hidden + 48 * hidden
    solving = 8 * _SOLVING * hidden**2 * bool(matrices) + 16 * paired * hidden
    return each, max(solving, 0 if estimator.scaling == "none" else scale_bytes(n, hidden))


def fit_closed(made: Mapping[int, DirectionEstimator], data: RowView) -> Iterator[int]:
    """Fit a family at several layers from one pass.

    Two for LDA with Ledoit and Wolf's shrinkage.
    """
    first = next(iter(made.values()))
    check_shrinkage(first)
    sums = {layer: _Sums(estimator, data) for layer, estimator in made.items()}
    labels = data.labels
    for layer, index, rows in prefetch(data.passes(list(made))):
        sums[layer].add(index, rows, labels[index])
    for layer, part in sums.items():
        part.turn(_find_scale(part, data, layer))
    if _by_class(first):
        for layer, index, rows in prefetch(data.passes(list(made))):
            sums[layer].add_again(rows, labels[index])
    for layer in made:
        sums.pop(layer).solve()
        yield layer


def _find_scale(part: _Sums, data: RowView, layer: int) -> Floats | None:
    """What dimensions are divided by, from rows that are read for it where it may be anything."""
    estimator: Any = part.estimator
    n, way = len(part.labels), estimator.scaling
    if way == "auto" and dominated(part.moments.within_variance())[1] < _MAYBE_HUGE:
        return None
    if way == "none" or n < 4:
        return None
    sample = _Picked(np.arange(n)[rows_for_scale(n)], n, data.hidden)
    for _, index, rows in prefetch(data.passes([layer])):
        sample.add(index, rows)
    labels = part.labels[sample.picks]
    return find_scale(sample.rows, labels, way, family=type(estimator).__name__)


def _by_class(estimator: Any) -> bool:
    return isinstance(estimator, LDAProbe) and estimator.shrinkage == "ledoit-wolf"


def _matrices(estimator: Any) -> int:
    if _by_class(estimator):
        return 2
    return int(isinstance(estimator, LDAProbe) or bool(getattr(estimator, "iid", False)))


class _Sums:
    """What one layer's fit knows of the rows."""

    def __init__(self, estimator: Any, data: RowView) -> None:
        self.estimator = estimator
        self.labels = labels = data.labels
        hidden, n = data.hidden, len(labels)
        self.moments: Moments | ClassMoments = (
            ClassMoments(hidden)
            if _by_class(estimator)
            else Moments(hidden, covariance=bool(_matrices(estimator)))
        )
        self.scale: Floats | None = None
        picks = np.arange(0)
        if isinstance(estimator, LATProbe):
            self.pairs = estimator.pairs(labels, data.groups)
            picks = np.concatenate(self.pairs[:2])
        self.paired = _Picked(picks, n, hidden)

    def add(
        self, index: NDArray[np.int64], rows: NDArray[np.float32], labels: NDArray[np.bool_]
    ) -> None:
        large = bool(_matrices(self.estimator))
        for x, positive in read_blocks(rows, labels, device="cpu", large=large):
            self.moments.add(x, positive)
        self.paired.add(index, rows)

    def turn(self, scale: Floats | None) -> None:
        """End the first pass, with what each dimension is divided by."""
        self.scale = scale
        if isinstance(self.moments, ClassMoments):
            self.moments.turn(np.ones(self.moments.hidden) if scale is None else scale)

    def add_again(self, rows: NDArray[np.float32], labels: NDArray[np.bool_]) -> None:
        assert isinstance(self.moments, ClassMoments)
        for x, positive in read_blocks(rows, labels, device="cpu", large=True):
            self.moments.add_again(x, positive)

    def solve(self) -> None:
        """Set what the estimator learns."""
        if isinstance(self.estimator, LATProbe):
            self._solve_pairs(self.estimator)
        elif isinstance(self.moments, ClassMoments):
            self._solve_discriminant(self.moments)
        else:
            finish(self.estimator, self.moments, self.scale)

    def _solve_pairs(self, made: LATProbe) -> None:
        assert isinstance(self.moments, Moments)
        low, high = self.moments.class_means()
        scale = np.ones_like(low) if self.scale is None else self.scale
        first, _, signs = self.pairs
        wide = self.paired.rows / scale
        differences = wide[: first.size] - wide[first.size :]
        made.classes_, made.n_features_in_ = np.array([0, 1]), low.size
        made.fit_pairs(differences * signs[:, None], low / scale, high / scale)
        made.mean_, made.scale_ = made.mean_ * scale, made.scale_ * scale

    def _solve_discriminant(self, moments: ClassMoments) -> None:
        made: Any = self.estimator
        low, high = moments.class_means()
        scale = np.ones_like(low) if self.scale is None else self.scale
        made.classes_, made.n_features_in_ = np.array([0, 1]), low.size
        made.coef_ = lstsq(moments.covariance(), (high - low) / scale)[0]
        made.mean_, made.scale_ = (high + low) / 2.0, scale
        odds = float(np.log(moments.n[1] / moments.n[0]))
        made.intercept_ = 0.0 if made.equal_priors else odds


class _Picked:
    """Some rows of a layer, by their places, gathered from a pass."""

    def __init__(self, picks: NDArray[np.int64], n: int, hidden: int) -> None:
        self.picks = picks
        self.rows = np.zeros((len(picks), hidden), dtype=np.float32)
        self._slot = np.full(n if len(picks) else 0, -1, dtype=np.int32)
        self._slot[picks] = np.arange(len(picks))

    def add(self, index: NDArray[np.int64], rows: NDArray[np.float32]) -> None:
        if len(self.picks):
            slot = self._slot[index]
            self.rows[slot[slot >= 0]] = rows[slot >= 0]
