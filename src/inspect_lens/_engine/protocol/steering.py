"""Steering vectors of one request, as its workers read them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from inspect_lens.errors import SpecError
from inspect_lens.spec import (
    DType,
    Site,
    SteeringVector,
    TensorData,
    phase_range,
    resolve_positions,
)

from .edit_files import file_of, read_file
from .edits import EVERY, Edited

__all__ = ["SteerEnvelope", "pack_vectors", "seal_vector", "unpack_vectors"]


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
    """Resolve a judged vector against its prompt.

    Args:
        vector: what was asked for.
        n_prompt: prompt tokens.
        n_max: tokens that are fed at most.
        field: how errors call it.

    Raises:
        SpecError: a position lies outside the request, or none is of the phase.
    """
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
