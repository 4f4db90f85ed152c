"""The loop that trains a neural probe; what the probe computes is in `probe/pooling/_head.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, Self

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

from inspect_lens.errors import SpecError
from inspect_lens.probe import HeadSpec, head_outputs, parse_head_pool, pool_heads

__all__ = [
    "HeadData",
    "HeadTraining",
    "HeldRows",
    "RowsBySample",
    "train_head",
]

Spans = Sequence[tuple[int, int, int]]
"""Sample, first token and end of each."""


class RowsBySample(Protocol):
    """Rows of samples, in memory or on disk."""

    lengths: NDArray[np.int64]
    """Tokens of each sample."""
    hidden: int

    @property
    def spare(self) -> int | None:
        """Bytes of them that may be taken into memory; None where they are there."""

    def take(self, spans: Spans) -> list[NDArray[Any]]:
        """Rows (end - first, hidden) of each span."""


class HeldRows:
    """Rows that are in memory."""

    spare = None

    def __init__(self, sequences: Sequence[NDArray[Any]]) -> None:
        self.sequences = sequences
        self.lengths = np.array([len(s) for s in sequences], dtype=np.int64)
        self.hidden = int(sequences[0].shape[1])

    def take(self, spans: Spans) -> list[NDArray[Any]]:
        """Rows (end - first, hidden) of each span; no copies."""
        return [self.sequences[i][first:end] for i, first, end in spans]


class HeadData:
    """Sequences by number: of whole samples, or of their single tokens."""

    def __init__(
        self, rows: RowsBySample, *, by_token: bool = False, index: NDArray[np.int64] | None = None
    ) -> None:
        self.rows, self.by_token = rows, by_token
        self._ends = np.cumsum(rows.lengths)
        n = int(rows.lengths.sum()) if by_token else len(rows.lengths)
        self.index = np.arange(n) if index is None else index

    def __len__(self) -> int:
        """Number of sequences."""
        return len(self.index)

    @property
    def hidden(self) -> int:
        """Width of a row."""
        return self.rows.hidden

    @property
    def in_memory(self) -> bool:
        """Whether taking costs nothing."""
        return self.rows.spare is None

    def take(self, picks: ArrayLike) -> list[NDArray[Any]]:
        """Sequences (tokens, hidden) of some numbers, in the order given."""
        return self.rows.take(self._spans(self.index[np.asarray(picks, dtype=np.int64)]))

    def part(self, picks: ArrayLike) -> Self:
        """The same of some numbers."""
        index = self.index[np.asarray(picks, dtype=np.int64)]
        return type(self)(self.rows, by_token=self.by_token, index=index)

    def near(self) -> HeadData:
        """The same, in memory where they may be: for what is read again and again."""
        spans = self._spans(self.index)
        size = 4 * self.hidden * sum(end - first for _, first, end in spans)
        if self.rows.spare is None or size > self.rows.spare:
            return self
        return HeadData(HeldRows([rows.copy() for rows in self.rows.take(spans)]))

    def _spans(self, index: NDArray[np.int64]) -> list[tuple[int, int, int]]:
        if not self.by_token:
            return [(int(i), 0, int(self.rows.lengths[i])) for i in index]
        samples = np.searchsorted(self._ends, index, side="right")
        tokens = index - self._ends[samples] + self.rows.lengths[samples]
        return [(i, t, t + 1) for i, t in zip(samples.tolist(), tokens.tolist(), strict=True)]


Weights = dict[str, torch.Tensor]
Labelled = tuple[HeadData, NDArray[np.bool_]]
Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


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
    tick: Callable[[], None] = lambda: None,
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
        x, mask, target = batch
        logits = pool_heads(
            head_outputs(weights | fixed, spec, x, xp=torch), rule, weights.get("position"),
            weights["bias"], mask, xp=torch, sharpness=how.soft_max if train else None,
            drop=drop if train and how.dropout else None,
        )  # fmt: skip
        return functional.binary_cross_entropy_with_logits(logits, target)

    step = _stepper(weights, data, how, loss_of)
    look = max(1, min(how.steps // 50, 10)) if how.optimizer == "adamw" else 1
    best, kept, since, losses = np.inf, {k: v.detach().clone() for k, v in weights.items()}, 0, []
    with torch.random.fork_rng():  # the caller's numbers stay the caller's
        torch.manual_seed(how.seed)  # dropout only; all else draws from numpy
        for number in range(how.steps):
            train_loss = step()
            tick()
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
        # In memory all at once, else the sum of batches: the same loss up to rounding.
        whole = list(_parts(data, how, len(data[0]))) if data[0].in_memory else None

        def closure() -> Any:
            optimiser.zero_grad()
            decay = sum((w**2).sum() for name, w in weights.items() if name != "bias")
            total: Any = how.weight_decay * decay / 2
            if total.requires_grad:
                total.backward()
            total = total.detach()
            for batch in whole or _parts(data, how, how.batch):
                loss = loss_of(batch, True) * (len(batch[0]) / len(data[0]))
                loss.backward()
                total = total + loss.detach()
            return total

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
        order = rng.permutation(len(data[0]))
        for first in range(0, len(order), how.batch):
            yield _padded(data, order[first : first + how.batch], device=how.device)


def _parts(data: Labelled, how: HeadTraining, size: int) -> Iterator[Batch]:
    """All sequences once, in order."""
    for first in range(0, len(data[0]), size):
        picks = np.arange(first, min(first + size, len(data[0])))
        yield _padded(data, picks, device=how.device)


def _padded(data: Labelled, picks: NDArray[np.int64], *, device: str) -> Batch:
    sequences = data[0].take(picks)
    # Copied: rows from disk cannot be written to, and torch warns of sharing these.
    rows = pad_sequence([torch.tensor(s) for s in sequences], batch_first=True)
    lengths = torch.tensor([len(s) for s in sequences])
    mask = torch.arange(rows.shape[1]) < lengths[:, None]
    target = torch.from_numpy(data[1][picks].astype(np.float32))
    return rows.to(device), mask.to(device), target.to(device)


def _all(data: Labelled, how: HeadTraining, loss_of: Any) -> torch.Tensor:
    """Mean loss over a set, batch by batch."""
    total = torch.zeros(())
    for batch in _parts(data, how, how.batch):
        total = total + loss_of(batch, False).cpu() * len(batch[0])
    return total / len(data[0])
