"""Takes what workers of other hosts send, and puts it where the collector reads.

Bytes of rows go to a copy of the worker's memory (`Mirror`), and messages to the collector's own
socket, so that it need not know of hosts. One thread does that. While the collector's socket is
full, this thread takes nothing in, and workers keep what they have: see `IN_FLIGHT` in `link.py`.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import math
import mmap
import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import zmq
from numpy.typing import NDArray
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils.monitor import recv_monitor_message

from inspect_lens._engine.export.link import (
    MOST_ASKED,
    Frame,
    FrameError,
    Hello,
    Kind,
    client_public,
    frame_of,
    make_server,
    packed_frame,
)
from inspect_lens._engine.protocol.messages import (
    BOARD_COLUMNS,
    BOARD_SIZE,
    HEAD_BYTES,
    ArenaReader,
    View,
)
from inspect_lens._engine.protocol.processes import BEATS, Links
from inspect_lens.errors import CapacityError

_COLUMNS = 1 + BOARD_COLUMNS
"""Of what is told of the board: the request, and its record."""


class Mirror(ArenaReader):
    """Looks to the collector as the worker's memory does; filled by the listener's thread.

    The board is asked for: tokens of a request come another way than its records, so those that
    were read before the request ended may lack what its last steps did.
    """

    def __init__(self, hello: Hello, wake: Callable[[], None]) -> None:
        self.name, self.nbytes = hello.worker, hello.nbytes
        self.view = View(mmap.mmap(-1, HEAD_BYTES + hello.nbytes))
        self._reader, self._wake = hello.reader, wake
        self.is_lost = False
        self._lock = threading.Lock()
        self._to_ask: deque[int] = deque()
        self._told: dict[int, bool] = {}
        """By request that was asked for: whether it was answered."""
        self._told_cursor = 0

    @property
    def is_alive(self) -> bool:
        return not self.is_lost

    def lose(self) -> None:
        """Take note that the worker has gone."""
        self.is_lost = True

    def is_told(self, number: int) -> bool:
        """See `ArenaReader.is_told`; asks for a request when first called."""
        with self._lock:
            if (told := self._told.get(number)) is None:
                self._told[number] = told = False
                self._to_ask.append(number)
                self._wake()
            return told

    def ask_again(self, number: int) -> None:
        with self._lock:
            if self._told.get(number):
                del self._told[number]

    def forget(self, number: int) -> None:
        with self._lock:
            self._told.pop(number, None)

    def done(self, reader: int, seq: int) -> None:
        super().done(self._reader, seq)
        self._wake()

    def cursor(self, is_due: bool) -> int | None:
        """What the worker has to be told of the cursor; None where it knows, and it is not due."""
        now = int(self.view.cursors[self._reader])
        if now == self._told_cursor and not is_due:
            return None
        self._told_cursor = now
        return now

    def asked(self) -> bytes:
        """Numbers of requests to ask the worker for; empty where there are none."""
        with self._lock:
            n = min(len(self._to_ask), MOST_ASKED)
            numbers = [self._to_ask.popleft() for _ in range(n)]
        return np.asarray(numbers, dtype="<i8").tobytes()

    def write(self, offset: int, content: memoryview) -> None:
        if not 0 <= offset <= offset + len(content) <= self.nbytes:
            raise FrameError(f"{len(content)} bytes at {offset} lie outside of the worker's memory")
        self.view.data[offset : offset + len(content)] = np.frombuffer(content, dtype=np.uint8)

    def land(self, seq: int) -> None:
        """Take note that rows are whole."""
        self.view.landed[0] = max(seq, int(self.view.landed[0]))

    def revoke(self, seq: int) -> None:
        """Take note that blocks will be overwritten."""
        revoked = self.view.revoked
        revoked[self._reader] = max(seq, int(revoked[self._reader]))

    def note(self, content: memoryview) -> None:
        """Take note of records that were asked for."""
        if len(content) % (8 * _COLUMNS):
            raise FrameError(f"{len(content)} bytes are no records of the board")
        both: NDArray[np.int64] = np.frombuffer(content, dtype="<i8").reshape(-1, _COLUMNS)
        self.view.board[both[:, 0] % BOARD_SIZE] = both[:, 1:]
        with self._lock:
            for number in both[:, 0].tolist():
                if number in self._told:
                    self._told[number] = True


logger = logging.getLogger("vllm.inspect_lens")

_BURST = 64
"""Frames that are taken in before workers are answered."""
_FORWARDED = 64
"""Messages that wait for the collector, at most, beside those in its own socket."""
_REFUSALS = (
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    # Where the other end saw first that it does not fit.
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)
_REFUSALS_S = 60.0
"""Between two lines about those who were refused."""
_BIND = re.compile(r"(?P<host>\[[\da-fA-F:]+\]|[^:\[\]]+)(:(?P<first>\d+)(-(?P<last>\d+))?)?")
_PORTS = (49152, 65535)


@dataclass(slots=True)
class _Worker:
    """A worker at the other end."""

    identity: bytes
    mirror: Mirror
    parts: list[bytes] = field(default_factory=list)
    """Of a message that goes on."""
    n_bytes: int = 0
    n_taken: int = 0
    """Frames."""
    n_credited: int = 0
    """Of these, those that the worker knows of."""


class _Secret:
    """Lets those in who have the key pair that is made of the secret."""

    def __init__(self, key: str) -> None:
        self._public = client_public(key)

    def callback(self, domain: str, key: bytes) -> bool:
        """As pyzmq asks for it."""
        return hmac.compare_digest(key, self._public)


def parse_bind(text: str) -> tuple[str, tuple[int, int]]:
    """An IP address and ports out of `10.0.0.1`, `10.0.0.1:7000-7010` or `[fd00::1]:7000`."""
    found = _BIND.fullmatch(text)
    first, last = (found["first"], found["last"]) if found else (None, None)
    ports = (int(first), int(last or first)) if first else _PORTS
    if found is None or not 0 < ports[0] <= ports[1] < 65536:
        raise ValueError(
            f"INSPECT_LENS_HOSTS_ADDRESS={text!r}: give an IP address of this host, with ports if "
            "a firewall needs them, such as '10.0.0.1' or '10.0.0.1:7000-7010'"
        )
    return found["host"], ports


class Listener:
    """Receives from workers of other hosts."""

    def __init__(
        self,
        links: Links,
        forward: str,
        *,
        lost: Callable[[Mirror, str], None],
        told: Callable[[], None],
        came: Callable[[], None],
    ) -> None:
        self._links, self._lost, self._told, self._came = links, lost, told, came
        self._workers: dict[bytes, _Worker] = {}
        self._mirrors: dict[str, Mirror] = {}
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._is_closing = False
        self._look_s, self._looks = links.timeout_s / BEATS, 0.0
        """Seconds between two sends to every worker, and the time of the next: a ROUTER says only
        when it sends that a peer has gone."""
        self._context = zmq.Context()
        self._authenticator: Any = None
        if links.key:
            self._authenticator = ThreadAuthenticator(self._context)
            self._authenticator.start()
            self._authenticator.configure_curve_callback("*", _Secret(links.key))
        self._socket: Any = self._context.socket(zmq.ROUTER)
        make_server(self._socket, links)
        self._refusals: Any = self._socket.get_monitor_socket(_REFUSALS)
        self._told_of_refusals = -math.inf
        self.address = self._bind()
        self._forward: Any = self._context.socket(zmq.PUSH)
        self._forward.setsockopt(zmq.LINGER, 0)
        self._forward.setsockopt(zmq.SNDHWM, _FORWARDED)
        self._forward.setsockopt(zmq.SNDTIMEO, 100)
        self._forward.connect(forward)
        self._thread = threading.Thread(target=self._run, name="inspect-lens-hosts", daemon=True)
        self._thread.start()

    def mirror(self, name: str) -> Mirror | None:
        """The memory of a worker of another host, by name."""
        return self._mirrors.get(name)

    def close(self) -> None:
        """Say goodbye, and end the thread; safe to call twice."""
        if self._is_closing:
            return
        self._is_closing = True
        self.wake()
        self._thread.join(timeout=2)
        self._end(linger=200)
        if not self._thread.is_alive():
            os.close(self._wake)

    def wake(self) -> None:
        """Have the thread look what to send."""
        with contextlib.suppress(OSError):
            os.eventfd_write(self._wake, 1)

    def _end(self, linger: int) -> None:
        # One whose thread has died would be waited for without end.
        if self._authenticator is not None and self._authenticator.is_alive():
            self._authenticator.stop()
        self._context.destroy(linger=linger)

    def _bind(self) -> str:
        host, (first, last) = parse_bind(self._links.address)
        try:
            port = self._socket.bind_to_random_port(
                f"tcp://{host}", min_port=first, max_port=last + 1, max_tries=200
            )
        except zmq.ZMQError as error:
            self._end(linger=0)
            raise CapacityError(
                f"INSPECT_LENS_HOSTS_ADDRESS={self._links.address!r}: no port could be opened "
                f"there: {error}; is it an address of this host, and are ports free?"
            ) from error
        return f"tcp://{host}:{port}"

    def _run(self) -> None:
        poller = zmq.Poller()
        for one in (self._wake, self._refusals, self._socket):
            poller.register(one, zmq.POLLIN)
        while not self._is_closing:
            try:
                poller.poll(int(1000 * self._look_s))
                self._turn()
            except BaseException:  # the thread must outlive it: it serves all workers
                logger.exception("inspect_lens: workers of other hosts could not be served")
        for worker in list(self._workers.values()):
            self._send(worker.identity, Kind.BYE, content=b"its process has ended")

    def _turn(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)
        while self._refusals.poll(0):
            recv_monitor_message(self._refusals)
            self._tell_of_refusal()
        for _ in range(_BURST):
            try:
                identity, *parts = self._socket.recv_multipart(flags=zmq.NOBLOCK, copy=False)
            except zmq.Again:
                break
            self._take(identity.bytes, [part.buffer for part in parts])
        self._serve()

    def _tell_of_refusal(self) -> None:
        if (now := time.monotonic()) > self._told_of_refusals + _REFUSALS_S:
            self._told_of_refusals = now
            logger.error(
                "inspect_lens: somebody who connected to %s was refused: it is no worker of this "
                "release, or its INSPECT_LENS_HOSTS_KEY is another one",
                self.address,
            )

    def _take(self, identity: bytes, parts: list[memoryview]) -> None:
        worker = self._workers.get(identity)
        try:
            frame = frame_of(parts)
            if worker is None:
                self._welcome(identity, frame)
            else:
                worker.n_taken += 1
                self._accept(worker, frame)
        except (FrameError, msgspec.MsgspecError) as error:
            logger.error("inspect_lens: a worker of another host is not listened to: %s", error)
            self._send(identity, Kind.BYE, content=str(error).encode()[:500])
            self._drop(identity, f"it sent what it should not have: {error}")

    def _welcome(self, identity: bytes, frame: Frame) -> None:
        if frame.kind != Kind.HELLO:
            raise FrameError("nothing is known of it, and it has to begin anew")
        hello = msgspec.msgpack.decode(frame.content, type=Hello)
        if not 0 <= hello.nbytes <= self._links.most_bytes or not 0 <= hello.reader < 256:
            raise FrameError(
                f"it has {hello.nbytes} bytes of memory for rows, and INSPECT_LENS_SHM_BYTES is "
                f"{self._links.most_bytes} here"
            )
        for other in list(self._workers.values()):
            if other.mirror.name == hello.worker:
                self._drop(other.identity, "its link was made anew")
        mirror = self._mirrors[hello.worker] = Mirror(hello, self.wake)
        self._workers[identity] = _Worker(identity, mirror, n_taken=1)
        self._came()

    def _accept(self, worker: _Worker, frame: Frame) -> None:
        mirror = worker.mirror
        match frame.kind:
            case Kind.DATA:
                mirror.write(frame.number, frame.content)
            case Kind.PART | Kind.MESSAGE:
                self._collect(worker, frame)
            case Kind.REVOKED:
                mirror.revoke(frame.number)
            case Kind.BOARD:
                mirror.note(frame.content)
                self._told()
            case Kind.BYE:
                self._drop(worker.identity, str(bytes(frame.content[:500]), "utf-8", "replace"))
            case _:
                raise FrameError(f"a worker sends no {frame.kind.name}")

    def _collect(self, worker: _Worker, frame: Frame) -> None:
        worker.n_bytes += len(frame.content)
        if worker.n_bytes > self._links.most_message:
            raise FrameError(
                f"a message of more than {self._links.most_message} bytes, which is the limit here"
            )
        worker.parts.append(bytes(frame.content))
        if frame.kind == Kind.MESSAGE:
            message = b"".join(worker.parts)
            worker.parts, worker.n_bytes = [], 0
            worker.mirror.land(frame.number)
            self._pass_on(message)

    def _pass_on(self, message: bytes) -> None:
        while not self._is_closing:
            with contextlib.suppress(zmq.Again):
                self._forward.send(message)
                return

    def _serve(self) -> None:
        """Tell workers what they have to know, and see who has gone."""
        is_due = (now := time.monotonic()) >= self._looks
        for worker in list(self._workers.values()):
            cursor = worker.mirror.cursor(is_due)
            if cursor is not None:
                self._send(worker.identity, Kind.TAKEN, cursor)
            if worker.n_taken > worker.n_credited:
                worker.n_credited = worker.n_taken
                self._send(worker.identity, Kind.CREDIT, worker.n_taken)
            while numbers := worker.mirror.asked():
                self._send(worker.identity, Kind.ASK, content=numbers)
        if is_due:
            self._looks = now + self._look_s

    def _send(self, identity: bytes, kind: Kind, number: int = 0, content: bytes = b"") -> None:
        parts = [identity, *packed_frame(kind, number, content)]
        try:
            self._socket.send_multipart(parts, flags=zmq.NOBLOCK)
        except zmq.ZMQError as error:
            # It has taken none of the last thousand frames, or is no longer connected.
            seconds = f"{self._links.timeout_s:g}"
            self._drop(
                identity,
                f"its connection has ended, or it was silent for {seconds} s "
                f"(INSPECT_LENS_HOSTS_TIMEOUT_S): {error}",
            )

    def _drop(self, identity: bytes, why: str) -> None:
        if (worker := self._workers.pop(identity, None)) is None:
            return
        mirror = worker.mirror
        mirror.lose()
        if self._mirrors.get(mirror.name) is mirror:
            del self._mirrors[mirror.name]
        logger.error("inspect_lens: a worker of another host has gone: %s", why)
        self._lost(mirror, why)
