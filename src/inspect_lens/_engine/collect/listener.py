"""Takes what workers of other hosts send, and puts it where the collector reads.

Bytes of rows go to a copy of the worker's memory (`mirror.py`), and messages to the collector's own
socket, so that it need not know of hosts. One thread does that. While the collector's socket takes
nothing, no frames are taken either: they wait at their sender, whose memory is bounded.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import os
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import zmq

from inspect_lens._engine.protocol.frames import (
    IN_FLIGHT,
    MOST_FRAME,
    Frame,
    FrameError,
    Hello,
    Kind,
    Serial,
    client_public,
    make_server,
)
from inspect_lens._engine.protocol.hosts import Links
from inspect_lens.errors import CapacityError

from .mirror import Mirror

__all__ = ["Listener", "parse_bind"]

logger = logging.getLogger("vllm.inspect_lens")

_BURST = 64
"""Frames that are taken in before workers are answered."""
_FORWARDED = 64
"""Messages that wait for the collector, at most, beside those in its own socket."""
_BIND = re.compile(r"(?P<host>\[[\da-fA-F:]+\]|[^:\[\]]+)(:(?P<first>\d+)(-(?P<last>\d+))?)?")
_PORTS = (49152, 65535)


@dataclass(slots=True)
class _Worker:
    """A worker at the other end."""

    identity: bytes
    heard: float
    ours: Serial = field(default_factory=Serial)
    theirs: Serial = field(default_factory=Serial)
    mirror: Mirror | None = None
    """None until it has said who it is."""
    parts: list[bytes] = field(default_factory=list)
    """Of a message that goes on."""
    n_bytes: int = 0
    beat: float = 0.0
    cursor: int | None = None
    """That it has to be told."""


def parse_bind(text: str) -> tuple[str, tuple[int, int]]:
    """An IP address and ports out of `10.0.0.1`, `10.0.0.1:7000-7010` or `[fd00::1]:7000`.

    Raises:
        ValueError: the text is neither.
    """
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
        """Listen.

        Args:
            links: where, and the key.
            forward: address of the collector's socket.
            lost: called in the listener's thread for a worker that has gone, with the reason.
            told: called in the same thread when records of a board have come.
            came: called there for a worker that has begun.

        Raises:
            CapacityError: none of the ports is free.
            ValueError: see `parse_bind`.
        """
        self._links, self._lost, self._told, self._came = links, lost, told, came
        self._workers: dict[bytes, _Worker] = {}
        self._mirrors: dict[str, Mirror] = {}
        self._held: bytes | None = None
        """A message that the collector's socket has no room for."""
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._is_closing = False
        self._context = zmq.Context()
        self._zap: Any = self._context.socket(zmq.REP)
        self._zap.bind("inproc://zeromq.zap.01")
        self._socket: Any = self._context.socket(zmq.ROUTER)
        for option, value in (
            (zmq.LINGER, 0),
            (zmq.ROUTER_MANDATORY, 1),
            (zmq.RCVHWM, IN_FLIGHT),
            (zmq.MAXMSGSIZE, MOST_FRAME),
            (zmq.IPV6, int("[" in links.address)),
        ):
            self._socket.setsockopt(option, value)
        make_server(self._socket, links.key)
        self._public = client_public(links.key) if links.key else b""
        self.address = self._bind()
        self._forward: Any = self._context.socket(zmq.PUSH)
        self._forward.setsockopt(zmq.LINGER, 0)
        self._forward.setsockopt(zmq.SNDHWM, _FORWARDED)
        self._forward.connect(forward)
        self._thread = threading.Thread(target=self._run, name="inspect-lens-hosts", daemon=True)
        self._thread.start()

    def mirror(self, name: str) -> Mirror | None:
        """The memory of a worker of another host, by name."""
        return self._mirrors.get(name)

    def close(self) -> None:
        """Say goodbye, and end the thread."""
        self._is_closing = True
        self.wake()
        self._thread.join(timeout=2)
        self._context.destroy(linger=200)
        if not self._thread.is_alive():
            os.close(self._wake)

    def wake(self) -> None:
        """Have the thread look what to send."""
        with contextlib.suppress(OSError):
            os.eventfd_write(self._wake, 1)

    def _bind(self) -> str:
        host, (first, last) = parse_bind(self._links.address)
        try:
            port = self._socket.bind_to_random_port(
                f"tcp://{host}", min_port=first, max_port=last + 1, max_tries=200
            )
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise CapacityError(
                f"INSPECT_LENS_HOSTS_ADDRESS={self._links.address!r}: no port could be opened "
                f"there: {error}; is it an address of this host, and are ports free?"
            ) from error
        return f"tcp://{host}:{port}"

    def _run(self) -> None:
        poller = zmq.Poller()
        for source in (self._wake, self._zap):
            poller.register(source, zmq.POLLIN)
        while not self._is_closing:
            try:
                self._turn(poller)
            except BaseException:  # the thread must outlive it: it serves all workers
                logger.exception("inspect_lens: workers of other hosts could not be served")
        for worker in list(self._workers.values()):
            self._send(worker, Kind.BYE, content=b"its process has ended")

    def _turn(self, poller: zmq.Poller) -> None:
        if self._held is not None:
            self._pass_on(self._held)
        poller.register(self._socket, 0 if self._held is not None else zmq.POLLIN)
        pause = 0.005 if self._held is not None else self._links.beat_s / 2
        ready = dict(poller.poll(int(1000 * pause)))
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)
        if self._zap in ready:
            self._judge()
        for _ in range(_BURST):
            if self._held is not None:
                break
            try:
                identity, *parts = self._socket.recv_multipart(flags=zmq.NOBLOCK, copy=False)
            except zmq.Again:
                break
            self._take(identity.bytes, [part.buffer for part in parts])
        self._serve()

    def _judge(self) -> None:
        """Let those in who know the key: https://rfc.zeromq.org/spec/27/."""
        version, request, *_, credentials = self._zap.recv_multipart()
        is_known = hmac.compare_digest(credentials, self._public)
        if not is_known:
            logger.error("inspect_lens: somebody was refused who does not know the key of hosts")
        status = (b"200", b"OK") if is_known else (b"400", b"wrong INSPECT_LENS_HOSTS_KEY")
        self._zap.send_multipart([version, request, *status, b"", b""])

    def _take(self, identity: bytes, parts: list[memoryview]) -> None:
        now = time.monotonic()
        worker = self._workers.get(identity)
        if is_new := worker is None:
            worker = _Worker(identity, now)
        assert worker is not None
        try:
            frame = worker.theirs.unpack(parts)
            worker.heard = now
            if is_new:
                self._welcome(worker, frame)
            else:
                self._accept(worker, frame)
        except (FrameError, msgspec.MsgspecError) as error:
            logger.error("inspect_lens: a worker of another host is not listened to: %s", error)
            text = f"it has to begin anew: {error}" if is_new else str(error)
            self._send(worker, Kind.BYE, content=text.encode()[:500])
            self._drop(worker, f"it sent what it should not have: {error}")

    def _welcome(self, worker: _Worker, frame: Frame) -> None:
        if frame.kind != Kind.HELLO:
            raise FrameError("nothing is known of it")
        hello = msgspec.msgpack.decode(frame.content, type=Hello)
        if not 0 <= hello.nbytes <= self._links.most_bytes or not 0 <= hello.reader < 256:
            raise FrameError(
                f"it has {hello.nbytes} bytes of memory for rows, and INSPECT_LENS_SHM_BYTES is "
                f"{self._links.most_bytes} here"
            )
        for other in list(self._workers.values()):
            if other.mirror is not None and other.mirror.name == hello.worker:
                self._drop(other, "its link was made anew")
        worker.mirror = self._mirrors[hello.worker] = Mirror(hello, self.wake)
        self._workers[worker.identity] = worker
        self._send(worker, Kind.WELCOME)
        self._came()

    def _accept(self, worker: _Worker, frame: Frame) -> None:
        mirror = worker.mirror
        assert mirror is not None
        match frame.kind:
            case Kind.DATA:
                mirror.write(frame.number, frame.content)
            case Kind.PART | Kind.MESSAGE:
                self._collect(worker, mirror, frame)
            case Kind.REVOKED:
                mirror.revoke(frame.number)
            case Kind.BOARD:
                mirror.note(frame.content)
                self._told()
            case Kind.BYE:
                self._drop(worker, str(bytes(frame.content[:500]), "utf-8", "replace"))
            case Kind.BEAT:
                pass
            case _:
                raise FrameError(f"a worker sends no {frame.kind.name}")

    def _collect(self, worker: _Worker, mirror: Mirror, frame: Frame) -> None:
        worker.n_bytes += len(frame.content)
        if worker.n_bytes > self._links.most_message:
            raise FrameError(
                f"a message of more than {self._links.most_message} bytes, which is the limit here"
            )
        worker.parts.append(bytes(frame.content))
        if frame.kind == Kind.MESSAGE:
            message = b"".join(worker.parts)
            worker.parts, worker.n_bytes = [], 0
            mirror.land(frame.number)
            self._pass_on(message)

    def _pass_on(self, message: bytes) -> None:
        try:
            self._forward.send(message, flags=zmq.NOBLOCK)
            self._held = None
        except zmq.Again:
            self._held = message

    def _serve(self) -> None:
        """Tell workers what they have to know, and see who has gone."""
        now = time.monotonic()
        for worker in list(self._workers.values()):
            mirror = worker.mirror
            assert mirror is not None
            if (cursor := mirror.cursor()) is not None:
                self._send(worker, Kind.TAKEN, cursor)
            while numbers := mirror.asked():
                self._send(worker, Kind.ASK, content=numbers)
            if now >= worker.beat:
                worker.beat = now + self._links.beat_s
                self._send(worker, Kind.BEAT)
            # What waits here was not looked at: it counts as a sign of life.
            if self._held is None and now - worker.heard > self._links.timeout_s:
                seconds = f"{self._links.timeout_s:g}"
                self._drop(worker, f"it was silent for {seconds} s (INSPECT_LENS_HOSTS_TIMEOUT_S)")

    def _send(self, worker: _Worker, kind: Kind, number: int = 0, content: bytes = b"") -> None:
        parts = [worker.identity, *worker.ours.pack(kind, number, content)]
        try:
            self._socket.send_multipart(parts, flags=zmq.NOBLOCK)
        except zmq.ZMQError as error:
            # It is not connected any more, or takes nothing, of a thousand small frames.
            self._drop(worker, f"its connection has ended: {error}")

    def _drop(self, worker: _Worker, why: str) -> None:
        if self._workers.pop(worker.identity, None) is None:
            return
        mirror = worker.mirror
        assert mirror is not None
        mirror.lose()
        if self._mirrors.get(mirror.name) is mirror:
            del self._mirrors[mirror.name]
        logger.error("inspect_lens: a worker of another host has gone: %s", why)
        self._lost(mirror, why)
