"""A link to a front-end on another host: what it takes leaves by a thread of its own.

The step loop only notes messages; rows lie in the worker's memory until the front-end has said that
it took them, as they do for one that reads there itself. So room, waiting and revoking are those of
`protocol/messages.py`. The thread sends the bytes of a block, then the message that tells of
them, and answers what the front-end asks of the board. It ends with its connection.

TCP keeps the order of frames and ZeroMQ keeps them whole; a connection that ends, or is silent, is
never made again, so that nothing can be missing in between. A worker sends `IN_FLIGHT` frames ahead
of what the front-end says that it has taken, and no more. So ZeroMQ's own thread always reads on,
and answers heartbeats also while the interpreter is busy. With a shared secret, both ends prove
that they know it, and all is encrypted: CurveZMQ (https://rfc.zeromq.org/spec/26/), with key pairs
made of the secret.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import math
import os
import struct
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import msgspec
import numpy as np
import zmq
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from inspect_lens._engine.protocol.messages import (
    BOARD_SIZE,
    SEND_QUEUE,
    ArenaWriter,
    Block,
    Channel,
    Message,
    unpacked,
)
from inspect_lens._engine.protocol.processes import BEATS, Links

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
    return [_HEAD.pack(kind, number), content]


def frame_of(parts: Sequence[Any]) -> Frame:
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


logger = logging.getLogger("vllm.inspect_lens")

_LANDING_S = 60.0
"""Seconds that are waited for rows to leave the device; the front-end then says what is missing."""
_LOOK_S = 0.001
"""Between two looks whether they have."""
_BURST = 64
"""Frames of the other end that are taken in before anything is sent."""
_IDLE_S = 5.0
"""Between two looks where nothing wakes the thread."""
_EVENTS = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED
_ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "int64": 8, "int32": 4, "uint8": 1}


class Link(Channel):
    """A front-end on another host."""

    def __init__(self, address: str, arena: ArenaWriter, reply: str, links: Links) -> None:
        super().__init__()
        self._address, self._arena, self._links = address, arena, links
        self._reader = arena.reader(reply, self)
        self._waiting: deque[tuple[bytes, Message]] = deque()
        self._room = threading.Event()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._is_closing = self._is_lost = self._is_welcome = False
        self._n_sent = self._n_taken = 0
        """Frames, and how many of them the front-end says that it has taken."""
        self._answers: deque[bytes] = deque()
        self._revoked = 0
        """As far as the front-end knows."""
        self._thread = threading.Thread(target=self._run, name="inspect-lens-link", daemon=True)
        self._thread.start()

    def put(self, data: bytes, message: Message) -> bool:
        """Note a message; called by the step loop."""
        if self._is_lost or len(self._waiting) >= SEND_QUEUE:
            self._room.clear()
            return False
        self._waiting.append((data, message))
        os.eventfd_write(self._wake, 1)
        return True

    def wait(self, seconds: float) -> None:
        self._room.wait(seconds)

    def is_alive(self) -> bool:
        return not self._is_lost

    def is_stopped(self) -> bool:
        """Never known of another host: it is waited for as long as for one that runs."""
        return False

    def close(self) -> None:
        """Say goodbye and end the thread; safe to call twice."""
        if self._is_closing:
            return
        self._is_closing = True
        os.eventfd_write(self._wake, 1)
        self._thread.join(timeout=2)
        if not self._thread.is_alive():
            os.close(self._wake)

    def __str__(self) -> str:
        return f"the front-end at {self._address}"

    def _run(self) -> None:
        socket: Any = zmq.Context.instance().socket(zmq.DEALER)
        try:
            make_client(socket, self._links, self._address)
            monitor = socket.get_monitor_socket(_EVENTS, f"inproc://inspect-lens-link-{id(self)}")
            socket.connect(self._address)
            hello = Hello(self._arena.name, self._arena.nbytes, self._reader)
            self._send(socket, Kind.HELLO, content=msgspec.msgpack.encode(hello))
            self._talk(socket, monitor)
        except BaseException as error:
            logger.error("inspect_lens: the link to %s has ended: %s", self, error)
            logger.debug("inspect_lens: a link has ended", exc_info=error)
        finally:
            self._is_lost = True
            self._waiting.clear()
            self._room.set()
            with contextlib.suppress(zmq.ZMQError):  # the context may have ended
                socket.disable_monitor()
            socket.close(linger=200 if self._is_closing else 0)

    def _talk(self, socket: Any, monitor: Any) -> None:
        poller = zmq.Poller()
        poller.register(self._wake, zmq.POLLIN)
        poller.register(monitor, zmq.POLLIN)
        poller.register(socket, zmq.POLLIN)
        frames: Iterator[tuple[Kind, int, bytes] | None] = self._frames()
        # To connect and to be let in may take the time-out each. ZeroMQ tells of no event where it
        # cannot open a socket.
        until = time.monotonic() + 2 * self._links.timeout_s
        while not self._is_closing:
            self._hear(socket)
            while monitor.poll(0):
                self._note_event(recv_monitor_message(monitor)["event"])
            if not self._is_welcome and time.monotonic() > until:
                raise _not_let_in()
            poller.poll(int(1000 * self._ship(socket, frames)))
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._wake)
        self._send(socket, Kind.BYE, content=b"its worker has ended")

    def _note_event(self, event: int) -> None:
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._is_welcome = True
            return
        if self._is_welcome:
            raise FrameError(
                f"its connection has ended, or it was silent for {self._links.timeout_s:g} s "
                "(INSPECT_LENS_HOSTS_TIMEOUT_S)"
            )
        raise _not_let_in()

    def _ship(self, socket: Any, frames: Iterator[tuple[Kind, int, bytes] | None]) -> float:
        """Send what can be sent; returns the seconds after which to look again."""
        if not self._is_welcome:
            return min(_IDLE_S, self._links.timeout_s)
        while self._n_sent < self._n_taken + IN_FLIGHT:
            if self._answers:
                self._send(socket, Kind.BOARD, content=self._answers.popleft())
                continue
            if (frame := next(frames)) is None:
                return _LOOK_S if self._waiting else _IDLE_S
            self._send(socket, *frame)
        return _IDLE_S

    def _frames(self) -> Iterator[tuple[Kind, int, bytes] | None]:
        """What to send, for ever; None where there is nothing yet."""
        while True:
            if not self._waiting:
                yield None
                continue
            data, message = self._waiting[0]
            landed = 0
            if isinstance(message, Block):
                yield from self._rows(message)
                landed = min(message.seq, int(self._arena.view.landed[0]))
            # What was revoked must be known before anything else lies in its place.
            if (revoked := int(self._arena.view.revoked[self._reader])) > self._revoked:
                self._revoked = revoked
                yield Kind.REVOKED, revoked, b""
            for at in range(0, max(len(data), 1), CHUNK):
                is_last = at + CHUNK >= len(data)
                kind = Kind.MESSAGE if is_last else Kind.PART
                yield kind, landed if is_last else 0, data[at : at + CHUNK]
            if self._waiting:
                self._waiting.popleft()
            self._room.set()

    def _rows(self, block: Block) -> Iterator[tuple[Kind, int, bytes] | None]:
        view, until = self._arena.view, time.monotonic() + _LANDING_S
        while view.landed[0] < block.seq:
            if time.monotonic() > until:
                return
            yield None
        size = math.prod(block.shape) * _ITEM_BYTES[block.dtype]
        for at in range(block.offset, block.offset + size, CHUNK):
            content = view.data[at : min(at + CHUNK, block.offset + size)].tobytes()
            # Asked when they were copied: else they may be somebody else's.
            if view.revoked[self._reader] >= block.seq:
                return
            yield Kind.DATA, at, content

    def _hear(self, socket: Any) -> None:
        for _ in range(_BURST):
            try:
                parts = socket.recv_multipart(flags=zmq.NOBLOCK)
            except zmq.Again:
                return
            self._accept(frame_of(parts))

    def _accept(self, frame: Frame) -> None:
        if frame.kind == Kind.TAKEN:
            cursors = self._arena.view.cursors
            cursors[self._reader] = max(int(cursors[self._reader]), frame.number)
        elif frame.kind == Kind.CREDIT:
            self._n_taken = min(frame.number, self._n_sent)
        elif frame.kind == Kind.ASK:
            numbers = unpacked(bytes(frame.content))
            if len(numbers) > MOST_ASKED:
                raise FrameError(f"it asked for {len(numbers)} records at once")
            records = self._arena.view.board[numbers % BOARD_SIZE]
            both = np.concatenate((numbers[:, None], records), axis=1)
            self._answers.append(both.astype("<i8").tobytes())
        elif frame.kind == Kind.BYE:
            raise FrameError(str(bytes(frame.content[:500]), "utf-8", "replace"))
        else:
            raise FrameError(f"a front-end sends no {frame.kind.name}")

    def _send(self, socket: Any, kind: Kind, number: int = 0, content: bytes = b"") -> None:
        self._n_sent += 1
        # Where its connection has ended there is no room, and the monitor tells of it next.
        with contextlib.suppress(zmq.Again):
            socket.send_multipart(packed_frame(kind, number, content), flags=zmq.NOBLOCK)


def _not_let_in() -> FrameError:
    return FrameError(
        "it did not let this host in; see whether this host can open connections to it, and "
        "whether INSPECT_LENS_HOSTS_KEY is the same on all hosts"
    )
