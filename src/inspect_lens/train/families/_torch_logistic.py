"""The logistic probe of geometry-of-truth, which torch fits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from ._binary import Targets
from ._direction import DirectionEstimator


@dataclass(kw_only=True, eq=False, repr=False)
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

        x, labels, groups = ActivationSet.load("acts/train.safetensors").rows(1)  # at layer 1
        assert TorchLogisticProbe(epochs=200).fit(x, labels, groups).score(x, labels) > 0.6
        ```
    """

    method = "logistic regression by AdamW"
    source = "arXiv:2310.06824"

    lr: float = 1e-3
    weight_decay: float = 0.1
    epochs: int = 1000
    center: bool = True
    device: str = "cpu"
    random_state: int = 0

    def _fit_rows(self, x: NDArray[np.floating[Any]], target: Targets) -> None:
        positive, _, weight = target
        wide = np.asarray(x, dtype=np.float64)
        each = np.ones(len(wide)) if weight is None else weight / weight.mean()
        mean = np.average(wide, axis=0, weights=each) if self.center else np.zeros(wide.shape[1])
        rows, counted, labels = (
            torch.from_numpy(part).to(self.device)
            for part in (wide - mean, each, positive.astype(np.float64))
        )
        bound = 1.0 / np.sqrt(wide.shape[1])
        start = np.random.default_rng(self.random_state).uniform(-bound, bound, wide.shape[1])
        direction = torch.from_numpy(start).to(self.device).requires_grad_()
        optimiser = torch.optim.AdamW([direction], lr=self.lr, weight_decay=self.weight_decay)
        for _ in range(self.epochs):
            optimiser.zero_grad()
            loss = functional.binary_cross_entropy_with_logits(rows @ direction, labels, counted)
            loss.backward()  # type: ignore[no-untyped-call]
            optimiser.step()
        self.coef_ = direction.detach().cpu().numpy()
        self.mean_, self.scale_ = mean, np.ones_like(mean)
        self.intercept_, self.loss_ = 0.0, float(loss.detach())
