"""What the front-end tells the workers about one request: plain data that msgpack carries.

Written once, in the front-end, from a request that was already judged; the worker trusts it.
Positions are resolved here, so the worker never has to know how long a prompt is.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from inspect_lens.errors import LensError
from inspect_lens.spec import (
    DType,
    EngineFacts,
    LensRequest,
    Site,
    SteeringVector,
    TapPoint,
    TensorData,
    resolve_positions,
    tap_point,
    tap_points,
)

__all__ = ["CaptureEnvelope", "Envelope", "SteerEnvelope", "seal"]

VERSION = 1
EVERY = 1 << 62


@dataclass(frozen=True)
class CaptureEnvelope:
    """Rows to send back."""

    taps: tuple[TapPoint, ...]
    """What is captured: distinct, in tap order."""
    sites: tuple[Site, ...]
    """Sites asked for; each has a tensor in the result."""
    layers: tuple[int, ...]
    """Global layer numbers of each of these tensors, ascending."""
    lo: int
    """First position of the range; with `positions`, the smallest of them."""
    hi: int
    """End of the range, exclusive; with `positions`, one past the largest."""
    positions: tuple[int, ...] | None
    """Sorted explicit positions, or None for the whole range."""
    hidden: int
    """Width of a row."""
    dtype: DType
    """dtype of a row."""
    transport: str
    """How the response carries the tensor; the worker does not care."""


@dataclass(frozen=True)
class SteerEnvelope:
    """One steering vector."""

    taps: tuple[TapPoint, ...]
    """Where each row of `vectors` is added."""
    site: Site
    """The site asked for."""
    layers: tuple[int, ...]
    """The layers asked for."""
    scale: float
    norm_match: bool
    positions: tuple[int, ...] | None
    """None: every token."""
    vectors: TensorData
    """(layers, hidden) for every token or shared by the positions, else
    (layers, positions, hidden)."""


@dataclass(frozen=True)
class Envelope:
    """Everything that a worker reads of one request."""

    reply: str
    """ZMQ address of the front-end process that owns the request."""
    capture: CaptureEnvelope | None
    steer: tuple[SteerEnvelope, ...]
    n_prompt: int
    """Prompt tokens."""
    is_speculative: bool
    """Whether a step may feed tokens that are rejected afterwards."""
    steer_hash: str | None
    """What the prefix cache is salted with: a content hash over the steering, and what keeps a
    request away from blocks that a failed one of the same content left behind."""

    @property
    def steer_until(self) -> int:
        """One past the last position that is steered; `EVERY` when every token is."""
        last = 0
        for s in self.steer:
            last = max(last, EVERY if s.positions is None else max(s.positions) + 1)
        return last

    def pack(self) -> dict[str, Any]:
        """As msgpack-able data; tensors become bytes."""
        return {
            "v": VERSION,
            "reply": self.reply,
            "hash": self.steer_hash,
            "n_prompt": self.n_prompt,
            "is_speculative": self.is_speculative,
            "capture": None
            if self.capture is None
            else {
                "taps": [list(tap) for tap in self.capture.taps],
                "sites": list(self.capture.sites),
                "layers": list(self.capture.layers),
                "lo": self.capture.lo,
                "hi": self.capture.hi,
                "positions": _listed(self.capture.positions),
                "hidden": self.capture.hidden,
                "dtype": self.capture.dtype,
                "transport": self.capture.transport,
            },
            "steer": [
                {
                    "taps": [list(tap) for tap in s.taps],
                    "site": s.site,
                    "layers": list(s.layers),
                    "scale": s.scale,
                    "norm_match": s.norm_match,
                    "positions": _listed(s.positions),
                    "dtype": s.vectors.dtype,
                    "shape": list(s.vectors.shape),
                    "data": np.ascontiguousarray(s.vectors.storage).tobytes(),
                }
                for s in self.steer
            ],
        }

    @classmethod
    def unpack(cls, value: Mapping[str, Any]) -> Envelope:
        """Read what `pack` made.

        Raises:
            LensError: the front-end and the worker run different releases.
        """
        if value.get("v") != VERSION:
            raise LensError(
                f"the front-end wrote envelope version {value.get('v')!r} and this worker reads "
                f"{VERSION}; install one release of inspect_lens in all processes"
            )
        capture = value["capture"]
        return cls(
            reply=value["reply"],
            capture=None
            if capture is None
            else CaptureEnvelope(
                _taps(capture["taps"]),
                tuple(capture["sites"]),
                tuple(capture["layers"]),
                capture["lo"],
                capture["hi"],
                _tupled(capture["positions"]),
                capture["hidden"],
                capture["dtype"],
                capture["transport"],
            ),
            steer=tuple(
                SteerEnvelope(
                    _taps(s["taps"]),
                    s["site"],
                    tuple(s["layers"]),
                    s["scale"],
                    s["norm_match"],
                    _tupled(s["positions"]),
                    _tensor(s),
                )
                for s in value["steer"]
            ),
            n_prompt=value["n_prompt"],
            is_speculative=value["is_speculative"],
            steer_hash=value["hash"],
        )


def seal(
    request: LensRequest,
    facts: EngineFacts,
    *,
    reply: str,
    n_prompt: int,
    max_tokens: int,
    epoch: Callable[[str], str] = str,
) -> Envelope:
    """Resolve a judged request against its prompt.

    Args:
        request: the request, already checked against `facts`.
        facts: of the engine.
        reply: address for results.
        n_prompt: prompt tokens.
        max_tokens: tokens that may be sampled.
        epoch: makes the salt of a content hash.

    Returns:
        The envelope for the workers.

    Raises:
        SpecError: a position lies outside the request.
    """
    # The last sampled token is never fed to the model, so it has no row.
    n_max = n_prompt + max(max_tokens, 1) - 1
    steer = tuple(
        _seal_vector(v, n_prompt, n_max, f"steer[{i}]") for i, v in enumerate(request.steer)
    )
    return Envelope(
        reply=reply,
        capture=_seal_capture(request, facts, n_prompt, n_max),
        steer=steer,
        n_prompt=n_prompt,
        is_speculative=facts.is_speculative,
        steer_hash=epoch(_steer_hash(steer)) if steer else None,
    )


def _seal_capture(
    request: LensRequest, facts: EngineFacts, n_prompt: int, n_max: int
) -> CaptureEnvelope | None:
    capture = request.capture
    if capture is None:
        return None
    layers = tuple(range(facts.n_layers)) if capture.layers == "all" else capture.layers
    sites = capture.sites
    taps = tap_points(sites, layers)
    where = resolve_positions(
        capture.positions, n_prompt=n_prompt, n_max=n_max, field="capture.positions"
    )
    dtype = cast("DType", facts.dtype)
    if isinstance(where, range):
        stop = max(where.start, where.stop)
        return CaptureEnvelope(
            taps, sites, layers, where.start, stop, None, facts.hidden, dtype, capture.transport
        )
    ordered = tuple(sorted(where))
    return CaptureEnvelope(
        taps,
        sites,
        layers,
        ordered[0],
        ordered[-1] + 1,
        ordered,
        facts.hidden,
        dtype,
        capture.transport,
    )


def _seal_vector(vector: SteeringVector, n_prompt: int, n_max: int, field: str) -> SteerEnvelope:
    positions = vector.position_indices
    data = vector.activations
    if positions is None and len(data.shape) == 3:
        positions = tuple(range(data.shape[1]))
    if positions is not None:
        resolved = resolve_positions(
            positions, n_prompt=n_prompt, n_max=n_max, field=f"{field}.position_indices"
        )
        positions = tuple(resolved)
    layers = vector.layer_indices
    return SteerEnvelope(
        tuple(tap_point(vector.site, layer) for layer in layers),
        vector.site,
        layers,
        vector.scale,
        vector.norm_match,
        positions,
        data,
    )


def _steer_hash(steer: tuple[SteerEnvelope, ...]) -> str:
    digest = hashlib.sha256()
    for s in steer:
        digest.update(repr((s.taps, s.scale, s.norm_match, s.positions, s.vectors.sha256)).encode())
    return digest.hexdigest()


def _taps(value: list[tuple[Site, int]]) -> tuple[TapPoint, ...]:
    return tuple(TapPoint(site, layer) for site, layer in value)


def _listed(positions: tuple[int, ...] | None) -> list[int] | None:
    return None if positions is None else list(positions)


def _tupled(positions: list[int] | None) -> tuple[int, ...] | None:
    return None if positions is None else tuple(positions)


def _tensor(value: Mapping[str, Any]) -> TensorData:
    dtype = cast("DType", value["dtype"])
    storage: NDArray[Any] = np.frombuffer(
        value["data"], dtype={"float32": "<f4", "float16": "<f2", "bfloat16": "<u2"}[dtype]
    ).reshape(value["shape"])
    return TensorData(storage, dtype)
