"""Many rows leave bit by bit, few at once, and all of them before anybody waits for them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from inspect_lens import CaptureSpec, LensRequest
from inspect_lens._engine.collect.collector import Collector
from inspect_lens._engine.export.transport import Copier, Exporter
from inspect_lens._engine.protocol.messages import ROWS, SCORES, ArenaWriter, Block, seal
from inspect_lens._engine.step import exporter
from inspect_lens.errors import CapacityError
from inspect_lens.spec import EngineProbe
from tests.kit.steps import FACTS, HIDDEN, LAYERS, Worker, begin, rows
from tests.unit.engine.export.test_ring import LateCopier

ROW = HIDDEN * 4
N_PROMPT, MOST = 16, 60
NUMBERS = itertools.count(100)
PROBE = EngineProbe(layers=(2,), tensors={"weight": np.ones((1, HIDDEN))})


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """First tap and taps of each message; more than four rows wait, two at a time are sent."""
    monkeypatch.setattr(exporter, "_AT_ONCE", 4 * ROW)
    monkeypatch.setattr(exporter, "_PIECE", 20 * ROW)
    monkeypatch.setattr(exporter, "_MORE", 2 * ROW)
    found: list[tuple[int, int]] = []
    original = Exporter._send

    def send(self: Any, reply: str, message: Any) -> bool:
        if isinstance(message, Block):
            found.append((message.tap, message.shape[0]))
        return original(self, reply, message)

    monkeypatch.setattr(Exporter, "_send", send)
    return found


@pytest.fixture
def worker() -> Iterator[Worker]:
    """One whose ring need not be emptied for the next step."""
    arena = ArenaWriter(1 << 20)
    made = Worker(Exporter(arena, Copier(arena)), parts=32)
    yield made
    made.stepper.close()


def ask(worker: Worker, collector: Collector, key: str, **spec: Any) -> None:
    request = LensRequest(capture=CaptureSpec(**spec))
    start(worker, collector, key, request)


def start(worker: Worker, collector: Collector, key: str, request: LensRequest) -> None:
    worker.stepper.probes.add(PROBE)
    envelope = seal(
        request, FACTS, reply=collector.address, n_prompt=N_PROMPT, max_tokens=MOST,
        probes={"p": PROBE},
    )  # fmt: skip
    begin(worker, collector, key, envelope)


def check(collector: Collector, key: str, n_fed: int, layers: tuple[int, ...] = LAYERS) -> None:
    taken = collector.take(key, counts={ROWS: n_fed, SCORES: 0}, n_fed=n_fed, timeout_s=5)
    found = taken.tensors[ROWS].to_float32()
    for rank, layer in enumerate(layers):
        np.testing.assert_array_equal(found[rank], rows(int(key[1:]), layer, 0, n_fed).numpy())


def test_a_prompt_leaves_tap_by_tap_in_front_of_the_steps_behind_it(
    worker: Worker, collector: Collector, told: list[tuple[int, int]]
) -> None:
    ask(worker, collector, "r1", layers=LAYERS)
    worker.step([("r1", 1, 0, N_PROMPT)])
    assert told == []
    for at in range(2):
        worker.step([("r1", 1, N_PROMPT + at, 1)])
    # The rows of the first step are few, and go with it; those of the second wait for the next.
    assert told == [(0, 1), (0, 3), (1, 1)]
    worker.stepper.leave(["r1"])
    assert told[3:] == [(0, 3), (2, 1)]
    check(collector, "r1", N_PROMPT + 2)


def test_steps_of_many_rows_do_not_pile_up(
    monkeypatch: pytest.MonkeyPatch,
    worker: Worker,
    collector: Collector,
    told: list[tuple[int, int]],
) -> None:
    """As much leaves as comes, and more, where as much comes every time."""
    monkeypatch.setattr("inspect_lens._engine.step.exporter._MOST_STEPS", 1)
    monkeypatch.setattr(exporter, "_PIECE", 4 * ROW)
    keys = [f"r{i}" for i in range(4)]
    for key in keys:
        ask(worker, collector, key, layers=LAYERS, positions="completion")
    for key in keys:
        worker.step([(key, int(key[1:]), 0, N_PROMPT)])
    for at in range(N_PROMPT, N_PROMPT + 12):
        worker.step([(key, int(key[1:]), at, 1) for key in keys])
        pieces = [p for p in worker.stepper._outbox._waiting if isinstance(p, exporter._Piece)]
        assert sum(piece.nbytes for piece in pieces) <= 4 * 12 * ROW


def test_the_last_rows_of_a_request_do_not_wait(
    worker: Worker, collector: Collector, told: list[tuple[int, int]]
) -> None:
    keys = ["r0", "r1"]
    for key in keys:
        ask(worker, collector, key, layers=LAYERS)
    worker.step([(key, int(key[1:]), 0, N_PROMPT) for key in keys])
    for at in range(N_PROMPT, N_PROMPT + MOST - 1):
        worker.step([(key, int(key[1:]), at, 1) for key in keys])
    assert not worker.stepper._outbox._waiting
    for key in keys:
        check(collector, key, N_PROMPT + MOST - 1)
        worker.stepper.remove(key)


def test_rows_of_whoever_failed_are_not_sent_and_hold_nobody_up(
    monkeypatch: pytest.MonkeyPatch,
    worker: Worker,
    collector: Collector,
    told: list[tuple[int, int]],
) -> None:
    ask(worker, collector, "r1", layers=LAYERS)
    worker.step([("r1", 1, 0, N_PROMPT)])
    ask(worker, collector, "r2", layers=LAYERS)
    arena, asked = worker.stepper.arena, []

    def place(*args: Any) -> int:
        asked.append(args)
        raise CapacityError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(arena, "place", place)
        worker.step([("r2", 2, 0, N_PROMPT)])
    assert len(asked) == 1, "each would wait for a minute"
    with pytest.raises(CapacityError, match="no room"):
        collector.take("r1", counts={ROWS: 1, SCORES: 0}, n_fed=16, timeout_s=5)
    worker.stepper.leave(["r2"])
    assert told == [(0, 1), (1, 1), (2, 1)]
    check(collector, "r2", N_PROMPT)
    assert worker.stepper.n_requests == 1


def test_a_front_end_that_dies_while_its_rows_wait_takes_its_own_requests_only(
    monkeypatch: pytest.MonkeyPatch,
    worker: Worker,
    collector: Collector,
    told: list[tuple[int, int]],
) -> None:
    other = Collector()
    try:
        for key, whose in (("r1", collector), ("r2", other)):
            ask(worker, whose, key, layers=LAYERS)
            worker.step([(key, int(key[1:]), 0, N_PROMPT)])
        original = Exporter._send

        def send(self: Any, reply: str, message: Any) -> bool:
            return reply != other.address and original(self, reply, message)

        monkeypatch.setattr(Exporter, "_send", send)
        worker.stepper.leave(["r1"])
        assert list(worker.stepper._live.by_key) == ["r1"]
        check(collector, "r1", N_PROMPT)
    finally:
        other.close()


def test_scores_and_what_was_gathered_do_not_wait_behind_rows(
    worker: Worker, collector: Collector, told: list[tuple[int, int]]
) -> None:
    ask(worker, collector, "r1", layers=LAYERS)
    worker.step([("r1", 1, 0, N_PROMPT)])
    start(worker, collector, "r2", LensRequest(probes=[{"name": "p", "positions": "all"}]))
    # Taps that do not lie side by side are copied, and the copy is not kept.
    ask(worker, collector, "r3", layers=(0, 5))
    both = LensRequest(
        capture=CaptureSpec(layers=(0, 5)), probes=[{"name": "p", "positions": "all"}]
    )
    start(worker, collector, "r4", both)
    worker.step([("r2", 2, 0, N_PROMPT)])
    worker.step([("r4", 4, 0, N_PROMPT)])
    assert told == [(0, 1), (0, 1), (1, 1), (0, 2), (0, 1)]


def again(
    worker: Worker, collector: Collector, key: str, layers: tuple[int, ...], n_fed: int, size: int
) -> None:
    """Pre-empt a request, and compute it again from its start."""
    request = LensRequest(capture=CaptureSpec(layers=layers))
    envelope = seal(request, FACTS, reply=collector.address, n_prompt=N_PROMPT, max_tokens=MOST)
    worker.stepper.remove(key)
    worker.stepper.add(key, dict(envelope.pack()))
    for at in range(0, n_fed, size):
        worker.step([(key, int(key[1:]), at, min(size, n_fed - at))])


def run(worker: Worker, fed: dict[str, int], steps: int) -> None:
    """Let all requests feed one token a step."""
    for _ in range(steps):
        if keys := [key for key in sorted(fed) if fed[key] < MOST]:
            worker.step([(key, int(key[1:]), fed[key], 1) for key in keys])
        for key in keys:
            fed[key] += 1


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.data())
def test_rows_arrive_whoever_waits_for_whom(
    collector: Collector, told: list[tuple[int, int]], data: st.DataObject
) -> None:
    arena = ArenaWriter(4 << 20)
    copier = LateCopier(arena)
    worker = Worker(Exporter(arena, copier), parts=data.draw(st.sampled_from([1, 2, 6, 32])))
    fed: dict[str, int] = {}
    kinds: dict[str, tuple[int, ...]] = {}
    try:
        for _ in range(data.draw(st.integers(1, 14))):
            what = data.draw(st.sampled_from(["come", "come", "go", "run", "run", "again"]))
            if what == "come" and len(fed) < 3:
                # Rows of one that was computed again may still be on their way when it is over.
                key = f"r{next(NUMBERS)}"
                kinds[key] = data.draw(st.sampled_from([LAYERS, (0, 2), (5,)]))
                ask(worker, collector, key, layers=kinds[key])
                others = [(k, int(k[1:]), n, 1) for k, n in fed.items() if n < MOST]
                worker.step([(key, int(key[1:]), 0, N_PROMPT), *others])
                for k, _, _, _ in others:
                    fed[k] += 1
                fed[key] = N_PROMPT
            elif what == "go" and fed:
                key = data.draw(st.sampled_from(sorted(fed)))
                worker.stepper.remove(key)
                copier.run()
                check(collector, key, fed.pop(key), kinds[key])
            elif what == "again" and fed:
                key = data.draw(st.sampled_from(sorted(fed)))
                again(worker, collector, key, kinds[key], fed[key], data.draw(st.integers(5, 17)))
            elif fed:
                run(worker, fed, data.draw(st.integers(1, 12)))
        worker.stepper.leave(fed)
        copier.run()
        for key, n in fed.items():
            check(collector, key, n, kinds[key])
    finally:
        copier.run()
        for key in kinds:
            collector.discard(key)
        worker.stepper.close()
