"""A worker and a front-end that share no memory: two processes, and TCP between them."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from inspect_lens._engine.collect.listener import Listener, Mirror, parse_bind
from inspect_lens._engine.export.link import (
    MOST_FRAME,
    Frame,
    Hello,
    Kind,
    frame_of,
    make_client,
    make_server,
    packed_frame,
)
from inspect_lens._engine.protocol.messages import BOARD_COLUMNS, Block, Failure, Message, decode
from inspect_lens._engine.protocol.processes import Links
from tests.kit.far_worker import FarWorker, block_bytes
from tests.kit.waiting import until

KEY = "a secret of two hosts"
LINKS = Links(address="127.0.0.1", key=KEY, timeout_s=1.5, most_bytes=1 << 16, most_message=1 << 16)
PAGE = 4096


@dataclass
class FrontEnd:
    """A listener, and the socket of a collector behind it."""

    folder: Path
    links: Links = LINKS
    lost: list[tuple[Mirror, str, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._context = zmq.Context()
        self.socket: Any = self._context.socket(zmq.PULL)
        self.socket.setsockopt(zmq.RCVHWM, 4)
        address = f"ipc://{self.folder}/rows"
        self.socket.bind(address)
        self.listener = Listener(
            self.links,
            address,
            lost=lambda mirror, why: self.lost.append((mirror, why)),
            told=lambda: None,
            came=lambda: None,
        )
        self.address = self.listener.address

    def take(self, timeout_s: float = 10.0) -> Message | None:
        return decode(self.socket.recv()) if self.socket.poll(int(1000 * timeout_s)) else None

    def close(self) -> None:
        self.listener.close()
        self._context.destroy(linger=0)


@pytest.fixture
def front(tmp_path: Path) -> Iterator[FrontEnd]:
    made = FrontEnd(tmp_path)
    yield made
    made.close()


@pytest.fixture(scope="module")
def far() -> Iterator[FarWorker]:
    made = FarWorker()
    yield made
    made.close()


def read(mirror: Mirror, block: Block) -> np.ndarray[Any, Any]:
    nbytes = 4 * int(np.prod(block.shape))
    return mirror.view.data[block.offset : block.offset + nbytes].copy()


ORDERS = st.lists(
    st.tuples(st.just("block"), st.integers(0, 99), st.integers(1, 4 * PAGE // 4))
    | st.tuples(st.just("message"), st.integers(0, 99), st.integers(0, 5000)),
    max_size=40,
)


@settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(orders=ORDERS, pages=st.integers(4, 16))
def test_what_is_sent_arrives_once_in_order_and_whole(
    tmp_path: Path, far: FarWorker, orders: list[tuple[str, int, int]], pages: int
) -> None:
    """Of a memory so small that blocks lie where others did that were taken."""
    front = FrontEnd(tmp_path)
    try:
        name = far.begin(front.address, LINKS, pages * PAGE)
        far.tell("send", orders)
        for kind, seed, size in orders:
            message = front.take()
            if kind == "message":
                assert message == Failure(str(seed), "CaptureError", "x" * size)
                continue
            assert isinstance(message, Block)
            mirror = front.listener.mirror(name)
            assert mirror is not None
            assert mirror.has_landed(message.seq)
            np.testing.assert_array_equal(read(mirror, message), block_bytes(seed, 4 * size))
            mirror.done(message.reader, message.seq)
        assert far.pipe.recv() == [True] * len(orders)
        assert front.take(0.02) is None
        assert until(lambda: far.ask("held")[1] == 0), "what was taken is not free again"
        assert not front.lost
        far.ask("end")
    finally:
        front.close()


@pytest.mark.parametrize("key", ["", "another secret of hosts"], ids=["no", "another"])
def test_who_does_not_know_the_secret_is_not_listened_to(
    front: FrontEnd, far: FarWorker, key: str, caplog: pytest.LogCaptureFixture
) -> None:
    name = far.begin(front.address, replace(LINKS, key=key))
    far.send([("block", 1, 10)])
    assert front.take(0.3) is None
    assert until(lambda: "INSPECT_LENS_HOSTS_KEY is another one" in caplog.text)
    assert front.listener.mirror(name) is None
    assert not far.ask("alive", 3 * LINKS.timeout_s), "it must be told, as the time-out says"
    far.ask("end")


def test_a_memory_that_is_larger_than_the_front_ends_limit_is_refused(
    front: FrontEnd, far: FarWorker
) -> None:
    name = far.begin(front.address, LINKS, 2 * LINKS.most_bytes)
    assert not far.ask("alive", LINKS.timeout_s / 2)
    assert front.listener.mirror(name) is None
    far.ask("end")


class Raw:
    """A worker that sends what it likes."""

    def __init__(self, address: str) -> None:
        self._context = zmq.Context()
        self.socket: Any = self._context.socket(zmq.DEALER)
        make_client(self.socket, LINKS, address)
        self.socket.connect(address)
        hello = Hello("1/2/3", PAGE, 0)
        self.send(Kind.HELLO, content=msgspec.msgpack.encode(hello))

    def send(self, kind: Kind, number: int = 0, content: bytes = b"") -> None:
        self.socket.send_multipart(packed_frame(kind, number, content))

    def hear(self) -> Frame:
        assert self.socket.poll(5000)
        return frame_of(self.socket.recv_multipart())

    def farewell(self) -> str:
        while (frame := self.hear()).kind in (Kind.TAKEN, Kind.CREDIT):
            pass
        assert frame.kind == Kind.BYE
        return bytes(frame.content).decode()

    def close(self) -> None:
        self._context.destroy(linger=0)


@pytest.fixture
def raw(front: FrontEnd) -> Iterator[Raw]:
    made = Raw(front.address)
    yield made
    made.close()


def test_a_message_above_the_limit_ends_the_link(front: FrontEnd, raw: Raw) -> None:
    for _ in range(2):
        raw.send(Kind.PART, content=bytes(LINKS.most_message))
    assert "limit" in raw.farewell()
    assert until(lambda: front.lost)
    assert "limit" in front.lost[0][1]


@pytest.mark.parametrize(
    ("offset", "nbytes"), [(PAGE - 1, 2), (-1, 1), (1 << 40, 1), (0, PAGE + 1)]
)
def test_bytes_outside_of_the_memory_end_the_link(
    front: FrontEnd, raw: Raw, offset: int, nbytes: int
) -> None:
    raw.send(Kind.DATA, offset, bytes(nbytes))
    assert "outside" in raw.farewell()


def test_a_frame_above_the_limit_is_not_taken_in(front: FrontEnd, raw: Raw) -> None:
    head, _ = packed_frame(Kind.DATA)
    raw.socket.send_multipart([head, bytes(MOST_FRAME + 1)])
    assert until(lambda: front.lost), "the connection is cut"


@pytest.mark.parametrize(
    "parts", [[b"GET / HTTP/1.1"], [packed_frame(Kind.BYE)[0].replace(b"\2", b"\77"), b""]]
)
def test_what_is_no_frame_ends_the_link(front: FrontEnd, raw: Raw, parts: list[bytes]) -> None:
    raw.socket.send_multipart(parts)
    assert "no frame" in raw.farewell()
    assert until(lambda: front.lost)
    raw.send(Kind.MESSAGE)
    assert "anew" in raw.farewell(), "what follows is missing something"
    assert front.take(0.05) is None


@pytest.mark.parametrize("how", [signal.SIGSTOP, signal.SIGKILL], ids=["silent", "gone"])
def test_a_worker_that_vanishes_is_known_to_have_gone_in_time(
    front: FrontEnd, how: signal.Signals
) -> None:
    worker = FarWorker()
    try:
        name = worker.begin(front.address, LINKS)
        assert until(lambda: front.listener.mirror(name))
        mirror = front.listener.mirror(name)
        time.sleep(1.5 * LINKS.timeout_s)
        assert not front.lost, "signs of life keep a link that is idle"
        os.kill(worker.pid, how)
        assert until(lambda: front.lost)
        (lost, why) = front.lost[0]
        assert lost is mirror
        assert mirror.is_lost
        assert not mirror.is_alive
        assert "silent" in why
        assert front.listener.mirror(name) is None
    finally:
        worker.close()


def test_a_front_end_whose_interpreter_is_busy_keeps_its_links(
    front: FrontEnd, far: FarWorker
) -> None:
    """ZeroMQ's thread answers for it, as long as no frame waits in front of a heartbeat."""
    name = far.begin(front.address, LINKS)
    assert until(lambda: front.listener.mirror(name))
    every, busy_until = sys.getswitchinterval(), time.monotonic() + 2.5 * LINKS.timeout_s
    far.tell("send", [("message", seed, 50_000) for seed in range(100)])
    sys.setswitchinterval(1000)
    try:
        while time.monotonic() < busy_until:
            pass
    finally:
        sys.setswitchinterval(every)
    assert [front.take().key for _ in range(100)] == [str(seed) for seed in range(100)]  # type: ignore[union-attr]
    assert far.pipe.recv() == [True] * 100
    assert far.ask("alive", 0.1)
    assert not front.lost
    far.ask("end")


def pump(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            target.sendall(data)


def test_a_connection_that_breaks_is_not_made_again(front: FrontEnd, far: FarWorker) -> None:
    """What was under way is lost, so what comes behind it must not be taken for the next."""
    host, port = front.address.removeprefix("tcp://").rsplit(":", 1)
    with socket.create_server((host, 0)) as server:
        far.begin(f"tcp://{host}:{server.getsockname()[1]}", LINKS)
        worker, _ = server.accept()
        listener = socket.create_connection((host, int(port)))
        for pair in ((worker, listener), (listener, worker)):
            threading.Thread(target=pump, args=pair, daemon=True).start()
        assert far.send([("message", 1, 10)]) == [True]
        assert front.take()
        for end in (worker, listener):
            end.shutdown(socket.SHUT_RDWR)
            end.close()
        assert not far.ask("alive", LINKS.timeout_s / 2), "it need not be silent first"
        assert until(lambda: front.lost)
        assert far.send([("message", 2, 10)]) == [False]
        server.settimeout(0.3)
        with pytest.raises(TimeoutError):
            server.accept()
    far.ask("end")


def listen(pipe: Connection) -> None:
    """A front-end that lets workers in and says nothing."""
    router: Any = zmq.Context().socket(zmq.ROUTER)
    make_server(router, LINKS)
    pipe.send(router.bind_to_random_port("tcp://127.0.0.1"))
    assert router.poll(5000)
    pipe.send(True)
    time.sleep(60)


@pytest.mark.parametrize("how", [signal.SIGSTOP, signal.SIGKILL], ids=["silent", "gone"])
def test_a_front_end_that_vanishes_is_known_to_have_gone_in_time(
    far: FarWorker, how: signal.Signals
) -> None:
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    process = context.Process(target=listen, args=(theirs,))
    process.start()
    try:
        far.begin(f"tcp://127.0.0.1:{pipe.recv()}", LINKS)
        assert pipe.recv()
        assert far.ask("alive", 1.5 * LINKS.timeout_s), "nothing has to be said"
        assert process.pid is not None
        os.kill(process.pid, how)
        assert not far.ask("alive", 50)
        assert far.send([("message", 1, 1)]) == [False]
        far.ask("end")
    finally:
        process.kill()
        process.join()


def test_a_front_end_that_takes_no_rows_bounds_what_is_under_way(front: FrontEnd) -> None:
    """And loses its own, as one of the same host does, after the same time."""
    stalled_s = 1.0
    worker = FarWorker(STALLED_S=stalled_s)
    try:
        name = worker.begin(front.address, LINKS, 4 * PAGE)
        # Each fills the half; the third one needs the room of the first.
        sent = worker.send([("block", seed, 2 * PAGE // 4) for seed in range(4)])
        assert sent == [True, True, False, False]
        most, _, waited = worker.ask("held")
        assert most <= 4 * PAGE
        assert stalled_s <= waited < 30, "not until nothing comes free"
        mirror = front.listener.mirror(name)
        assert mirror is not None
        assert mirror.nbytes == 4 * PAGE
        # It finds out when it goes on, and then all is as before.
        for _ in range(2):
            block = front.take()
            assert isinstance(block, Block)
        # What came first was whole; that it may be something else by now comes with the next one.
        mirror.done(0, 2)
        assert until(lambda: worker.ask("held")[1] == 0)
        # On a busy machine the worker may hear of it only after its time-out.
        assert until(lambda: worker.send([("block", 7, 2 * PAGE // 4)]) == [True])
        block = front.take()
        assert isinstance(block, Block)
        assert mirror.is_revoked(0, 2)
        assert not mirror.is_revoked(0, block.seq)
        np.testing.assert_array_equal(read(mirror, block), block_bytes(7, 2 * PAGE))
    finally:
        worker.close()


def test_a_collector_that_takes_no_messages_bounds_how_many_wait(front: FrontEnd) -> None:
    worker = FarWorker(SEND_QUEUE=64)
    try:
        worker.begin(front.address, LINKS)
        taken = sum(sum(worker.send([("message", seed, 50_000)] * 20)) for seed in range(100))
        assert 64 <= taken < 1000, "2000 were offered"
        # None of those that were taken is lost.
        for _ in range(taken):
            assert isinstance(front.take(), Failure)
        assert front.take(0.1) is None
    finally:
        worker.close()


NOTHING = [0] * BOARD_COLUMNS


def test_the_board_is_asked_for_when_a_request_is_over(front: FrontEnd, far: FarWorker) -> None:
    first, second = NOTHING.copy(), NOTHING.copy()
    first[:5], second[:5] = [1, 5, 9, 1, 0], [1, 5, 12, 1, 1]
    first[-1], second[-1] = 0, 8
    name = far.begin(front.address, LINKS)
    assert until(lambda: front.listener.mirror(name))
    mirror = front.listener.mirror(name)
    assert mirror is not None
    far.ask("board", [NOTHING, first])
    assert not mirror.is_told(1)
    assert until(lambda: mirror.is_told(1))
    assert mirror.view.board[1].tolist() == first
    far.ask("board", [NOTHING, second])
    assert mirror.is_told(1)
    assert mirror.view.board[1, 2] == 9, "nobody has asked again"
    mirror.ask_again(1)
    assert until(lambda: mirror.is_told(1))
    assert mirror.view.board[1].tolist() == second
    mirror.forget(1)
    assert not mirror.is_told(1)
    far.ask("end")


@pytest.mark.parametrize(
    ("text", "host", "ports"),
    [
        ("10.0.0.1", "10.0.0.1", None),
        ("10.0.0.1:7000", "10.0.0.1", (7000, 7000)),
        ("10.0.0.1:7000-7010", "10.0.0.1", (7000, 7010)),
        ("[fd00::1]:7000-7001", "[fd00::1]", (7000, 7001)),
        ("[fd00::1]", "[fd00::1]", None),
    ],
)
def test_addresses(text: str, host: str, ports: tuple[int, int] | None) -> None:
    found = parse_bind(text)
    assert found[0] == host
    assert ports in (None, found[1])


@pytest.mark.parametrize("text", ["10.0.0.1:", "10.0.0.1:x", "10.0.0.1:9-8", ":7000", "a:70000"])
def test_addresses_that_are_none_are_named(text: str) -> None:
    with pytest.raises(ValueError, match="INSPECT_LENS_HOSTS_ADDRESS"):
        parse_bind(text)
