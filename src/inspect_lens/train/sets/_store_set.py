"""A store as an activation set that stays on disk: what is read is one layer, or less."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from inspect_lens._progress import progress_bar
from inspect_lens.data import ActivationStore, read_layer, read_records
from inspect_lens.errors import SpecError
from inspect_lens.probe import SENTENCE_POOL, AnyProbe

from ._dataset import ActivationSet, no_ends
from ._from_store import Pieces, read_facts

__all__ = ["StoreSet"]

Floats = NDArray[np.float32]
_ROWS = 8192


class StoreSet(ActivationSet):
    """A store that is larger than memory, with the methods of an activation set.

    Layers are read in turn, each from its own part of every shard, so a sweep over all layers reads
    the store once. In memory are, of rows of `hidden` float32 numbers:

    - `scores`, `pooled`, and fits of the linear families on tokens (`LogisticProbe`,
      `MeanDifferenceProbe`, `MassMeanProbe`, `LDAProbe` with a plain shrinkage): those of one
      shard and one layer, a few vectors and matrices of the family;
    - fits of other families (`rows`, `sequences`): those of one layer;
    - `acts`: all.

    Args:
        store: what `collect` wrote, or its folder.
        name: of the set; that of the data set by default.
        layers: to use; all of the store by default.
        pieces: as in `ActivationSet.from_store`.
        work: folder where fits of streamed families are kept, so that a run that was stopped goes
            on at the layer where it was; None keeps none.
        progress: show a bar for each layer that is read, on a terminal.

    Raises:
        ArtifactError: the store is incomplete or damaged.
        SpecError: a layer is not in the store, or no sample has both rows and a label.

    Example:
        <!-- test: server -->
        ```python
        from inspect_lens.collect import collect
        from inspect_lens.data import load_dataset
        from inspect_lens.train import LogisticProbe, StoreSet, fit_on

        data = load_dataset("organism", path="organism/data/probe_train.jsonl", limit=8)
        model = "vllm-lens/organism/checkpoint"
        collect(model, data, "acts/eight", layers=[2, 4], max_tokens=8, progress=False)

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
    ) -> None:
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
        ones = tuple(np.ones(n, dtype=bool) for _, _, n in places)
        self._begin(facts | {"mask": ones}, opened, places, progress)
        object.__setattr__(self, "work", None if work is None else Path(work))

    work: Path | None

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

    store: ActivationStore
    places: tuple[tuple[int, int, int], ...]
    progress: bool

    @property
    def acts(self) -> tuple[Floats, ...]:
        """All activations, per sample (layers, tokens, hidden) float32: reads the whole store."""
        parts = [self.sequences(layer) for layer in self.layers]
        return tuple(np.stack(sample) for sample in zip(*parts, strict=True))

    def __len__(self) -> int:
        """Number of samples."""
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

    def source(self, layer: int) -> Iterator[tuple[Floats, NDArray[np.bool_]]]:
        """Rows (rows, hidden) of one layer with their labels, in pieces, for `fit_stream`.

        Args:
            layer: one of `layers`.

        Yields:
            At most 8192 rows, float32, and (rows,) bool.
        """
        label = {place: bool(self.labels[i]) for i, place in enumerate(self.places)}
        for number, start, data in self._blocks(layer):
            end = start + len(data)
            kept, labels = [], []
            for place in self._in_shard(number):
                low, high = max(place[1], start), min(place[1] + place[2], end)
                if low < high:
                    kept.append(data[low - start : high - start])
                    labels.append(np.full(high - low, label[place]))
            if kept:
                yield np.concatenate(kept), np.concatenate(labels)

    def rows(self, layer: int) -> tuple[Floats, NDArray[np.bool_], NDArray[np.str_]]:
        """As in `ActivationSet`; takes the memory of the layer."""
        lengths = [n for _, _, n in self.places]
        x = np.concatenate(self.sequences(layer))
        return x, np.repeat(self.labels, lengths), np.repeat(np.array(self.groups), lengths)

    def sequences(self, layer: int) -> list[Floats]:
        """As in `ActivationSet`; takes the memory of the layer."""
        made: list[Floats] = [np.zeros((0, 0), dtype=np.float32)] * len(self)
        for i, rows in self._samples(layer):
            if not np.isfinite(rows).all():
                raise SpecError(
                    f"{self.name}: sample {self.ids[i]} holds NaN or infinity at layer {layer}; "
                    "allowed are finite numbers; leave the sample out"
                )
            made[i] = rows
        return made

    def pooled(self, layer: int, rows: str) -> Floats:
        """Arguments are those of `ActivationSet`; takes the memory of one shard."""
        made = np.empty((len(self), self.hidden), dtype=np.float32)
        for i, sample in self._samples(layer):
            made[i] = sample.mean(axis=0) if rows == "mean" else sample[-1]
        return made

    def scores(self, probe: AnyProbe) -> NDArray[np.float64]:
        """As in `ActivationSet`; takes the memory of one shard, at the probe's layers."""
        if probe.pool == SENTENCE_POOL and not self.ends:
            raise no_ends(self.name, probe.name)
        for layer in probe.layers:
            self._index(layer)
        made = np.full(len(self), np.nan)
        for parts in zip(*(self._samples(layer) for layer in probe.layers), strict=True):
            i = parts[0][0]
            acts = np.stack([rows for _, rows in parts])
            ends = self.ends[i] if self.ends else None
            made[i] = probe.score(acts, probe.layers, ends=ends)
        return made

    def shown(self, by: str, layers: Sequence[int]) -> list[bytes] | None:
        """Arguments are those of `ActivationSet`."""
        if by == "content":
            return [c.encode() for c in self.contents] if self.contents else None
        parts = [self.sequences(layer) for layer in layers]
        return [np.stack(sample).tobytes() for sample in zip(*parts, strict=True)]

    def subset(self, index: ArrayLike, *, name: str | None = None) -> Self:
        """Arguments are those of `ActivationSet`; no sample may be named twice.

        Raises:
            SpecError: a sample is named twice.
        """
        picks = [int(i) for i in np.asarray(index)]
        if len(set(picks)) != len(picks):
            raise SpecError(
                f"{self.name}: a sample is named twice; allowed of a store is each once; use "
                "ActivationSet.from_store for draws with replacement"
            )
        facts: dict[str, Any] = {
            "name": name or self.name, "model": self.model, "layers": self.layers,
            "labels": self.labels[picks], "positions": self.positions, "raw": self.raw,
            "model_sha256": self.model_sha256,
            "columns": {k: tuple(v[i] for i in picks) for k, v in self.columns.items()},
        }  # fmt: skip
        for key in ("groups", "mask", "ids", "contents", "ends"):
            values = getattr(self, key)
            facts[key] = tuple(values[i] for i in picks) if values else ()
        made = object.__new__(type(self))
        made._begin(facts, self.store, [self.places[i] for i in picks], self.progress)
        object.__setattr__(made, "work", self.work)
        return made

    def _samples(self, layer: int) -> Iterator[tuple[int, Floats]]:
        """Place in the set and rows (tokens, hidden) of each sample, in the order of the store."""
        at = {place: i for i, place in enumerate(self.places)}
        waiting: list[Floats] = []
        open_number, begin = -1, 0
        for number, start, data in self._blocks(layer):
            if number != open_number:
                waiting, open_number, begin = [], number, start
                todo = list(self._in_shard(number))
            waiting.append(data)
            end = start + len(data)
            while todo and todo[0][1] + todo[0][2] <= end:
                place = todo.pop(0)
                whole = waiting[0] if len(waiting) == 1 else np.concatenate(waiting)
                rows = whole[place[1] - begin : place[1] - begin + place[2]]
                yield at[place], np.ascontiguousarray(rows)
                # What lies before the next sample is done with.
                waiting, begin = [whole[place[1] + place[2] - begin :]], place[1] + place[2]

    def _blocks(self, layer: int) -> Iterator[tuple[int, int, Floats]]:
        """Number of a shard, first row there, and rows of a layer, piece by piece."""
        self._index(layer)
        used = sorted({number for number, _, _ in self.places})
        show = self.progress
        with progress_bar(f"{self.name} {layer}", total=len(used), done=0, show=show) as tick:
            for number in used:
                file = self.store.manifest["shards"][number]["file"]
                for start, _, data in read_layer(f"{self.store.uri}/{file}", layer, size=_ROWS):
                    yield number, start, data.to_float32()
                tick()

    def _in_shard(self, number: int) -> list[tuple[int, int, int]]:
        """Places of a shard's samples that are used, in order."""
        return self._by_shard().get(number, [])

    def _by_shard(self) -> dict[int, list[tuple[int, int, int]]]:
        known: dict[int, list[tuple[int, int, int]]] | None = self.__dict__.get("_shards")
        if known is None:
            known = {}
            for place in sorted(self.places):
                known.setdefault(place[0], []).append(place)
            object.__setattr__(self, "_shards", known)
        return known
