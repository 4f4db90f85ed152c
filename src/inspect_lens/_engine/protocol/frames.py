"""Frames between a worker and a front-end on another host, and who may send them.

Each frame says what it is, which number it has among its sender's, and the sum of its bytes. So a
frame that is lost, comes twice, or is damaged ends the link by name. With a shared secret, both
ends prove that they know it, and all is encrypted: CurveZMQ (https://rfc.zeromq.org/spec/26/), with
key pairs made of the secret.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import msgspec
import zmq
from zmq.utils import z85

__all__ = [
    "CHUNK",
    "IN_FLIGHT",
    "MOST_ASKED",
    "MOST_FRAME",
    "Frame",
    "FrameError",
    "Hello",
    "Kind",
    "Serial",
    "client_public",
    "make_client",
    "make_server",
]

VERSION = 2
CHUNK = 4 << 20
"""Bytes of a frame's content, at most."""
MOST_FRAME = CHUNK + 1024
MOST_ASKED = 4096
"""Requests whose records are asked for at once."""
IN_FLIGHT = 8
"""Frames that wait in each socket, at most."""

_HEAD = struct.Struct("<2sBBQqI")
_MAGIC = b"il"


class Kind(IntEnum):
    """What a frame is."""

    HELLO = 1
    """Of a worker, first: see `Hello`."""
    WELCOME = 2
    """Of a front-end: rows may come."""
    BYE = 3
    """Of either: it ends the link; the content says why."""
    BEAT = 4
    """Of either: it is still there."""
    DATA = 5
    """Of a worker: bytes of its memory; the number is their offset."""
    PART = 6
    """Of a worker: a message goes on in the next frame."""
    MESSAGE = 7
    """Of a worker: the end of a message; the number is that of the rows that are whole now."""
    REVOKED = 8
    """Of a worker: blocks up to the number hold something else by now."""
    BOARD = 9
    """Of a worker: numbers of requests, and their records."""
    TAKEN = 10
    """Of a front-end: its cursor."""
    ASK = 11
    """Of a front-end: numbers of requests whose records it wants."""


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


class Serial:
    """Numbers the frames of one direction of a link, and checks those of the other."""

    def __init__(self) -> None:
        self._sent = self._received = 0

    def pack(self, kind: Kind, number: int = 0, content: bytes = b"") -> list[bytes]:
        """The parts of the next frame."""
        head = _HEAD.pack(_MAGIC, VERSION, kind, self._sent, number, 0)
        self._sent += 1
        check = zlib.crc32(content, zlib.crc32(head))
        return [head[:-4] + struct.pack("<I", check), content]

    def unpack(self, parts: Sequence[Any]) -> Frame:
        """The frame in what came."""
        if len(parts) != 2 or len(parts[0]) != _HEAD.size or len(parts[1]) > CHUNK:
            raise FrameError(f"parts of {[len(part) for part in parts][:4]} bytes are no frame")
        head = bytes(parts[0])
        magic, version, kind, serial, number, check = _HEAD.unpack(head)
        if magic != _MAGIC or version != VERSION:
            raise FrameError("the other end speaks another version of this protocol")
        if check != zlib.crc32(parts[1], zlib.crc32(head[:-4] + bytes(4))):
            raise FrameError("a frame is damaged")
        # Who knows nothing of a link can only end it.
        if serial != self._received and kind != Kind.BYE:
            raise FrameError(f"frame {serial} came in the place of frame {self._received}")
        self._received += 1
        try:
            return Frame(Kind(kind), number, memoryview(parts[1]))
        except ValueError:
            raise FrameError(f"there are no frames of kind {kind}") from None


def _pair(key: str, role: bytes) -> tuple[bytes, bytes]:
    """Public and secret key of a role."""
    secret = z85.encode(hashlib.blake2b(key.encode(), digest_size=32, person=role).digest())
    return zmq.curve_public(secret), secret


def make_server(socket: Any, key: str) -> None:
    """Have a socket speak only with those who know the shared secret."""
    if key:
        _, socket.curve_secretkey = _pair(key, b"front-end")
        socket.curve_server = True


def make_client(socket: Any, key: str) -> None:
    """Have a socket speak only with a server that knows the shared secret."""
    if key:
        socket.curve_serverkey, _ = _pair(key, b"front-end")
        socket.curve_publickey, socket.curve_secretkey = _pair(key, b"worker")


def client_public(key: str) -> bytes:
    """Public key, in its 32 bytes, of all who know the shared secret."""
    return bytes(z85.decode(_pair(key, b"worker")[0]))
