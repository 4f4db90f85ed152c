"""The rows of a fit, where they are in a store: its tokens, or one row of each sample."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from inspect_lens.train.families._binary import Rows
from inspect_lens.train.sets._store_set import Floats, StoreSet

__all__ = ["Again", "RowView"]

Again: TypeAlias = Callable[[], Iterator[tuple[NDArray[np.int64], Floats]]]
"""Starts anew each time: (rows,) places of rows among all, and the rows (rows, hidden) float32."""
_POOLED = 1024


class RowView:
    """What one row of a fit is, of a store that stays on disk."""

    def __init__(self, data: StoreSet, rows: Rows) -> None:
        self.data, self.rows, self.hidden = data, rows, data.hidden
        self.lengths = np.ones(len(data), dtype=np.int64)
        """Rows of each sample."""
        if rows == "tokens":
            self.lengths = np.array([n for _, _, n in data.places], dtype=np.int64)

    def quiet(self) -> RowView:
        """The same without bars of what is read, beside a bar of steps."""
        data = copy.copy(self.data)
        object.__setattr__(data, "progress", False)
        return RowView(data, self.rows)

    @property
    def labels(self) -> NDArray[np.bool_]:
        """(rows,) of each row."""
        return np.repeat(self.data.labels, self.lengths)

    @property
    def groups(self) -> NDArray[np.int64]:
        """(rows,) group of each row as a number; numbers sort as the names do."""
        return np.repeat(np.unique(self.data.groups, return_inverse=True)[1], self.lengths)

    def __len__(self) -> int:
        """Number of rows."""
        return int(self.lengths.sum())

    @property
    def layer_bytes(self) -> int:
        """What the rows of a layer take in memory, as float32."""
        return 4 * len(self) * self.hidden

    def held(self, layer: int) -> Floats:
        """All rows of a layer, (rows, hidden)."""
        if self.rows == "tokens":
            return self.data.rows(layer)[0]
        return self.data.pooled(layer, self.rows)

    def passes(self, layers: list[int]) -> Iterator[tuple[int, NDArray[np.int64], Floats]]:
        """Rows of some layers, from one pass over the shards."""
        if self.rows == "tokens":
            yield from self.data.passes(layers)
            return
        layer, places, made = -1, [], []  # type: ignore[var-annotated]
        for at, i, sample in self.data.samples(layers):
            if made and (at != layer or len(made) == _POOLED):
                yield layer, np.array(places), np.stack(made)
                places, made = [], []
            layer = at
            places.append(i)
            made.append(sample.mean(axis=0) if self.rows == "mean" else sample[-1].copy())
        if made:
            yield layer, np.array(places), np.stack(made)

    def again(self, layer: int, *, spare: float) -> Again:
        """Rows of a layer, as often as they are asked for.

        They are read from disk each time, but kept from the first time on where they fit.
        """
        kept: list[tuple[NDArray[np.int64], Floats]] = []
        keep, whole = self.layer_bytes <= spare, False

        def read() -> Iterator[tuple[NDArray[np.int64], Floats]]:
            nonlocal whole
            if whole:
                yield from kept
                return
            kept[:] = []
            for _, index, rows in self.passes([layer]):
                if keep:
                    kept.append((index, rows.copy()))
                yield index, rows
            whole = keep

        return read
