"""The loop that trains a neural probe; what the probe computes is in `probe/pooling/_head.py`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

from inspect_lens.errors import SpecError
from inspect_lens.probe import HeadSpec, head_outputs, parse_head_pool, pool_heads

__all__ = ["HeadTraining", "Labelled", "train_head"]

Sequences = Sequence[NDArray[Any]]
Weights = dict[str, torch.Tensor]
Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


class Labelled(NamedTuple):
    """Sequences (tokens, hidden), and for each its class and how much it counts."""

    sequences: Sequences
    positive: NDArray[np.bool_]
    weight: NDArray[np.float64]

    def part(self, picks: NDArray[np.int64]) -> Labelled:
        """Some of them."""
        return Labelled(
            [self.sequences[i] for i in picks], self.positive[picks], self.weight[picks]
        )


@dataclass(frozen=True, kw_only=True)
class HeadTraining:
    """How a head is trained."""

    optimizer: Literal["adamw", "lbfgs"] = "adamw"
    lr: float = 1e-3
    weight_decay: float = 0.0
    steps: int = 1000
    batch: int = 64
    """Sequences per step; LBFGS takes all."""
    patience: int = 20
    """Looks at the validation set without a better loss before it stops."""
    device: str = "cpu"
    seed: int = 0
    soft_max: float = 1.0
    """Sharpness of the smooth maximum that stands for MultiMax while training."""
    dropout: float = 0.0
    """Share of attention weights that are dropped while training."""


def train_head(
    start: dict[str, NDArray[np.float32]],
    spec: HeadSpec,
    pool: str,
    data: Labelled,
    validation: Labelled | None,
    how: HeadTraining,
    scaler: dict[str, NDArray[np.float32]],
) -> tuple[dict[str, NDArray[np.float32]], list[float]]:
    """Train from given weights; keep those that did best on the validation set."""
    rule = parse_head_pool(pool)
    weights = {
        k: torch.from_numpy(np.array(v)).to(how.device).requires_grad_() for k, v in start.items()
    }

    fixed = {k: torch.from_numpy(np.array(v)).to(how.device) for k, v in scaler.items()}

    def drop(share: torch.Tensor) -> torch.Tensor:
        return functional.dropout(share, how.dropout)

    def loss_of(batch: Batch, train: bool) -> Any:
        x, mask, target, weight = batch
        logits = pool_heads(
            head_outputs(weights | fixed, spec, x, xp=torch), rule, weights.get("position"),
            weights["bias"], mask, xp=torch, sharpness=how.soft_max if train else None,
            drop=drop if train and how.dropout else None,
        )  # fmt: skip
        return functional.binary_cross_entropy_with_logits(logits, target, weight)

    step = _stepper(weights, data, how, loss_of)
    look = max(1, min(how.steps // 50, 10)) if how.optimizer == "adamw" else 1
    best, kept, since, losses = np.inf, {k: v.detach().clone() for k, v in weights.items()}, 0, []
    with torch.random.fork_rng():  # the caller's numbers stay the caller's
        torch.manual_seed(how.seed)  # dropout only; all else draws from numpy
        for number in range(how.steps):
            train_loss = step()
            if number % look and number != how.steps - 1:
                continue
            with torch.no_grad():
                loss = float(_all(validation, how, loss_of)) if validation else train_loss
            losses.append(loss)
            if loss < best - 1e-6 or validation is None:
                best, since = loss, 0
                kept = {k: v.detach().clone() for k, v in weights.items()}
            else:
                since += 1
                if since >= how.patience:
                    break
    if not np.isfinite(best):
        raise SpecError(
            f"lr={how.lr:g}: training diverged (loss {losses[-1]}); allowed is a rate at which the "
            "loss stays finite; use a smaller lr, or look for outliers in the activations"
        )
    return {k: v.cpu().numpy() for k, v in kept.items()}, losses


def _stepper(weights: Weights, data: Labelled, how: HeadTraining, loss_of: Any) -> Any:
    """A function that takes one optimiser step and returns the loss."""
    if how.optimizer == "lbfgs":
        optimiser: Any = torch.optim.LBFGS(
            list(weights.values()), lr=how.lr, max_iter=20, line_search_fn="strong_wolfe"
        )
        (whole,) = _parts(data, how, len(data.sequences))

        def closure() -> Any:
            optimiser.zero_grad()
            decay = sum((w**2).sum() for name, w in weights.items() if name != "bias")
            total = loss_of(whole, True) + how.weight_decay * decay / 2
            total.backward()
            return total.detach()

        return lambda: float(optimiser.step(closure))
    optimiser = torch.optim.AdamW(list(weights.values()), lr=how.lr, weight_decay=how.weight_decay)
    batches = _batches(data, how)

    def step() -> float:
        optimiser.zero_grad()
        loss = loss_of(next(batches), True)
        loss.backward()
        optimiser.step()
        return float(loss.detach())

    return step


def _batches(data: Labelled, how: HeadTraining) -> Iterator[Batch]:
    """Random batches without end; each pass shows every sequence once."""
    rng = np.random.default_rng(how.seed)
    while True:
        order = rng.permutation(len(data.sequences))
        for first in range(0, len(order), how.batch):
            yield _padded(data, order[first : first + how.batch], device=how.device)


def _parts(data: Labelled, how: HeadTraining, size: int) -> Iterator[Batch]:
    """All sequences once, in order."""
    for first in range(0, len(data.sequences), size):
        picks = np.arange(first, min(first + size, len(data.sequences)))
        yield _padded(data, picks, device=how.device)


def _padded(data: Labelled, picks: NDArray[np.int64], *, device: str) -> Batch:
    part = data.part(picks)
    rows = pad_sequence([torch.tensor(s) for s in part.sequences], batch_first=True)
    lengths = torch.tensor([len(s) for s in part.sequences])
    mask = torch.arange(rows.shape[1]) < lengths[:, None]
    target, weight = (torch.from_numpy(v.astype(np.float32)) for v in (part.positive, part.weight))
    return rows.to(device), mask.to(device), target.to(device), weight.to(device)


def _all(data: Labelled, how: HeadTraining, loss_of: Any) -> torch.Tensor:
    """Mean loss over a set, batch by batch."""
    total = torch.zeros(())
    for batch in _parts(data, how, how.batch):
        total = total + loss_of(batch, False).cpu() * len(batch[0])
    return total / len(data.sequences)
