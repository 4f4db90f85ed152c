"""All that changes the stream of one request, and what is asked of it for each that has it.

A batch is mostly edited alike. What follows from the edits is worked out once, and requests whose
edits say nothing of their prompts have one object, however long these are.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Final, cast

import msgspec
import numpy as np
from numpy.typing import NDArray

from inspect_lens.errors import SpecError
from inspect_lens.spec import (
    DType,
    EditBase,
    EngineFacts,
    LensRequest,
    Site,
    SteeringVector,
    TapPoint,
    TensorData,
    phase_range,
    resolve_positions,
)

from .edits import EVERY, Edited, EditEnvelope, check_room, pack_edits, seal_edits, unpack_edits
from .kept import Kept
from .programs import file_of, read_file

__all__ = [
    "NO_EDITS",
    "SealedEdits",
    "SteerEnvelope",
    "pack_vectors",
    "seal_request_edits",
    "seal_vector",
    "unpack_vectors",
]


@dataclass(frozen=True)
class SteerEnvelope(Edited):
    """One steering vector."""

    site: Site
    """The site asked for."""
    layers: tuple[int, ...]
    """Layer of each row of the vectors."""
    scale: float
    norm_match: bool
    positions: tuple[int, ...] | None
    """None: every token of the span."""
    sha256: str
    """Of the vectors' dtype, shape and content."""
    vectors: TensorData
    """(layers, hidden) for every token or shared by the positions, else
    (layers, positions, hidden)."""
    lo: int = 0
    hi: int = EVERY
    """The span: only positions of [lo, hi) are steered."""


def pack_vectors(vectors: Sequence[SteerEnvelope], folder: Path | None) -> list[dict[str, Any]]:
    """As msgpack-able data; tensors become bytes, or files in a folder: see `file_of`."""
    packed = []
    for s in vectors:
        values = np.ascontiguousarray(s.vectors.storage)
        file = file_of((values.data,), s.vectors, folder)
        packed.append(
            {
                "site": s.site,
                "layers": list(s.layers),
                "scale": s.scale,
                "norm_match": s.norm_match,
                "positions": None if s.positions is None else list(s.positions),
                "sha256": s.sha256,
                "dtype": s.vectors.dtype,
                "shape": list(s.vectors.shape),
                "file": file,
                "data": b"" if file is not None else values.tobytes(),
                "lo": s.lo,
                "hi": s.hi,
            }
        )
    return packed


def unpack_vectors(values: Sequence[Mapping[str, Any]]) -> tuple[SteerEnvelope, ...]:
    """Read what `pack_vectors` made."""
    return tuple(
        SteerEnvelope(
            s["site"],
            tuple(s["layers"]),
            s["scale"],
            s["norm_match"],
            None if s["positions"] is None else tuple(s["positions"]),
            s["sha256"],
            _tensor(s),
            s["lo"],
            s["hi"],
        )
        for s in values
    )


def seal_vector(vector: SteeringVector, n_prompt: int, n_max: int, field: str) -> SteerEnvelope:
    """Resolve a judged vector against its prompt."""
    positions = vector.position_indices
    data = vector.activations
    if positions is None and len(data.shape) == 3:
        positions = tuple(range(data.shape[1]))
    if positions is not None:
        resolved = resolve_positions(
            positions, n_prompt=n_prompt, n_max=n_max, field=f"{field}.position_indices"
        )
        positions = tuple(resolved)
    span = phase_range(vector.phase, n_prompt, EVERY)
    if positions is not None and not any(p in span for p in positions):
        raise SpecError(
            f"{field}: phase={vector.phase!r} and none of position_indices belongs to it, with a "
            f"prompt of {n_prompt} tokens; leave one of them out"
        )
    return SteerEnvelope(
        vector.site,
        vector.layer_indices,
        vector.scale,
        vector.norm_match,
        positions,
        data.sha256,
        data,
        span.start,
        span.stop,
    )


def _tensor(value: Mapping[str, Any]) -> TensorData:
    dtype = cast("DType", value["dtype"])
    storage: NDArray[Any] = np.frombuffer(
        value["data"] if value["file"] is None else read_file(value["file"]),
        dtype={"float32": "<f4", "float16": "<f2", "bfloat16": "<u2"}[dtype],
    ).reshape(value["shape"])
    return TensorData(storage, dtype)


Span = tuple[int, int]


@dataclass(frozen=True, eq=False)
class SealedEdits:
    """Steering vectors and other edits of a request, in order."""

    vectors: tuple[SteerEnvelope, ...] = ()
    edits: tuple[EditEnvelope, ...] = ()
    """Behind the vectors."""
    _packed: dict[Path | None, bytes] = field(default_factory=dict, init=False, repr=False)

    @cached_property
    def all(self) -> tuple[SteerEnvelope | EditEnvelope, ...]:
        """Vectors and edits."""
        return (*self.vectors, *self.edits)

    @cached_property
    def until(self) -> int:
        """One past the last position that is edited; `EVERY` when every token is."""
        return max((s.until for s in self.all), default=0)

    @cached_property
    def taps(self) -> frozenset[TapPoint]:
        """Where the stream is edited."""
        return frozenset(tap for s in self.all for tap in s.taps)

    @cached_property
    def layers(self) -> tuple[int, ...]:
        """Layers at which it is edited, ascending."""
        return tuple(sorted({layer for s in self.all for layer in s.layers}))

    @cached_property
    def sites(self) -> frozenset[Site]:
        """Sites at which it is edited."""
        return frozenset(s.site for s in self.all)

    @cached_property
    def hashes(self) -> tuple[str, ...]:
        """sha256 of the content of each."""
        return tuple(s.sha256 for s in self.all)

    @cached_property
    def begins_with_prompt(self) -> bool:
        """Whether tokens of the prompt may be edited."""
        return any(s.lo == 0 for s in self.all)

    @cached_property
    def has_latches(self) -> bool:
        """Whether it has gates whose decisions last."""
        return any(edit.latch is not None for edit in self.edits)

    @cached_property
    def reads_ids(self) -> bool:
        """Whether it looks at the ids of tokens that are fed to the model."""
        return any(edit.reads_ids for edit in self.edits)

    @cached_property
    def spans(self) -> frozenset[Span]:
        """Spans all of whose tokens are edited; they do not overlap."""
        spans = {(s.lo, s.hi) for s in self.all if s.positions is None}
        # Phases do not overlap, so without the whole they are disjoint.
        return frozenset({(0, EVERY)} if (0, EVERY) in spans else spans)

    @cached_property
    def named(self) -> NDArray[np.int64]:
        """Positions that are edited and lie in no span, ascending."""
        named = {p for s in self.all for p in s.positions or () if s.lo <= p < s.hi}
        named = {p for p in named if not any(a <= p < b for a, b in self.spans)}
        return np.asarray(sorted(named), dtype=np.int64)

    @property
    def nbytes(self) -> int:
        """Bytes that it takes to keep it."""
        vectors = sum(s.vectors.nbytes for s in self.vectors)
        listed = sum(8 * len(s.positions or ()) for s in self.all)
        return vectors + listed + sum(e.made.nbytes for e in self.edits)

    def pack(self, folder: Path | None) -> bytes | None:
        """As bytes, which are made once; None without any."""
        if not self.all:
            return None
        if folder not in self._packed:
            both = pack_vectors(self.vectors, folder), pack_edits(self.edits, folder)
            self._packed[folder] = msgspec.msgpack.encode(both)
        return self._packed[folder]

    @classmethod
    def unpack(cls, data: bytes) -> SealedEdits:
        """Read what `pack` made."""
        vectors, edits = msgspec.msgpack.decode(data)
        return cls(unpack_vectors(vectors), unpack_edits(edits))

    @cached_property
    def content(self) -> str:
        """sha256 of all of it: requests with equal ones compute equal blocks of the cache."""
        digest = hashlib.sha256()
        for s in self.vectors:
            where = (s.positions, s.lo, s.hi)
            digest.update(repr((s.taps, s.scale, s.norm_match, where, s.sha256)).encode())
        for e in self.edits:
            digest.update(repr((e.taps, e.positions, e.lo, e.hi, e.sha256)).encode())
        return digest.hexdigest()


NO_EDITS: Final = SealedEdits()

_SEALED: Final[Kept[tuple[int, int], tuple[LensRequest, EngineFacts, SealedEdits]]] = Kept(1024)
"""By identity of the request and the facts, which are kept so that nothing else gets it."""


def seal_request_edits(
    request: LensRequest, facts: EngineFacts, n_prompt: int, n_max: int
) -> SealedEdits:
    """Resolve the edits of a judged request against its prompt."""
    if not (request.steer or request.edits):
        return NO_EDITS
    key = id(request), id(facts)
    known = _SEALED.get(key)
    if known is not None:
        return known[2]
    sealed = SealedEdits(
        tuple(seal_vector(v, n_prompt, n_max, f"steer[{i}]") for i, v in enumerate(request.steer)),
        seal_edits(request.edits, n_prompt, n_max, facts.width_of),
    )
    check_room(sealed.edits, n_max, facts)
    if _suits_any_prompt(request.steer, request.edits):
        _SEALED.keep(key, (request, facts, sealed), request.tensor_bytes)
    return sealed


def _suits_any_prompt(vectors: Sequence[SteeringVector], edits: Sequence[EditBase]) -> bool:
    """Whether every token is edited, and no gate is told by where its token lies."""
    return all(
        v.position_indices is None and len(v.activations.shape) == 2 and v.phase == "both"
        for v in vectors
    ) and all(
        e.positions == "all" and e.phase == "both" and (e.when is None or not e.when.is_lasting)
        for e in edits
    )
