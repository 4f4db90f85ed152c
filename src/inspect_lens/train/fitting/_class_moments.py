"""Ledoit and Wolf's covariance within two classes, of rows that come in pieces, twice."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from ._moments import require_classes

__all__ = ["ClassMoments"]

Floats = NDArray[np.float64]


class ClassMoments:
    """What scikit-learn's `LinearDiscriminantAnalysis(shrinkage="auto")` knows of the rows.

    The first time, counts, means and the second moments of each class are summed: 2 · hidden²
    numbers. How far each class is shrunk depends on the fourth power of its standardised rows'
    length, which a second time sums. All in float64.

    Args:
        hidden: width of a row.
    """

    def __init__(self, hidden: int) -> None:
        self.n = np.zeros(2, dtype=np.int64)
        """Rows of each class, (2,)."""
        self.hidden = hidden
        self._shift: torch.Tensor | None = None
        self._sum = torch.zeros(2, hidden, dtype=torch.float64)
        self._outer = torch.zeros(2, hidden, hidden, dtype=torch.float64)
        self._fourth = np.zeros(2)
        self._centre = self._rate = torch.zeros(0)

    def add(self, x: torch.Tensor, positive: torch.Tensor) -> None:
        """Take rows (n, hidden) and their classes (n,) bool, for the first time."""
        if self._shift is None:
            # Squares of distances from about the mean: the stream is often far from 0.
            self._shift = x.double().mean(dim=0)
        z = x.double() - self._shift
        for k, side in enumerate((~positive, positive)):
            part = z[side]
            self.n[k] += len(part)
            self._sum[k] += part.sum(dim=0)
            self._outer[k].addmm_(part.T, part)

    def within_variance(self) -> Floats:
        """Variance of each dimension around the class means, (hidden,), before `turn`."""
        self.class_means()
        about = self._sum**2 / torch.from_numpy(self.n)[:, None]
        squares = torch.stack([part.diagonal() for part in self._outer]) - about
        made: Floats = squares.sum(dim=0).clamp(min=0.0).numpy() / self.n.sum()
        return made

    def class_means(self) -> tuple[Floats, Floats]:
        """Mean of the negatives and of the positives, (hidden,) each.

        Raises:
            SpecError: a class is missing.
        """
        shift = require_classes(self._shift, self.n)
        low, high = ((shift + self._sum[k] / int(self.n[k])).numpy().copy() for k in range(2))
        return low, high

    def turn(self, scale: Floats) -> None:
        """End the first time: what was summed becomes the correlations of each class.

        Args:
            scale: (hidden,) what each dimension of the rows is divided by.
        """
        means, rate = np.stack(self.class_means()), torch.from_numpy(scale)
        spread = torch.zeros_like(self._sum)
        for k in range(2):
            n = int(self.n[k])
            about = self._sum[k] / n
            self._outer[k].div_(n).addr_(about, about, alpha=-1.0).div_(rate[:, None] * rate)
            variance = self._outer[k].diagonal().clamp(min=0.0).numpy()
            # scikit-learn's bound for a column that is constant but for rounding.
            eps = np.finfo(np.float64).eps
            constant = variance <= n * eps * variance + (n * means[k] / scale * eps) ** 2
            spread[k] = torch.from_numpy(np.where(constant, 1.0, np.sqrt(variance)))
            self._outer[k].div_(spread[k][:, None] * spread[k])
        self._spread = spread.numpy()
        self._centre, self._rate = torch.from_numpy(means), 1.0 / (rate * spread)

    def add_again(self, x: torch.Tensor, positive: torch.Tensor) -> None:
        """Take the same rows for the second time, in any order."""
        for k, side in enumerate((~positive, positive)):
            z = (x[side].double() - self._centre[k]) * self._rate[k]
            self._fourth[k] += float(((z * z).sum(dim=1) ** 2).sum())

    def covariance(self) -> Floats:
        """Pooled covariance (hidden, hidden) of the scaled rows, each class shrunk on its own.

        What the sums held is used up.
        """
        made: Floats | None = None
        for k in range(2):
            part = self._outer[k].numpy()
            level = float(np.trace(part)) / len(part)
            share = _shrinkage(part, self._fourth[k], int(self.n[k]))
            part *= 1.0 - share
            part[np.diag_indices_from(part)] += share * level
            part *= np.outer(self._spread[k], self._spread[k]) * (self.n[k] / self.n.sum())
            made = part if made is None else made + part
        assert made is not None
        return made


def _shrinkage(correlation: Floats, fourth: float, n: int) -> float:
    """Ledoit and Wolf 2004, as `sklearn.covariance.ledoit_wolf_shrinkage` has it."""
    size = len(correlation)
    if size == 1:
        return 0.0
    trace, square = float(np.trace(correlation)), float((correlation**2).sum())
    beta = (fourth / n - square) / (size * n)
    delta = (square - trace**2 / size) / size
    beta = min(beta, delta)
    return 0.0 if beta == 0.0 else beta / delta
