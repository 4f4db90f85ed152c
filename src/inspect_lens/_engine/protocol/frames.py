"""Frames between a worker and a front-end on another host, and who may send them.

TCP keeps their order and ZeroMQ keeps them whole; a connection that ends, or is silent, is never
made again, so that nothing can be missing in between. A worker sends `IN_FLIGHT` frames ahead of
what the front-end says that it has taken, and no more. So ZeroMQ's own thread always reads on, and
answers heartbeats also while the interpreter is busy. With a shared secret, both ends prove that
they know it, and all is encrypted: CurveZMQ (https://rfc.zeromq.org/spec/26/), with key pairs made
of the secret.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import msgspec
import zmq
from zmq.utils import z85

from .processes import BEATS, Links

CHUNK = 4 << 20
"""Bytes of a frame's content, at most."""
MOST_FRAME = CHUNK + 1024
"""Bytes of one that is taken in, at most."""
MOST_ASKED = 4096
"""Requests whose records are asked for at once."""
IN_FLIGHT = 16
"""Frames of a worker that are under way, at most."""

_HEAD = struct.Struct("<Bq")


class Kind(IntEnum):
    """What a frame is."""

    HELLO = 1
    """Of a worker, first: see `Hello`."""
    BYE = 2
    """Of either: it ends the link; the content says why."""
    DATA = 3
    """Of a worker: bytes of its memory; the number is their offset."""
    PART = 4
    """Of a worker: a message goes on in the next frame."""
    MESSAGE = 5
    """Of a worker: the end of a message; the number is that of the rows that are whole now."""
    REVOKED = 6
    """Of a worker: blocks up to the number hold something else by now."""
    BOARD = 7
    """Of a worker: numbers of requests, and their records."""
    TAKEN = 8
    """Of a front-end: its cursor."""
    ASK = 9
    """Of a front-end: numbers of requests whose records it wants."""
    CREDIT = 10
    """Of a front-end: how many of the worker's frames it has taken so far."""


class FrameError(Exception):
    """What came is not what the other end should have sent."""


class Hello(msgspec.Struct, frozen=True, array_like=True):
    """A worker's first words."""

    worker: str
    """Name of its memory."""
    nbytes: int
    """Of its memory for rows."""
    reader: int
    """Index of this front-end's cursor."""


@dataclass(frozen=True, slots=True)
class Frame:
    """What came."""

    kind: Kind
    number: int
    content: memoryview


def packed_frame(kind: Kind, number: int = 0, content: bytes = b"") -> list[bytes]:
    """The parts of a frame."""
    return [_HEAD.pack(kind, number), content]


def frame_of(parts: Sequence[Any]) -> Frame:
    """The frame in what came."""
    if len(parts) != 2 or len(parts[0]) != _HEAD.size or len(parts[1]) > CHUNK:
        raise FrameError(f"parts of {[len(part) for part in parts][:4]} bytes are no frame")
    kind, number = _HEAD.unpack(bytes(parts[0]))
    try:
        return Frame(Kind(kind), number, memoryview(parts[1]))
    except ValueError:
        raise FrameError(f"there are no frames of kind {kind}") from None


def _pair(key: str, role: bytes) -> tuple[bytes, bytes]:
    """Public and secret key of a role."""
    secret = z85.encode(hashlib.blake2b(key.encode(), digest_size=32, person=role).digest())
    return zmq.curve_public(secret), secret


def _prepare(socket: Any, links: Links, address: str) -> None:
    timeout_ms = int(1000 * links.timeout_s)
    for option, value in (
        (zmq.LINGER, 0),
        (zmq.MAXMSGSIZE, MOST_FRAME),
        (zmq.IPV6, int("[" in address)),
        (zmq.HANDSHAKE_IVL, timeout_ms),
        (zmq.HEARTBEAT_IVL, timeout_ms // BEATS),
        # Counted from the first sign of life that is missing.
        (zmq.HEARTBEAT_TIMEOUT, timeout_ms - timeout_ms // BEATS),
    ):
        socket.setsockopt(option, value)


def make_server(socket: Any, links: Links) -> None:
    """Have a socket speak only with those who know the shared secret, and are there."""
    _prepare(socket, links, links.address)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    # ZeroMQ counts what was taken in halves of this.
    socket.setsockopt(zmq.RCVHWM, 2 * IN_FLIGHT)
    if links.key:
        _, socket.curve_secretkey = _pair(links.key, b"front-end")
        socket.curve_server = True


def make_client(socket: Any, links: Links, address: str) -> None:
    """Have a socket speak only with a server that knows the shared secret, over one connection."""
    _prepare(socket, links, address)
    socket.setsockopt(zmq.RECONNECT_IVL, -1)
    socket.setsockopt(zmq.CONNECT_TIMEOUT, int(1000 * links.timeout_s))
    if links.key:
        socket.curve_serverkey, _ = _pair(links.key, b"front-end")
        socket.curve_publickey, socket.curve_secretkey = _pair(links.key, b"worker")


def client_public(key: str) -> bytes:
    """Public key of all who know the shared secret, in Z85."""
    return _pair(key, b"worker")[0]
