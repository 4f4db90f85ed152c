"""One shard of captured activations: a safetensors file whose bytes depend on its samples only."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Annotated, Any, Final, cast, get_args

import fsspec
import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, Field, ValidationError

from inspect_lens._base.untrusted import parse_json, parsing, refuse_irregular
from inspect_lens._intake import DTYPES, STORAGE, absolute, encode_tensors, is_local, read_tensors
from inspect_lens.errors import ArtifactError, CaptureError
from inspect_lens.spec import DType, TensorData, explain

__all__ = [
    "About",
    "Captured",
    "Manifest",
    "SampleRecord",
    "ShardFacts",
    "Stated",
    "decode_shard",
    "encode_shard",
    "read_facts",
    "read_layer",
    "read_records",
    "shard_facts",
    "shard_parts",
    "sum_facts",
    "to_json",
]

_FORMAT: Final = "inspect_lens.shard/1"
_KEY: Final = "inspect_lens"
_HEADER_LIMIT: Final = 100_000_000


Count = Annotated[int, Field(strict=True, ge=0)]


class _Dataset(BaseModel):
    n_samples: Count = 0


class About(BaseModel):
    """What the rows of a folder are of, as far as it is said."""

    model: dict[str, str | None] = {}
    dataset: _Dataset = _Dataset()
    request: dict[str, Any] = {}
    computed_with: dict[str, Any] = {}
    layers: list[Count] = []
    dtype: str = ""
    shard_samples: Annotated[int, Field(strict=True, ge=1)] = 1
    hidden: Annotated[int, Field(strict=True, ge=0, le=1 << 24)] = 0


class _Shard(BaseModel):
    file: str
    sha256: str


class ShardFacts(About, _Shard):
    """What `shard_facts` says of a shard."""

    n_samples: Count
    n_rows: Count
    n_empty: Count


class Manifest(About):
    """What is known of all shards of a folder."""

    n_samples: Count
    n_rows: Count
    n_empty: Count = 0
    shards: list[_Shard]


class Stated(dict[str, Any]):
    """What files say; what they do not say is an error of ours."""

    def __init__(self, where: str, facts: Mapping[str, Any]) -> None:
        super().__init__(
            {k: Stated(where, v) if isinstance(v, Mapping) else v for k, v in facts.items()}
        )
        self.where = where

    def __missing__(self, key: str) -> Any:
        raise ArtifactError(
            f"{self.where}: says no {key!r}, only {sorted(self)}; write it, or collect anew"
        )


def read_facts(
    where: str, content: bytes, kind: type[BaseModel], what: str, *, format: str = ""
) -> Stated:
    """Facts that lie beside shards, which may be a stranger's or damaged."""
    advice = "delete it, and run collect again, or read what it stands beside"
    with parsing(where, what, advice):
        facts = parse_json(content)
        if format and facts["format"] != format:
            raise ValueError(f"format {facts['format']!r}, this release reads {format!r}")
        try:
            kind.model_validate(facts)
        except ValidationError as error:
            raise ValueError(explain(error)) from None
    return Stated(where, facts)


@dataclass(frozen=True, kw_only=True)
class SampleRecord:
    """Facts that a store keeps of one sample: label, tokens, text and more."""

    index: int
    """In the data set."""
    id: str
    label: bool | None
    group: str
    n_rows: int
    """Tokens that were read; 0 where the positions select none."""
    n_prompt: int
    completion: str
    """What the assistant said; empty for raw text."""
    columns: Mapping[str, str] = field(default_factory=dict)
    prompt: str = ""
    """Text of the messages, for baselines that read words."""
    error: str = ""
    """Why there is nothing, when a failed sample was skipped."""
    content: str = ""
    """`ProbeSample.content_id`; empty where the store does not have it."""


@dataclass(frozen=True, kw_only=True)
class Captured:
    """One stored sample and its activations."""

    record: SampleRecord
    acts: TensorData | None
    """(layers, rows, hidden) in the captured dtype; None without rows."""
    layers: tuple[int, ...]
    positions: tuple[int, ...]
    """(rows,) absolute, over prompt and completion."""
    token_ids: tuple[int, ...]
    """(tokens,) all of prompt and completion."""

    @property
    def read_ids(self) -> tuple[int, ...]:
        """(rows,) ids of the tokens that were read."""
        return tuple(self.token_ids[p] for p in self.positions)


def encode_shard(samples: Sequence[Captured]) -> bytes:
    """Encode samples and activations as the bytes of a shard file.

    Args:
        samples: in order; those with rows agree on layers, width and dtype.

    Returns:
        The bytes; equal samples give equal bytes.

    Raises:
        CaptureError: samples disagree.

    Example:
        ```python
        import numpy as np

        from inspect_lens.data import Captured, SampleRecord, encode_shard
        from inspect_lens.spec import TensorData

        record = SampleRecord(
            index=0, id="a", label=True, group="a", n_rows=2, n_prompt=5, completion="It is Ruvan."
        )
        sample = Captured(
            record=record,
            acts=TensorData(np.zeros((1, 2, 8), dtype=np.float32), "float32"),
            layers=(4,),
            positions=(5, 6),
            token_ids=(1, 2, 3, 4, 5, 6, 7),
        )
        assert encode_shard([sample]) == encode_shard([sample])
        ```
    """
    return b"".join(shard_parts(samples))


def shard_parts(samples: Sequence[Captured]) -> list[bytes | memoryview]:
    """Content of a shard file, in parts: large ones are not copied once more."""
    full = [s for s in samples if s.acts is not None and s.record.n_rows]
    kinds = {(s.layers, s.acts.dtype, s.acts.storage.shape[2]) for s in full if s.acts}
    if len(kinds) > 1:
        raise CaptureError(
            f"shard: samples disagree on layers, dtype and width: {sorted(map(str, kinds))}; all "
            "have to come from one model with one request; collect into a new folder"
        )
    layers, dtype, hidden = next(iter(kinds)) if kinds else ((), "float32", 0)
    parts = [s.acts.storage for s in full if s.acts]
    acts = np.concatenate(parts, axis=1) if parts else np.zeros((0, 0, 0), dtype=np.float32)
    arrays: dict[str, tuple[str, NDArray[Any]]] = {
        "acts": (dtype, acts),
        "positions": ("int32", _int32(p for s in samples for p in s.positions)),
        "token_ids": ("int32", _int32(t for s in samples for t in s.token_ids)),
        "n_tokens": ("int32", _int32(len(s.token_ids) for s in samples)),
    }
    facts = {
        "format": _FORMAT,
        "layers": layers,
        "hidden": hidden,
        "dtype": dtype,
        "samples": [asdict(s.record) for s in samples],
    }
    return encode_tensors(arrays, {_KEY: json.dumps(facts, sort_keys=True)})


def shard_facts(file: str, sha256: str, samples: Sequence[Captured]) -> dict[str, Any]:
    """What is written behind a shard, and says that it is whole."""
    first = next((s for s in samples if s.acts is not None), None)
    acts = None if first is None else first.acts
    return {
        "file": file,
        "sha256": sha256,
        "n_samples": len(samples),
        "n_rows": sum(s.record.n_rows for s in samples),
        "n_empty": sum(not s.record.n_rows for s in samples),
        "layers": [] if first is None else list(first.layers),
        "hidden": 0 if acts is None else acts.storage.shape[2],
        "dtype": "" if acts is None else acts.dtype,
    }


def sum_facts(facts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What a manifest says of all shards, of the facts of each."""
    made: dict[str, Any] = {
        key: sum(f[key] for f in facts) for key in ("n_samples", "n_rows", "n_empty")
    }
    keys = ("file", "sha256", "n_samples", "n_rows")
    return made | {"shards": [{key: f[key] for key in keys} for f in facts]}


def to_json(value: Any) -> bytes:
    """The content of a file of facts."""
    return (json.dumps(value, indent=2, sort_keys=True) + "\n").encode()


def _int32(values: Any) -> NDArray[np.int32]:
    return np.fromiter(values, dtype=np.int32)


_of_shard: Final = partial(
    parsing, what="a shard of activations",
    advice="delete it and run collect again, which makes it anew",
)  # fmt: skip
"""Of the address of a shard: see `parsing`."""


def decode_shard(content: bytes, *, where: str) -> list[Captured]:
    """Read what `encode_shard` made."""
    with _of_shard(where):
        # Views: a shard is large, and a slice of bytes would be a second one.
        found, metadata = read_tensors(content)
        facts, tensors = _facts(metadata), {name: array for name, (_, array) in found.items()}
        records = [SampleRecord(**r) for r in facts["samples"]]
        rows = np.cumsum([0, *(r.n_rows for r in records)])
        tokens = np.cumsum([0, *tensors["n_tokens"].tolist()])
        return [
            Captured(
                record=r,
                acts=TensorData(tensors["acts"][:, rows[i] : rows[i + 1]], facts["dtype"])
                if r.n_rows
                else None,
                layers=tuple(facts["layers"]) if r.n_rows else (),
                positions=tuple(tensors["positions"][rows[i] : rows[i + 1]].tolist()),
                token_ids=tuple(tensors["token_ids"][tokens[i] : tokens[i + 1]].tolist()),
            )
            for i, r in enumerate(records)
        ]


def read_records(uri: str) -> list[SampleRecord]:
    """Records of a shard, from its header alone.

    Args:
        uri: of the file.

    Returns:
        The records, in order.

    Raises:
        ArtifactError: missing, damaged, or another format.

    Example:
        ```python
        from inspect_lens.data import read_records

        records = read_records("acts/eight/shard-00000.safetensors")
        assert len(records) == 8
        ```
    """
    _, header = _read_header(uri)
    with _of_shard(uri):
        return [SampleRecord(**r) for r in _facts(header["__metadata__"])["samples"]]


def _read_header(uri: str) -> tuple[int, dict[str, Any]]:
    """Where the data begin, and the safetensors header."""
    with _of_shard(uri):
        if is_local(absolute(uri)):
            refuse_irregular(absolute(uri))
        with fsspec.open(uri, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 0 < length < _HEADER_LIMIT:
                raise ValueError(f"a header of {length} bytes")
            header: dict[str, Any] = parse_json(file.read(length))
        return 8 + length, header


def _facts(metadata: Mapping[str, str]) -> dict[str, Any]:
    facts: dict[str, Any] = parse_json(metadata[_KEY])
    if facts["format"] != _FORMAT:
        raise ValueError(f"format {facts['format']!r}, this release reads {_FORMAT!r}")
    return facts


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
        ```python
        from inspect_lens.data import read_layer

        for first, end, rows in read_layer("acts/eight/shard-00000.safetensors", 4, size=100):
            assert rows.to_float32().shape == (end - first, 256)
        ```
    """
    start, header = _read_header(uri)
    with _of_shard(uri):
        held, entry = _facts(header["__metadata__"])["layers"], header["acts"]
        dtype, storage = DTYPES[entry["dtype"]], np.dtype(STORAGE[entry["dtype"]])
        if dtype not in get_args(DType):
            raise ValueError(f"activations of {dtype}")
        _, rows, hidden = entry["shape"]
    if not rows:
        return
    if layer not in held:
        raise ArtifactError(
            f"{uri}: layer {layer} was not captured, only {held}; choose one of these"
        )
    row_bytes = hidden * storage.itemsize
    with fsspec.open(uri, "rb") as file:
        file.seek(start + entry["data_offsets"][0] + held.index(layer) * rows * row_bytes)
        for first in range(0, rows, size):
            end = min(first + size, rows)
            data = file.read((end - first) * row_bytes)
            with _of_shard(uri):
                if len(data) != (end - first) * row_bytes:
                    raise ValueError("it ends within the activations")
            values = np.frombuffer(data, storage).reshape(-1, hidden)
            yield first, end, TensorData(values, cast("DType", dtype))
