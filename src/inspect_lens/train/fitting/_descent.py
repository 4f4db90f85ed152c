"""Families that AdamW fits on all rows at once, on rows that come in pieces.

Loss and gradient are sums over rows, or over what pairs of rows project to. So each step takes
one pass (`TorchLogisticProbe`) or two (`CCSProbe`), and the steps are those of a fit in memory, up
to the order of sums in float64.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from inspect_lens.train.families._torch_logistic import CCSProbe, TorchLogisticProbe, ccs_loss

from ._moments import require_both, wide_blocks
from ._row_view import Again, RowView

__all__ = ["fit_ccs", "fit_torch_logistic"]

Floats = NDArray[np.float64]
_COPIES: Final = 12  # of (pairs, starts) numbers, that a step of CCS takes


def fit_torch_logistic(
    made: TorchLogisticProbe, view: RowView, layer: int, *, tick: Callable[[], None]
) -> None:
    """Fit as `TorchLogisticProbe.fit` does.

    Args:
        made: unfitted; computes where its `device` says.
        view: rows of a store.
        layer: one of its layers.
        tick: called after each step.

    Raises:
        SpecError: a class is missing, or a value is not finite.
    """
    labels = view.labels
    require_both(labels)
    read = view.again(layer, spare=view.data.memory * 1e9)
    total = np.zeros(view.hidden)
    for _, x in wide_blocks(read):
        total += x.sum(axis=0)
    mean = total / len(labels) if made.center else np.zeros(view.hidden)
    weight, optimiser = made.begin(view.hidden)
    target, centre = torch.from_numpy(labels.astype(np.float64)), torch.from_numpy(mean)
    loss = 0.0
    for _ in range(made.epochs):
        now, slope, loss = weight.detach().cpu(), torch.zeros(view.hidden, dtype=torch.float64), 0.0
        for index, x in wide_blocks(read):
            rows, wanted = torch.from_numpy(x) - centre, target[torch.from_numpy(index)]
            logits = rows @ now
            loss += float(
                torch.nn.functional.binary_cross_entropy_with_logits(
                    logits, wanted, reduction="sum"
                )
            )
            slope += (torch.sigmoid(logits) - wanted) @ rows
        weight.grad = (slope / len(labels)).to(weight.device)
        optimiser.step()
        tick()
    made.classes_, made.n_features_in_ = np.array([0, 1]), view.hidden
    made.end(weight, mean, loss / len(labels))


def fit_ccs(made: CCSProbe, view: RowView, layer: int, *, tick: Callable[[], None]) -> None:
    """Fit as `CCSProbe.fit` does.

    Args:
        made: unfitted.
        view: rows of a store.
        layer: one of its layers.
        tick: called after each step.

    Raises:
        SpecError: a class is missing, or a value is not finite.
    """
    labels = view.labels
    require_both(labels)
    rng = np.random.default_rng(made.random_state)
    sides = [_Side(rows, len(labels)) for rows in made.pairs(labels, view.groups, rng)]
    projections = _COPIES * 8 * made.restarts * sides[0].n
    read = view.again(layer, spare=view.data.memory * 1e9 - projections)
    for index, x in wide_blocks(read):
        for side in sides:
            side.add(index, x)
    norms = [made.norm(side.mean, side.spread) for side in sides]
    weight, optimiser = made.begin(view.hidden, rng)
    for _ in range(made.epochs):
        projected = _project(read, sides, norms, weight)
        ccs_loss(*projected).sum().backward()  # type: ignore[no-untyped-call]
        weight.grad = _pull_back(read, sides, norms, [p.grad for p in projected])
        optimiser.step()
        tick()
    with torch.no_grad():
        losses = ccs_loss(*_project(read, sides, norms, weight))

    def told() -> float:
        right = 0
        for index, x in wide_blocks(read):
            scores = (x - made.mean_) / made.scale_ @ made.coef_
            right += int(((scores > 0) == labels[index]).sum())
        return right / len(labels)

    made.classes_, made.n_features_in_ = np.array([0, 1]), view.hidden
    made.end(weight, losses, norms, told)


class _Side:
    """One side of all pairs: which row is whose, mean and standard deviation."""

    def __init__(self, rows: NDArray[np.int64], n: int) -> None:
        self.n = len(rows)
        self.slot = np.full(n, -1, dtype=np.int32)
        """(rows,) pair of each row; -1 of no pair."""
        self.slot[rows] = np.arange(len(rows))
        self._shift: Floats | None = None
        self._sum = self._square = np.zeros(0)

    def add(self, index: NDArray[np.int64], x: Floats) -> None:
        x = x[self.slot[index] >= 0]
        if not len(x):
            return
        if self._shift is None:
            # Squares of distances from about the mean: the stream is often far from 0.
            self._shift = x.mean(axis=0)
            self._sum, self._square = np.zeros(x.shape[1]), np.zeros(x.shape[1])
        away = x - self._shift
        self._sum += away.sum(axis=0)
        self._square += (away * away).sum(axis=0)

    @property
    def mean(self) -> Floats:
        assert self._shift is not None
        made: Floats = self._shift + self._sum / self.n
        return made

    @property
    def spread(self) -> Floats:
        made: Floats = np.sqrt(np.maximum(self._square / self.n - (self._sum / self.n) ** 2, 0.0))
        return made


def _project(
    read: Again, sides: list[_Side], norms: list[tuple[Floats, Floats]], weight: torch.Tensor
) -> list[torch.Tensor]:
    """Normalised rows of each side times the weights of each start, (pairs, starts) twice."""
    w = weight.detach().numpy()
    made = [np.empty((side.n, w.shape[1])) for side in sides]
    for index, x in wide_blocks(read):
        for side, (mean, scale), out in zip(sides, norms, made, strict=True):
            slot = side.slot[index]
            out[slot[slot >= 0]] = (x[slot >= 0] - mean) @ (w / scale[:, None])
    return [torch.from_numpy(part).requires_grad_() for part in made]


def _pull_back(
    read: Again,
    sides: list[_Side],
    norms: list[tuple[Floats, Floats]],
    slopes: list[torch.Tensor | None],
) -> torch.Tensor:
    """Gradient of the weights (hidden, starts) from that of the projections."""
    known = [part.numpy() for part in slopes if part is not None]
    made = np.zeros((norms[0][0].size, known[0].shape[1]))
    for index, x in wide_blocks(read):
        for side, (mean, scale), slope in zip(sides, norms, known, strict=True):
            slot = side.slot[index]
            made += (x[slot >= 0] - mean).T @ slope[slot[slot >= 0]] / scale[:, None]
    return torch.from_numpy(made)
