"""Messages from a worker to the front-end: a small header and, beside it, raw rows."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from inspect_lens.spec import TapPoint

__all__ = [
    "BlockHeader",
    "FailureHeader",
    "Header",
    "Span",
    "StepHeader",
    "decode_header",
    "encode_header",
]


class Span(msgspec.Struct, frozen=True, array_like=True):
    """Ascending positions; listed only where they are not consecutive."""

    first: int
    count: int
    listed: list[int] | None = None

    @classmethod
    def of(cls, positions: NDArray[np.int64]) -> Span:
        """Pack ascending positions, at least one."""
        first, count = int(positions[0]), len(positions)
        is_run = int(positions[-1]) - first + 1 == count
        return cls(first, count, None if is_run else positions.tolist())

    def positions(self) -> NDArray[np.int64]:
        """Unpack."""
        if self.listed is not None:
            return np.asarray(self.listed, dtype=np.int64)
        return np.arange(self.first, self.first + self.count, dtype=np.int64)


class BlockHeader(msgspec.Struct, frozen=True, array_like=True):
    """One block of rows, (taps, tokens, hidden), shared by several requests."""

    taps: tuple[TapPoint, ...]
    n_tokens: int
    hidden: int
    dtype: str
    requests: list[tuple[str, Span]]
    """Requests follow one another along the block's token axis."""


class StepHeader(msgspec.Struct, frozen=True, array_like=True, tag="step"):
    """What one step did."""

    path: str
    """How the forward pass ran."""
    blocks: list[BlockHeader]
    """One payload frame follows per block, in this order."""
    steered: dict[str, tuple[int, Span | None]]
    """Per steering request: one past the last position fed, and the positions steered."""
    settled: dict[str, int] = {}
    """Where drafts may be rejected: one past the last position that no later step feeds again."""


class FailureHeader(msgspec.Struct, frozen=True, array_like=True, tag="failure"):
    """A request that the worker could not serve."""

    key: str
    kind: str
    """Name of the error class."""
    message: str


Header = StepHeader | FailureHeader

_ENCODER = msgspec.msgpack.Encoder()


def encode_header(header: Header) -> bytes:
    """Encode a header."""
    return _ENCODER.encode(header)


def decode_header(data: bytes) -> Header:
    """Decode a header.

    Raises:
        msgspec.MsgspecError: the bytes are no header.
    """
    # A decoder per call: it is cheap, and decoders must not be shared between threads.
    decoder: Any = msgspec.msgpack.Decoder(StepHeader | FailureHeader)
    return decoder.decode(data)  # type: ignore[no-any-return]
