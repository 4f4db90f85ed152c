"""AdamW on all rows at once, where rows come in pieces.

Loss and gradient are sums over rows, so each step takes one pass, and the steps are those of a fit
in memory, up to the order of sums in float64.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from inspect_lens.train.families._torch_logistic import TorchLogisticProbe

from ._moments import require_both, wide_blocks
from ._row_view import RowView

__all__ = ["fit_torch_logistic"]


def fit_torch_logistic(
    made: TorchLogisticProbe, view: RowView, layer: int, *, tick: Callable[[], None]
) -> None:
    """Fit as `TorchLogisticProbe.fit` does."""
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
