"""The logistic probe of geometry-of-truth, which torch fits."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from ._direction import DirectionEstimator

__all__ = ["TorchLogisticProbe"]


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
