"""A front-end that is stopped, and workers that wait for one another, hold nobody else up."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pytest

from inspect_lens import CaptureSpec, LensRequest
from inspect_lens._engine.collect.collector import Collector
from inspect_lens._engine.export.transport import Copier
from inspect_lens._engine.protocol.messages import ROWS, SCORES, Envelope, seal
from inspect_lens._engine.protocol.processes import STALLED_S, STOPPED_S
from inspect_lens.errors import CapacityError, LensError
from tests.kit.steps import FACTS, LAYERS, Worker, begin, exporter, rows, sealed

ALL = LensRequest(capture=CaptureSpec(layers=LAYERS))
N = 300
PAGES = 16


def serve(pipe: Connection) -> None:
    """A front-end process: opens requests, and takes their rows."""
    collector = Collector()
    pipe.send((collector.address, os.getpid()))
    while (order := pipe.recv()) is not None:
        key, packed = order
        if packed is not None:
            collector.open(key, Envelope.unpack(packed))
            pipe.send(None)
            continue
        try:
            got = collector.take(key, counts={ROWS: N, SCORES: 0}, n_fed=N, timeout_s=10)
            pipe.send(got.tensors[ROWS].storage)
        except LensError as error:
            pipe.send(error)
    collector.close()


class FrontEnd:
    """A front-end in a process of its own."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, other = context.Pipe()
        self._process = context.Process(target=serve, args=(other,), daemon=True)
        self._process.start()
        self.address, self.pid = self.pipe.recv()

    def open(self, worker: Worker, key: str) -> None:
        envelope = seal(ALL, FACTS, reply=self.address, n_prompt=N, max_tokens=2)
        packed = {**envelope.pack(), "pid": self.pid}
        self.pipe.send((key, packed))
        self.pipe.recv()
        worker.stepper.add(key, packed)

    def take(self, key: str) -> Any:
        self.pipe.send((key, None))
        return self.pipe.recv()

    def close(self) -> None:
        os.kill(self.pid, signal.SIGCONT)
        self.pipe.send(None)
        self._process.join(10)
        self._process.kill()


@pytest.fixture(scope="module")
def front_ends() -> Iterator[list[FrontEnd]]:
    made = [FrontEnd(), FrontEnd()]
    yield made
    for one in made:
        one.close()


def expected(number: int) -> np.ndarray[Any, Any]:
    return np.stack([rows(number, layer, 0, N).numpy() for layer in LAYERS])


def test_a_stopped_front_end_loses_its_own_requests_only(front_ends: list[FrontEnd]) -> None:
    other, stopped = front_ends
    worker = Worker(exporter(PAGES * 4096))
    stopped.open(worker, "s1")
    worker.step([("s1", 1, 0, 30)])
    os.kill(stopped.pid, signal.SIGSTOP)
    for number in range(2, 5):
        key = f"o{number}"
        other.open(worker, key)
        for first in range(0, N, 15):
            parts = [(key, number, first, 15)]
            if number == 2 and 30 + first < N:
                parts.append(("s1", 1, 30 + first, 15))
            worker.step(parts)
        np.testing.assert_array_equal(other.take(key), expected(number))
        worker.stepper.remove(key)
    assert worker.stepper.arena.waited_s < 10 * STOPPED_S, "once, and then never again"
    assert worker.stepper.n_requests == 0
    os.kill(stopped.pid, signal.SIGCONT)
    assert isinstance(stopped.take("s1"), CapacityError)
    # It goes on as if nothing had been.
    stopped.open(worker, "s2")
    for first in range(0, N, 30):
        worker.step([("s2", 9, first, 30)])
    np.testing.assert_array_equal(stopped.take("s2"), expected(9))
    worker.stepper.close()


def test_a_short_stop_costs_nothing_while_there_is_room(front_ends: list[FrontEnd]) -> None:
    worker = Worker(exporter())
    front_ends[1].open(worker, "short")
    for first in range(0, N, 30):
        worker.step([("short", 3, first, 30)])
        os.kill(front_ends[1].pid, signal.SIGSTOP)
    os.kill(front_ends[1].pid, signal.SIGCONT)
    np.testing.assert_array_equal(front_ends[1].take("short"), expected(3))
    worker.stepper.close()


def test_requests_that_were_over_when_their_rows_were_revoked_fail_at_once(
    front_ends: list[FrontEnd],
) -> None:
    """The worker knows them no more, and so cannot tell that they have failed."""
    other, stopped = front_ends
    worker = Worker(exporter(PAGES * 4096))
    stopped.open(worker, "over")
    worker.step([("over", 1, 0, 2)])
    while worker.stepper.arena.bytes_in_use:
        time.sleep(0.01)
    os.kill(stopped.pid, signal.SIGSTOP)
    for first in range(2, 10, 2):
        worker.step([("over", 1, first, 2)])
    worker.stepper.remove("over")
    other.open(worker, "o")
    for first in range(0, N, 10):
        worker.step([("o", 2, first, 10)])
    assert worker.stepper.arena.view.revoked.any()
    np.testing.assert_array_equal(other.take("o"), expected(2))
    os.kill(stopped.pid, signal.SIGCONT)
    assert isinstance(stopped.take("over"), CapacityError)
    worker.stepper.close()


def test_rows_of_a_worker_are_taken_while_those_of_another_have_not_come(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a pipeline: the rows of one come when the other's step goes on, which needs room."""
    late, other = Worker(exporter(), layers=(0,)), Worker(exporter(2 * 4096), layers=(2, 5))
    copy = Copier.copy
    landing: list[int] = []

    def slow(self: Copier, tensor: Any, offset: int, seq: int, dtype: Any) -> None:
        before = int(self._view.landed[0])
        copy(self, tensor, offset, seq, dtype)
        if self._view is late.stepper.arena.view:
            landing.append(seq)
            self._view.landed[0] = before

    monkeypatch.setattr(Copier, "copy", slow)
    envelope = sealed(collector, ALL, N, 2)
    begin(late, collector, "k", envelope)
    other.stepper.add("k", dict(envelope.pack()))
    for first in range(0, N, 30):
        late.step([("k", 4, first, 30)])
        other.step([("k", 4, first, 30)])
    assert other.stepper.arena.waited_s < STALLED_S
    assert not collector.is_ready("k", counts={ROWS: N, SCORES: 0}, n_fed=N, settled=None)
    late.stepper.arena.view.landed[0] = landing[-1]
    got = collector.take("k", counts={ROWS: N, SCORES: 0}, n_fed=N, timeout_s=10)
    np.testing.assert_array_equal(got.tensors[ROWS].storage, expected(4))
    for worker in (late, other):
        worker.stepper.close()


def test_rows_for_which_there_is_no_room_fail_nobody_else(
    worker: Worker, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two groups of requests in one step, one of which leaves more than the memory takes."""
    large = LensRequest(capture=CaptureSpec(layers=LAYERS))
    small = LensRequest(capture=CaptureSpec(layers=(0,)))
    begin(worker, collector, "large", sealed(collector, large, 4, 2))
    begin(worker, collector, "small", sealed(collector, small, 4, 2))
    put = worker.stepper._sender.outbox.put

    def full(reply: str, sent: Any, path: Any) -> bool:
        if len(sent.tensor) == len(LAYERS):
            raise CapacityError("no room")
        return put(reply, sent, path)

    monkeypatch.setattr(worker.stepper._sender.outbox, "put", full)
    worker.step([("large", 1, 0, 4), ("small", 2, 0, 4)])
    counts = {ROWS: 4, SCORES: 0}
    got = collector.take("small", counts=counts, n_fed=4, timeout_s=5)
    np.testing.assert_array_equal(got.tensors[ROWS].storage[0], rows(2, 0, 0, 4).numpy())
    with pytest.raises(CapacityError, match="no room"):
        collector.take("large", counts=counts, n_fed=4, timeout_s=5)
