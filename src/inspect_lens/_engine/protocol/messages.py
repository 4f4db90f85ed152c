"""Messages from a worker to a front-end: small, as rows travel in shared memory."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from inspect_lens.spec import EnginePath

ROWS, SCORES, QK, LENS = 0, 1, 2, 3
"""Results that a request may have: captured rows, what probes made of rows, queries and keys, and
what rows predict."""

PATHS: tuple[EnginePath, ...] = ("eager", "compiled", "piecewise", "graph")
"""Ways in which a step runs, in the order of their bits on the board."""


class Opening(msgspec.Struct, frozen=True, array_like=True, eq=True):
    """A request that a worker has taken up."""

    number: int
    """The worker's short name of it."""
    key: str
    shares: list[tuple[int, int]]
    """Per result, see `ROWS`: index of the worker's first row of a token among the request's, and
    how many of them the worker has."""
    n_steered: int
    """Steered taps that the worker has."""


class Opened(msgspec.Struct, frozen=True, array_like=True, tag="opened"):
    """Requests that a worker has taken up since its last message."""

    worker: str
    """Name of its shared memory."""
    openings: list[Opening]
    attention: bytes = b""
    """What the worker knows of its attention layers, as it was packed; with its first message to a
    front-end."""


class Block(msgspec.Struct, frozen=True, array_like=True, tag="block"):
    """Rows in shared memory, (taps, tokens, width), of several requests."""

    worker: str
    reader: int
    """Index of the cursor that this front-end writes."""
    seq: int
    """The rows are there once the worker's `landed` has reached this number."""
    offset: int
    shape: tuple[int, int, int]
    dtype: str
    stream: int
    """Which of a request's results the rows belong to."""
    tap: int
    """Taps of the worker's share that lie in earlier blocks."""
    path: str
    """How the forward pass ran."""
    numbers: bytes
    """int64; requests, in the order of their rows along the token axis."""
    counts: bytes
    """int64; tokens of each."""
    first: bytes
    """int64; position of each one's first token."""
    listed: dict[int, bytes]
    """By index of the request: int64 positions, where they need not be consecutive."""
    covers: bytes = b""
    """int64; tokens that each row stands for, up to its own position; empty where that is one."""


class Settled(msgspec.Struct, frozen=True, array_like=True, tag="settled"):
    """How far requests are past what drafts may feed again; follows the rows of its step."""

    worker: str
    numbers: bytes
    """int64; requests."""
    settled: bytes
    """int64; one past the last position that no later step feeds again, of each."""


class Failure(msgspec.Struct, frozen=True, array_like=True, tag="failure"):
    """A request that a worker could not serve."""

    key: str
    kind: str
    """Name of the error class."""
    message: str


class Saved(msgspec.Struct, frozen=True, array_like=True, tag="saved"):
    """What hooks of a request saved on one worker; see `hooks/results.py`."""

    key: str
    n_layers: int
    """Layers of this worker, of those where the request runs hooks."""
    n_fed: int
    """Tokens that were seen, from position 0."""
    n_edited: int
    """Calls of hooks that gave rows back."""
    data: bytes


Message = Opened | Block | Settled | Failure | Saved

_ENCODER = msgspec.msgpack.Encoder()


def encode(message: Message) -> bytes:
    """Encode a message."""
    return _ENCODER.encode(message)


def decode(data: bytes) -> Message:
    """Decode a message."""
    # A decoder per call: it is cheap, and decoders must not be shared between threads.
    decoder: Any = msgspec.msgpack.Decoder(Opened | Block | Settled | Failure | Saved)
    return decoder.decode(data)  # type: ignore[no-any-return]


def packed(values: NDArray[np.int64]) -> bytes:
    """Numbers as bytes."""
    return np.ascontiguousarray(values, dtype="<i8").tobytes()


def unpacked(data: bytes) -> NDArray[np.int64]:
    """Numbers out of bytes."""
    return np.frombuffer(data, dtype="<i8")
