"""Rounds in which something goes wrong: whose it is fails, and nobody else."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from inspect_lens._engine.collect.collector import Collector
from inspect_lens._engine.export.transport import Exporter
from inspect_lens._engine.protocol.messages import ROWS, SCORES, ArenaWriter
from inspect_lens.errors import CapacityError, CaptureError
from tests.kit.steps import Worker
from tests.unit.engine.export.test_ring import LateCopier
from tests.unit.engine.step.test_rounds import CAPTURES, N_PROMPT, ask, check, decode


def test_a_round_that_finds_no_room_fails_its_requests_and_no_others(
    monkeypatch: pytest.MonkeyPatch, worker: Worker, collector: Collector
) -> None:
    fed = {"r1": N_PROMPT, "r2": N_PROMPT}
    ask(worker, collector, "r1", CAPTURES[0])
    ask(worker, collector, "r2", {"layers": (2,), "positions": "prompt"})
    worker.step([("r1", 1, 0, N_PROMPT), ("r2", 2, 0, N_PROMPT)])
    decode(worker, ["r1", "r2"], fed, 4)
    arena = worker.stepper.arena

    def place(*args: Any) -> int:
        raise CapacityError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(arena, "place", place)
        ask(worker, collector, "r3", CAPTURES[0])
    with pytest.raises(CapacityError, match="no room"):
        collector.take("r1", counts={ROWS: 9, SCORES: 0}, n_fed=9, timeout_s=5)
    assert worker.stepper.n_requests == 2
    check(collector, "r2", {"layers": (2,), "positions": "prompt"}, (), fed["r2"])
    fed["r3"] = N_PROMPT
    worker.step([("r3", 3, 0, N_PROMPT), ("r2", 2, fed["r2"], 1)])
    decode(worker, ["r3"], fed, 3)
    worker.stepper.leave(["r3"])
    check(collector, "r3", CAPTURES[0], (), fed["r3"])


def test_a_front_end_that_takes_nothing_loses_its_requests_and_the_others_keep_theirs(
    monkeypatch: pytest.MonkeyPatch, worker: Worker, collector: Collector
) -> None:
    other = Collector()
    try:
        fed = {"r1": N_PROMPT, "r2": N_PROMPT}
        ask(worker, collector, "r1", CAPTURES[0])
        ask(worker, other, "r2", CAPTURES[0])
        worker.step([("r1", 1, 0, N_PROMPT), ("r2", 2, 0, N_PROMPT)])
        decode(worker, ["r1", "r2"], fed, 4)
        exporter, original = worker.stepper._exporter, worker.stepper._exporter._send

        def send(reply: str, message: Any) -> bool:
            return reply != other.address and original(reply, message)

        monkeypatch.setattr(exporter, "_send", send)
        worker.stepper.leave(["r1"])
        check(collector, "r1", CAPTURES[0], (), fed["r1"])
        assert worker.stepper.n_requests == 1
        with pytest.raises(CaptureError):
            other.take("r2", counts={ROWS: 9, SCORES: 0}, n_fed=9, timeout_s=0.1)
    finally:
        other.close()


@pytest.mark.parametrize("at", ["announce", "path"])
def test_a_front_end_that_dies_in_the_middle_of_a_step_takes_nobody_with_it(
    monkeypatch: pytest.MonkeyPatch, worker: Worker, collector: Collector, at: str
) -> None:
    """Of another group, which goes with it before the step is sent."""
    other = Collector()
    try:
        fed = {"r1": N_PROMPT, "r2": N_PROMPT}
        ask(worker, collector, "r1", CAPTURES[0])
        ask(worker, other, "r2", {"layers": (2,)})
        stepper = worker.stepper
        original, end = stepper._exporter._send, stepper.end_step

        def send(reply: str, message: Any) -> bool:
            return reply != other.address and original(reply, message)

        def step() -> None:
            worker.step([("r1", 1, 0, N_PROMPT), ("r2", 2, 0, N_PROMPT)])

        if at == "path":
            step()
            decode(worker, ["r1", "r2"], fed, 3)
        monkeypatch.setattr(stepper._exporter, "_send", send)
        if at == "announce":
            step()
        else:
            monkeypatch.setattr(stepper, "end_step", lambda _: end("graph"))
            decode(worker, ["r1", "r2"], fed)
        assert list(stepper._live.by_key) == ["r1"]
        stepper.leave(["r1"])
        check(collector, "r1", CAPTURES[0], (), fed["r1"])
    finally:
        other.close()


@pytest.mark.parametrize("parts", [2, 6, 32])
def test_rows_behind_which_a_step_never_ended_are_not_overwritten(
    collector: Collector, parts: int
) -> None:
    arena = ArenaWriter(4 << 20)
    copier = LateCopier(arena)
    worker = Worker(Exporter(arena, copier), parts=parts)
    try:
        fed = {"r1": N_PROMPT}
        ask(worker, collector, "r1", CAPTURES[0])
        worker.step([("r1", 1, 0, N_PROMPT)])
        decode(worker, ["r1"], fed, 4)
        one = np.ones(1, dtype=np.int64)
        worker.stepper.begin(["r1"], one - 1, one, one * fed["r1"])
        decode(worker, ["r1"], fed, 40)
        worker.stepper.remove("r1")
        copier.run()
        check(collector, "r1", CAPTURES[0], (), fed["r1"])
    finally:
        copier.run()
        worker.stepper.close()


def test_a_span_is_not_given_back_while_a_step_fills_it(
    worker: Worker, collector: Collector
) -> None:
    fed = {"r1": N_PROMPT}
    ask(worker, collector, "r1", CAPTURES[0])
    worker.step([("r1", 1, 0, N_PROMPT)])
    decode(worker, ["r1"], fed, 4)
    rounds, one = worker.stepper._rounds, np.ones(1, dtype=np.int64)
    worker.stepper.begin(["r1"], one - 1, one, one * fed["r1"])
    rounds.close()
    assert rounds._ring._taken
    worker.stepper.end_step("eager")
    worker.stepper.leave(["r1"])
    assert not rounds._ring._taken
    collector.discard("r1")
