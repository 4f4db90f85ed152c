"""Rows of one layer that stay on disk and are read where they are asked for."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from inspect_lens._shards import LayerPlace, find_layers, read_spans

from ._store_set import StoreSet

__all__ = ["StoredRows"]


class StoredRows:
    """Rows of the samples of a store at one layer, on disk.

    Args:
        data: the store.
        layer: one of its layers.
        spare: bytes of rows that may be taken into memory.
    """

    def __init__(self, data: StoreSet, layer: int, *, spare: int) -> None:
        self.lengths = np.array([n for _, _, n in data.places], dtype=np.int64)
        self.hidden, self.spare = data.hidden, spare
        self._data, self._layer = data, layer
        self._places: dict[int, LayerPlace] = {}

    def take(self, spans: Sequence[tuple[int, int, int]]) -> list[NDArray[np.float32]]:
        """Rows (end - first, hidden) float32 of each span (sample, first token, end).

        Raises:
            ArtifactError: a shard is missing or damaged.
            SpecError: a value is not finite.
        """
        made: list[NDArray[np.float32]] = [np.zeros((0, 0), dtype=np.float32)] * len(spans)
        where = []
        for k, (sample, first, end) in enumerate(spans):
            number, begin, _ = self._data.places[sample]
            where.append((number, begin + first, begin + end, k))
        for number, found in groupby(sorted(where), key=lambda w: w[0]):
            asked = list(found)
            uri = self._data.uri(number)
            if number not in self._places:
                self._places |= {number: find_layers(uri, [self._layer])[self._layer]}
            read = read_spans(uri, self._places[number], [(a, b) for _, a, b, _ in asked])
            for rows, (_, _, _, k) in zip(read, asked, strict=True):
                self._data.require_finite(spans[k][0], self._layer, rows)
                made[k] = rows
        return made
