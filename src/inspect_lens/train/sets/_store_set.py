"""A store as an activation set that stays on disk: what is held is what memory allows."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from inspect_lens._base.progress import progress_bar
from inspect_lens.data import ActivationStore, read_layer, read_records
from inspect_lens.errors import SpecError
from inspect_lens.spec import as_indices

from ._dataset import ActivationSet, Pieces, read_facts

__all__ = ["StoreSet"]

Floats = NDArray[np.float32]
_ROWS = 8192
_PIECE: Final = 1 << 26
"""Bytes of a piece of rows as float32 at most: it is read again and again, and some lie in wait."""
MEMORY: Final = 4.0
"""GB that a fit on a store may hold."""


class StoreSet(ActivationSet):
    """A store that may be larger than memory, with the methods of an activation set.

    A layer is read from its own part of every shard, so a sweep over all layers reads the store
    about once. In memory are, of rows of `hidden` float32 numbers, for `scores` and `pooled` a few
    pieces of one layer, 64 MB each, for fits (`fit_layers`) what `memory` allows, for `rows` and
    `sequences` those of one layer, and for `acts` all.

    Args:
        store: what `collect` wrote, or its folder.
        name: of the set; that of the data set by default.
        layers: to use; all of the store by default.
        pieces: as in `ActivationSet.from_store`.
        work: folder where fits are kept, so that a run that was stopped goes on at the layer where
            it was; None keeps none.
        progress: show a bar for what is read, on a terminal.
        memory: GB (1e9 bytes) that a fit may hold, beside the pieces it reads and a few numbers for
            each row (`fit_layers`).

    Raises:
        ArtifactError: the store is incomplete or damaged.
        SpecError: a layer is not in the store, no sample has both rows and a label, or `memory` is
            negative.

    Example:
        ```python
        from inspect_lens.train import LogisticProbe, StoreSet, fit_on

        large = StoreSet("acts/eight", work="fits")
        assert fit_on(LogisticProbe(), large, 4).coef_.shape == (large.hidden,)
        ```
    """

    def __init__(
        self,
        store: ActivationStore | str | Path,
        *,
        name: str | None = None,
        layers: Sequence[int] | None = None,
        pieces: Pieces | None = None,
        work: str | Path | None = None,
        progress: bool = True,
        memory: float = MEMORY,
    ) -> None:
        if not memory >= 0.0:
            raise SpecError(f"memory={memory!r}; allowed is a number of GB, 0 or more")
        opened = store if isinstance(store, ActivationStore) else ActivationStore.open(store)
        facts = read_facts(opened, name=name, layers=layers, pieces=pieces)
        # Where each sample lies: its shard, and its first row there.
        places: list[tuple[int, int, int]] = []
        for number, shard in enumerate(opened.manifest["shards"]):
            first = 0
            for record in read_records(f"{opened.uri}/{shard['file']}"):
                if record.n_rows and record.label is not None:
                    places.append((number, first, record.n_rows))
                first += record.n_rows
        facts["mask"] = tuple(np.ones(n, dtype=bool) for _, _, n in places)
        facts |= {"work": None if work is None else Path(work), "memory": memory}
        self._begin(facts, opened, places, progress)

    work: Path | None
    memory: float
    store: ActivationStore
    places: tuple[tuple[int, int, int], ...]
    progress: bool

    def _begin(
        self,
        facts: dict[str, Any],
        store: ActivationStore,
        places: Sequence[tuple[int, int, int]],
        progress: bool,
    ) -> None:
        facts["columns"] = MappingProxyType(dict(facts["columns"]))
        own = {"store": store, "places": tuple(places), "progress": progress}
        for key, value in (facts | own).items():
            object.__setattr__(self, key, value)

    @property
    def acts(self) -> tuple[Floats, ...]:
        """All activations, per sample (layers, tokens, hidden) float32: reads the whole store."""
        parts = [self.sequences(layer) for layer in self.layers]
        return tuple(np.stack(sample) for sample in zip(*parts, strict=True))

    def __len__(self) -> int:
        return len(self.places)

    @property
    def hidden(self) -> int:
        """Width of the residual stream."""
        return self.store.hidden

    @property
    def sha256(self) -> str:
        """Hash of the store's manifest, which holds that of every shard, and of what is used."""
        used = [self.store.sha256, list(self.layers), list(self.ids), list(self.groups)]
        return hashlib.sha256(json.dumps(used).encode()).hexdigest()

    def passes(self, layer: int) -> Iterator[tuple[NDArray[np.int64], Floats]]:
        """Rows of a layer from one pass over the shards, 8192 float32 at most at a time.

        With them comes the place (rows,) of each among `rows(layer)`.
        """
        lengths = np.array([n for _, _, n in self.places])
        starts = np.cumsum(lengths) - lengths
        at = {place: int(starts[i]) for i, place in enumerate(self.places)}
        for number, start, data in self._blocks(layer):
            end = start + len(data)
            runs: list[list[int]] = []
            index = []
            for place in self._by_shard[number]:
                low, high = max(place[1], start), min(place[1] + place[2], end)
                if low >= high:
                    continue
                index.append(at[place] - place[1] + np.arange(low, high))
                # Neighbours are one slice: what is whole is not copied, if it may be written to.
                if runs and runs[-1][1] == low:
                    runs[-1][1] = high
                else:
                    runs.append([low, high])
            kept = [data[low - start : high - start] for low, high in runs]
            if kept:
                whole = len(kept) == 1 and data.flags.writeable
                yield np.concatenate(index), kept[0] if whole else np.concatenate(kept)

    @property
    def row_labels(self) -> NDArray[np.bool_]:
        """Label of each row of a layer, in the order of `rows`."""
        return np.repeat(self.labels, [n for _, _, n in self.places])

    def rows(self, layer: int) -> tuple[Floats, NDArray[np.bool_], NDArray[np.str_]]:
        """As in `ActivationSet`; takes the memory of the layer."""
        lengths = [n for _, _, n in self.places]
        x = np.empty((sum(lengths), self.hidden), dtype=np.float32)
        ends = np.cumsum(lengths)
        for index, rows in self.passes(layer):
            wrong = index[~np.isfinite(rows).all(axis=1)]
            if wrong.size:
                sample = int(np.searchsorted(ends, wrong[0], side="right"))
                self.require_finite(sample, layer, np.array([[np.nan]], dtype=np.float32))
            x[index] = rows
        return x, np.repeat(self.labels, lengths), np.repeat(np.array(self.groups), lengths)

    def sequences(self, layer: int) -> list[Floats]:
        """As in `ActivationSet`; takes the memory of the layer."""
        made = [np.zeros((0, 0), dtype=np.float32)] * len(self)
        for i, rows in self.samples(layer):
            # Copied: what is next to it in its piece is not held.
            made[i] = rows.copy()
        return made

    def require_finite(self, sample: int, layer: int, rows: Floats) -> None:
        """Refuse rows of a sample that hold NaN or infinity.

        Args:
            sample: its place in the set.
            layer: where they are from.
            rows: (tokens, hidden).

        Raises:
            SpecError: they do.
        """
        if not np.isfinite(rows).all():
            raise SpecError(
                f"{self.name}: sample {self.ids[sample]} holds NaN or infinity at layer {layer}; "
                "allowed are finite numbers; leave the sample out"
            )

    def selected(self, layers: Sequence[int]) -> Iterator[tuple[int, Floats]]:
        """As in `ActivationSet`; takes the memory of a few pieces."""
        for layer in layers:
            self._index(layer)
        for parts in zip(*(self.samples(layer) for layer in layers), strict=True):
            yield parts[0][0], np.stack([rows for _, rows in parts])

    def subset(self, index: ArrayLike, *, name: str | None = None) -> Self:
        """Arguments are those of `ActivationSet`; no sample may be named twice.

        Raises:
            SpecError: a sample is named twice.
        """
        picks = as_indices("index", index, len(self), low=-len(self)).tolist()
        if len(set(picks)) != len(picks):
            raise SpecError(
                f"{self.name}: a sample is named twice; allowed of a store is each once; use "
                "ActivationSet.from_store for draws with replacement"
            )
        facts = self._part(picks, name) | {"work": self.work, "memory": self.memory}
        made = object.__new__(type(self))
        made._begin(facts, self.store, [self.places[i] for i in picks], self.progress)
        return made

    def samples(self, layer: int) -> Iterator[tuple[int, Floats]]:
        """Place of each sample in the set, and its rows (tokens, hidden), in the store's order."""
        at = {place: i for i, place in enumerate(self.places)}
        waiting: list[Floats] = []
        opened, begin = -1, 0
        for number, start, data in self._blocks(layer):
            if number != opened:
                waiting, opened, begin = [], number, start
                todo = list(self._by_shard[number])
            waiting.append(data)
            end = start + len(data)
            while todo and todo[0][1] + todo[0][2] <= end:
                place = todo.pop(0)
                whole = waiting[0] if len(waiting) == 1 else np.concatenate(waiting)
                rows = whole[place[1] - begin : place[1] - begin + place[2]]
                self.require_finite(at[place], layer, rows)
                yield at[place], np.ascontiguousarray(rows)
                # What lies before the next sample is done with.
                waiting, begin = [whole[place[1] + place[2] - begin :]], place[1] + place[2]

    def _blocks(self, layer: int) -> Iterator[tuple[int, int, Floats]]:
        """Number of a shard, first row there, and rows, piece by piece."""
        self._index(layer)
        used = sorted({number for number, _, _ in self.places})
        title = f"{self.name}, layer {layer}"
        size = max(1, min(_ROWS, _PIECE // (4 * self.hidden)))
        with progress_bar(title, total=len(used), done=0, show=self.progress) as tick:
            for number in used:
                uri = self.uri(number)
                for start, _, data in read_layer(uri, layer, size=size):
                    yield number, start, data.to_float32()
                tick()

    def uri(self, number: int) -> str:
        """Of a shard, by its number."""
        return f"{self.store.uri}/{self.store.manifest['shards'][number]['file']}"

    @cached_property
    def _by_shard(self) -> dict[int, list[tuple[int, int, int]]]:
        """Places of the samples that are used, in order, by shard."""
        known: dict[int, list[tuple[int, int, int]]] = {}
        for place in sorted(self.places):
            known.setdefault(place[0], []).append(place)
        return known
