"""What a neural head learns from: sequences that are asked for by number, wherever they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = ["HeadData", "HeldRows", "RowsBySample"]

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
    """Rows that are in memory.

    Args:
        sequences: per sample (tokens, hidden), one at least.
    """

    spare = None

    def __init__(self, sequences: Sequence[NDArray[Any]]) -> None:
        self.sequences = sequences
        self.lengths = np.array([len(s) for s in sequences], dtype=np.int64)
        self.hidden = int(sequences[0].shape[1])

    def take(self, spans: Spans) -> list[NDArray[Any]]:
        """Rows (end - first, hidden) of each span; no copies."""
        return [self.sequences[i][first:end] for i, first, end in spans]


class HeadData:
    """Sequences by number: of whole samples, or of their single tokens.

    Args:
        rows: of the samples.
        by_token: each token is a sequence of its own.
        index: the sequences that are meant, in this order; all by default.
    """

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
