"""Rows of single layers of a shard: all of them in pieces, or a few from where they lie."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import fsspec
import numpy as np
from numpy.typing import NDArray

from inspect_lens.errors import ArtifactError
from inspect_lens.spec import DType, TensorData

from ._shard import _DTYPES, _STORAGE, _damaged, _facts, _read_header

__all__ = ["LayerPlace", "find_layers", "read_layer", "read_layers", "read_spans"]

Floats = NDArray[np.float32]


@dataclass(frozen=True, kw_only=True)
class LayerPlace:
    """Where the rows of one layer lie in a shard."""

    begin: int
    """First byte."""
    rows: int
    hidden: int
    storage: str
    """As numpy names it."""
    dtype: DType

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return self.hidden * np.dtype(self.storage).itemsize

    def decode(self, data: bytes) -> TensorData:
        """Rows (n, hidden) from their bytes."""
        return TensorData(np.frombuffer(data, self.storage).reshape(-1, self.hidden), self.dtype)


def find_layers(uri: str, layers: Sequence[int]) -> dict[int, LayerPlace]:
    """Where layers lie in a shard; reads its header only.

    Args:
        uri: of the file.
        layers: of the store.

    Returns:
        The places, in the order of the file; none in a shard without rows.

    Raises:
        ArtifactError: missing, damaged, another format, or without one of the layers.
    """
    start, header = _read_header(uri)
    try:
        facts, entry = _facts(header), header["acts"]
    except (ValueError, KeyError, TypeError) as error:
        raise _damaged(uri, error) from None
    _, rows, hidden = entry["shape"]
    if not rows:
        return {}
    held: list[int] = facts["layers"]
    missing = [layer for layer in layers if layer not in held]
    if missing:
        raise ArtifactError(
            f"{uri}: layer {missing[0]} was not captured, only {held}; choose one of these"
        )
    storage = _STORAGE[entry["dtype"]]
    size = rows * hidden * np.dtype(storage).itemsize
    begin = start + entry["data_offsets"][0]
    return {
        layer: LayerPlace(begin=begin + place * size, rows=rows, hidden=hidden,
                          storage=storage, dtype=_DTYPES[entry["dtype"]])
        for place, layer in enumerate(held) if layer in layers
    }  # fmt: skip


def read_layer(uri: str, layer: int, *, size: int) -> Iterator[tuple[int, int, TensorData]]:
    """Rows of one layer of a shard, in pieces; the other layers are not read.

    Args:
        uri: of the file.
        layer: one of the store's layers.
        size: rows of a piece at most.

    Yields:
        First row, end, and (rows, hidden) in the captured dtype.

    Raises:
        ArtifactError: missing, damaged, another format, or without that layer.

    Example:
        <!-- test: server -->
        ```python
        from inspect_lens.collect import collect
        from inspect_lens.data import load_dataset, read_layer

        data = load_dataset("organism", path="organism/data/probe_train.jsonl", limit=4)
        model = "vllm-lens/organism/checkpoint"
        store = collect(model, data, "acts/four", layers=[2, 4], max_tokens=8, progress=False)
        for first, end, rows in read_layer(f"{store.uri}/shard-00000.safetensors", 4, size=100):
            assert rows.to_float32().shape == (end - first, store.hidden)
        ```
    """
    for _, first, end, rows in read_layers(uri, [layer], size=size):
        yield first, end, rows


def read_layers(
    uri: str, layers: Sequence[int], *, size: int
) -> Iterator[tuple[int, int, int, TensorData]]:
    """Rows of some layers of a shard, from one pass over the file, front to back.

    Args:
        uri: of the file.
        layers: of the store.
        size: rows of a piece at most.

    Yields:
        Layer, first row, end, and (rows, hidden) in the captured dtype; a layer after the other.

    Raises:
        ArtifactError: as `read_layer`.
    """
    places = find_layers(uri, layers)
    if not places:
        return
    with fsspec.open(uri, "rb") as file:
        for layer, place in places.items():
            file.seek(place.begin)
            for first in range(0, place.rows, size):
                end = min(first + size, place.rows)
                yield layer, first, end, place.decode(_read(file, uri, (end - first), place))


def read_spans(uri: str, place: LayerPlace, spans: Sequence[tuple[int, int]]) -> list[Floats]:
    """Some rows of a layer; neighbours are read at once, and nothing else is.

    Args:
        uri: of the shard.
        place: of the layer there.
        spans: first row and end of each, ascending and apart.

    Returns:
        Rows (end - first, hidden) float32 of each span.

    Raises:
        ArtifactError: missing, or it ends before the rows do.
    """
    made: list[Floats] = []
    try:
        with fsspec.open(uri, "rb") as file:
            at = 0
            while at < len(spans):
                stop = at + 1
                while stop < len(spans) and spans[stop][0] == spans[stop - 1][1]:
                    stop += 1
                begin, end = spans[at][0], spans[stop - 1][1]
                file.seek(place.begin + begin * place.row_bytes)
                run = place.decode(_read(file, uri, end - begin, place)).to_float32()
                made += [run[first - begin : last - begin] for first, last in spans[at:stop]]
                at = stop
    except OSError as error:
        raise _damaged(uri, error) from None
    return made


def _read(file: fsspec.core.OpenFile, uri: str, rows: int, place: LayerPlace) -> bytes:
    data: bytes = file.read(rows * place.row_bytes)
    if len(data) != rows * place.row_bytes:
        raise _damaged(uri, ValueError("it ends within the activations"))
    return data
