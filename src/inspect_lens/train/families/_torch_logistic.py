"""Directions that torch fits: the logistic probe of geometry-of-truth, and CCS."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch.nn import functional

from ._direction import DirectionEstimator
from ._lat import make_pairs

__all__ = ["CCSProbe", "TorchLogisticProbe", "ccs_loss"]


class TorchLogisticProbe(DirectionEstimator):
    """sigmoid(w · x) without intercept, binary cross-entropy, AdamW over all rows at once.

    Args:
        lr: learning rate.
        weight_decay: of AdamW.
        epochs: steps.
        center: subtract the mean of the training rows; the source centres its data sets.
        device: where torch computes, such as `cpu` or `cuda`.
        random_state: of the initial weights.

    Source:
        Code of arXiv:2310.06824: lr 1e-3, weight decay 0.1, 1000 epochs, no bias.

    Example:
        ```python
        from inspect_lens.train import ActivationSet, TorchLogisticProbe

        train, test = (ActivationSet.load(f"acts/{name}.safetensors") for name in ("train", "test"))
        x, labels, groups = train.rows(1)  # (tokens, hidden) at layer 1, and the label of each row
        estimator = TorchLogisticProbe(epochs=200).fit(x, labels, groups)
        x, labels, _ = test.rows(1)
        assert estimator.score(x, labels) > 0.6
        ```
    """

    method = "logistic regression by AdamW"
    source = "arXiv:2310.06824"

    def __init__(
        self,
        *,
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        epochs: int = 1000,
        center: bool = True,
        device: str = "cpu",
        random_state: int = 0,
    ) -> None:
        self.lr = lr
        self.weight_decay = weight_decay
        self.epochs = epochs
        self.center = center
        self.device = device
        self.random_state = random_state

    def _fit_rows(self, x: NDArray[np.floating[Any]], positive: NDArray[np.bool_]) -> None:
        wide = np.asarray(x, dtype=np.float64)
        mean = wide.mean(axis=0) if self.center else np.zeros(wide.shape[1])
        rows = torch.from_numpy(wide - mean).to(self.device)
        target = torch.from_numpy(positive.astype(np.float64)).to(self.device)
        weight, optimiser = self.begin(wide.shape[1])
        for _ in range(self.epochs):
            optimiser.zero_grad()
            loss = functional.binary_cross_entropy_with_logits(rows @ weight, target)
            loss.backward()  # type: ignore[no-untyped-call]
            optimiser.step()
        self.end(weight, mean, float(loss.detach()))

    def begin(self, hidden: int) -> tuple[torch.Tensor, torch.optim.Optimizer]:
        """Weights (hidden,) to start from, and what changes them.

        Args:
            hidden: width of a row.
        """
        bound = 1.0 / np.sqrt(hidden)
        start = np.random.default_rng(self.random_state).uniform(-bound, bound, hidden)
        weight = torch.from_numpy(start).to(self.device).requires_grad_()
        return weight, torch.optim.AdamW([weight], lr=self.lr, weight_decay=self.weight_decay)

    def end(self, weight: torch.Tensor, mean: NDArray[np.float64], loss: float) -> None:
        """Set what was learnt.

        Args:
            weight: (hidden,).
            mean: (hidden,) of all rows.
            loss: before the last step.
        """
        self.coef_ = weight.detach().cpu().numpy()
        self.mean_, self.scale_ = mean, np.ones_like(mean)
        self.intercept_, self.loss_ = 0.0, loss


class CCSProbe(DirectionEstimator):
    """Contrast-consistent search: a direction on which the two sides of a pair disagree.

    The loss (p+ - (1 - p-))^2 + min(p+, p-)^2 never sees which side of a pair is true. Pairs
    are rows of opposite class within a group (at random without groups); which of them comes
    is drawn, so the labels reach the direction by the last step only: its sign. A row to be
    scored is of neither side; its score is the mean of what it would have on each.

    Args:
        lr: learning rate of AdamW.
        weight_decay: of AdamW.
        epochs: steps of each start.
        restarts: starts; the one with the lowest loss is kept. The source's paper has 10.
        normalize: subtract each side's mean and divide it by that side's standard deviation, as
            the paper does; False subtracts the means only, as the code of arXiv:2310.06824.
        random_state: of pairs, order and starts.

    Attributes:
        loss_: of the start that was kept.
        sign_flipped_: whether the direction was turned round, because it told the training
            labels with an accuracy below one half.

    Source:
        arXiv:2212.03827; optimiser and sign rule as in the code of arXiv:2310.06824.

    Example:
        ```python
        from inspect_lens.train import ActivationSet, CCSProbe

        train, test = (ActivationSet.load(f"acts/{name}.safetensors") for name in ("train", "test"))
        x, labels, groups = train.rows(1)  # (tokens, hidden) at layer 1, and the label of each row
        estimator = CCSProbe(epochs=100, restarts=2).fit(x, labels, groups)
        x, labels, _ = test.rows(1)
        assert estimator.score(x, labels) > 0.5
        ```
    """

    method = "contrast-consistent search"
    source = "arXiv:2212.03827"

    loss_: float
    sign_flipped_: bool

    def __init__(
        self,
        *,
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        epochs: int = 1000,
        restarts: int = 10,
        normalize: bool = True,
        random_state: int = 0,
    ) -> None:
        self.lr = lr
        self.weight_decay = weight_decay
        self.epochs = epochs
        self.restarts = restarts
        self.normalize = normalize
        self.random_state = random_state

    def _fit_groups(
        self,
        x: NDArray[np.floating[Any]],
        positive: NDArray[np.bool_],
        groups: ArrayLike | None,
    ) -> None:
        wide = np.asarray(x, dtype=np.float64)
        rng = np.random.default_rng(self.random_state)
        sides = [wide[rows] for rows in self.pairs(positive, groups, rng)]
        norms = [self.norm(side.mean(axis=0), side.std(axis=0)) for side in sides]
        plus, minus = (
            torch.from_numpy((a - m) / s) for a, (m, s) in zip(sides, norms, strict=True)
        )
        weight, losses = self._search(plus, minus, rng)

        def told() -> float:
            scores = (wide - self.mean_) / self.scale_ @ self.coef_
            return float(((scores > 0) == positive).mean())

        self.end(weight, losses, norms, told)

    def _search(
        self, plus: torch.Tensor, minus: torch.Tensor, rng: np.random.Generator
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """All starts at once, one column each: they do not touch each other."""
        weight, optimiser = self.begin(plus.shape[1], rng)
        for _ in range(self.epochs):
            optimiser.zero_grad()
            losses = ccs_loss(plus @ weight, minus @ weight)
            losses.sum().backward()  # type: ignore[no-untyped-call]
            optimiser.step()
        with torch.no_grad():
            return weight, ccs_loss(plus @ weight, minus @ weight)

    def pairs(
        self,
        positive: NDArray[np.bool_],
        groups: ArrayLike | None,
        rng: np.random.Generator,
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Rows of either side of each pair; no activation takes part.

        Args:
            positive: (rows,) class of each row.
            groups: (rows,) what rows are paired within.
            rng: of the pairing, and of which side comes first.

        Returns:
            (pairs,) rows of one side, and of the other.
        """
        first, second = make_pairs(positive, groups, n_pairs=None, rng=rng)
        swap = rng.random(first.size) < 0.5
        return np.where(swap, second, first), np.where(swap, first, second)

    def norm(
        self, mean: NDArray[np.float64], spread: NDArray[np.float64]
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """What rows of a side lose, and what they are divided by.

        Args:
            mean: (hidden,) of the side's rows.
            spread: (hidden,) their standard deviation.

        Returns:
            (hidden,) each; 1 for a constant column, and everywhere without `normalize`.
        """
        tiny = spread <= 1e-12 * np.maximum(1.0, np.abs(mean))
        return mean, np.where(tiny | (not self.normalize), 1.0, spread)

    def begin(
        self, hidden: int, rng: np.random.Generator
    ) -> tuple[torch.Tensor, torch.optim.Optimizer]:
        """Weights (hidden, restarts) to start from, and what changes them.

        Args:
            hidden: width of a row.
            rng: of the weights.
        """
        bound = 1.0 / np.sqrt(hidden)
        weight = torch.from_numpy(rng.uniform(-bound, bound, (hidden, self.restarts)))
        weight.requires_grad_()
        return weight, torch.optim.AdamW([weight], lr=self.lr, weight_decay=self.weight_decay)

    def end(
        self,
        weight: torch.Tensor,
        losses: torch.Tensor,
        norms: Sequence[tuple[NDArray[np.float64], NDArray[np.float64]]],
        told: Callable[[], float],
    ) -> None:
        """Set what was learnt.

        Args:
            weight: (hidden, restarts).
            losses: (restarts,) of them.
            norms: of either side, as `norm` gives them.
            told: share of all rows that the direction, set by then, puts on their label's side.
        """
        best = int(losses.argmin())
        self.coef_ = weight.detach()[:, best].numpy().copy()
        self.loss_ = float(losses[best])
        # The mean of (x - m0) / s0 and (x - m1) / s1, written as one (x - mean) / scale.
        means, rates = [m for m, _ in norms], [1.0 / s for _, s in norms]
        self.scale_ = 2.0 / (rates[0] + rates[1])
        self.mean_ = (means[0] * rates[0] + means[1] * rates[1]) / (rates[0] + rates[1])
        self.intercept_ = 0.0
        self.sign_flipped_ = told() < 0.5
        if self.sign_flipped_:
            self.coef_ = -self.coef_


def ccs_loss(plus: torch.Tensor, minus: torch.Tensor) -> torch.Tensor:
    """Loss (starts,) of what either side of each pair projects to, (pairs, starts) each."""
    p, q = torch.sigmoid(plus), torch.sigmoid(minus)
    return ((p - (1.0 - q)) ** 2 + torch.minimum(p, q) ** 2).mean(dim=0)
