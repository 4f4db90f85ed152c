"""Weighted means and the pooled covariance of rows of two classes, which come in pieces."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from inspect_lens.errors import SpecError

Floats = NDArray[np.float64]
Rows = NDArray[np.floating]
_NUMBERS: Final = 1 << 22


class ClassStatistics(NamedTuple):
    """What the families that end in a formula need to know of the rows."""

    low: Floats
    """(hidden,) mean of the negatives."""
    high: Floats
    """(hidden,) mean of the positives."""
    weight: Floats
    """(2,) of the negatives and the positives; their number where rows have no weights."""
    within: Floats
    """(hidden, hidden) covariance around the class means; empty where nobody asked for it."""


class Moments:
    """Sums over rows of two classes."""

    def __init__(self, hidden: int, *, covariance: bool = False) -> None:
        self.n = 0
        """Rows."""
        self.weight = np.zeros(2)
        self._shift: Floats | None = None
        self._sum, self._square = np.zeros((2, hidden)), np.zeros(hidden)
        self._outer = np.zeros((hidden, hidden) if covariance else (0, 0))

    @classmethod
    def of(
        cls,
        x: Rows,
        positive: NDArray[np.bool_],
        weight: Floats | None = None,
        *,
        covariance: bool = False,
    ) -> Self:
        """Those of rows (rows, hidden) that are in memory, summed in float64."""
        made = cls(x.shape[1], covariance=covariance)
        for part in blocks(len(x), x.shape[1]):
            each = None if weight is None else weight[part]
            made.add(x[part].astype(np.float64), positive[part], each)
        return made

    def add(self, x: Rows, positive: NDArray[np.bool_], weight: Floats | None = None) -> None:
        """Take rows (rows, hidden), their classes and their weights (rows,)."""
        if not np.isfinite(x.sum()):
            raise SpecError(
                "rows: hold NaN or infinity; allowed are finite numbers; leave them out"
            )
        if self._shift is None:
            # Squares of distances from about the mean: the stream is often far from 0.
            # A number of the rows' own kind, so that what is added back is what was taken away.
            self._shift = x.mean(axis=0, dtype=np.float64).astype(x.dtype).astype(np.float64)
        z = x - self._shift.astype(x.dtype)
        each = np.ones(len(x)) if weight is None else weight
        # A product instead of rows picked by class: picking costs more than all the rest.
        sides = (np.stack([~positive, positive]) * each).astype(x.dtype)
        self.n += len(x)
        self.weight += sides.sum(axis=1, dtype=np.float64)
        self._sum += sides @ z
        weighted = z if weight is None else z * each[:, None].astype(x.dtype)
        if self._outer.size:
            self._outer += weighted.T @ z
        self._square += np.einsum("ij,ij->j", weighted, z)

    def statistics(self, scale: Floats | None = None) -> ClassStatistics:
        """Means and covariance of the rows, each dimension divided by its scale (hidden,)."""
        shift, means = self._means()
        low, high = shift + means[0], shift + means[1]
        within = np.zeros((0, 0))
        if self._outer.size:
            share = self.weight / self.weight.sum()
            within = self._outer / self.weight.sum()
            within -= (means * share[:, None]).T @ means
            within = (within + within.T) / 2.0
        if scale is not None:
            low, high = low / scale, high / scale
            within = within / np.outer(scale, scale) if within.size else within
        return ClassStatistics(low, high, self.weight, within)

    def standard(self) -> tuple[Floats, Floats]:
        """Mean and standard deviation of all rows, (hidden,) each; 1 for a constant column."""
        shift, means = self._means()
        offset = self.weight @ means / self.weight.sum()
        variance = self._square / self.weight.sum() - offset**2
        spread = np.sqrt(np.maximum(variance, 0.0))
        tiny = 10 * np.finfo(np.float32).eps * np.abs(shift + offset)
        return shift + offset, np.where((spread <= tiny) | (spread == 0.0), 1.0, spread)

    def within_variance(self) -> Floats:
        """Variance of each dimension around the class means, (hidden,)."""
        _, means = self._means()
        share = self.weight / self.weight.sum()
        variance = self._square / self.weight.sum() - share @ means**2
        return np.asarray(np.maximum(variance, 0.0))

    def _means(self) -> tuple[Floats, Floats]:
        """What sums are about, and the class means from there, (2, hidden)."""
        if self._shift is None or not self.weight.all():
            raise SpecError(
                f"rows: {self.weight[1]:g} positive and {self.weight[0]:g} negative; allowed are "
                "both classes; check the labels"
            )
        return self._shift, self._sum / self.weight[:, None]


def blocks(n: int, hidden: int) -> Iterator[slice]:
    """Parts of n rows that fit into a processor's caches, about."""
    size = max(1, _NUMBERS // hidden)
    return (slice(first, first + size) for first in range(0, n, size))
