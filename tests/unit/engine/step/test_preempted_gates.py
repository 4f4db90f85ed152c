"""Gates that stay open: what they decided stands when a request is pre-empted and comes back."""

from __future__ import annotations

import numpy as np
import torch

from inspect_lens import CaptureSpec, LensRequest
from inspect_lens._engine.collect.collector import Collector
from inspect_lens._engine.export.ids import Numbers
from inspect_lens._engine.protocol.messages import ROWS, SCORES
from inspect_lens._engine.protocol.shared_memory import BOARD_COLUMNS, BOARD_SIZE
from inspect_lens.spec import Add, Gate
from tests.kit.steps import HIDDEN, Worker, begin, rows, sealed

PROMPT, FIRES = 10, 12


def asked() -> LensRequest:
    """Add to the stream of layer 2 behind the sampled token at which layer 5 shows position 12."""
    position, other = np.eye(HIDDEN, dtype=np.float32)[[2, 7]]
    gate = Gate(direction=position, layer=5, threshold=FIRES - 0.5, scope="rest")
    edit = Add(vector=other, layers=[2], when=gate, positions="completion")
    return LensRequest(capture=CaptureSpec(layers=(2,)), edits=[edit])


def wanted(n: int) -> torch.Tensor:
    """The rows of layer 2."""
    made = rows(1, 2, 0, n)
    made[FIRES + 1 :, 7] += 1
    return made


def feed(worker: Worker, key: str, first: int, end: int) -> None:
    for position in range(first, end):
        worker.step([(key, 1, position, 1)])


def test_what_a_gate_decided_stands_when_a_request_comes_back(
    worker: Worker, collector: Collector
) -> None:
    begin(worker, collector, "a", envelope := sealed(collector, asked(), PROMPT, 8))
    worker.step([("a", 1, 0, PROMPT)])
    feed(worker, "a", PROMPT, 15)
    worker.stepper.remove("a")
    assert worker.stepper.is_watching, "its end has to be heard of"
    # Others come and go, and one ends that never ran here.
    for key in ("b", "c"):
        begin(worker, collector, key, sealed(collector, asked(), PROMPT, 8))
        worker.step([(key, 1, 0, PROMPT)])
        worker.stepper.finish([key, "unknown"])
        worker.stepper.remove(key)
    worker.stepper.add("a", dict(envelope.pack()))
    # All at once: the gate is read behind the layer that is edited, too late to decide anew.
    worker.step([("a", 1, 0, 15)])
    feed(worker, "a", 15, 17)
    got = collector.take("a", counts={ROWS: 17, SCORES: 0}, n_fed=17, timeout_s=5)
    np.testing.assert_array_equal(got.tensors[ROWS].storage[0], wanted(17).numpy())
    assert got.fired == {0: FIRES}
    worker.stepper.finish(["a"])
    worker.stepper.remove("a")
    assert not worker.stepper.is_watching


def test_a_request_that_ended_leaves_nothing_open(worker: Worker, collector: Collector) -> None:
    for _ in range(2):
        begin(worker, collector, "a", sealed(collector, asked(), PROMPT, 8))
        worker.step([("a", 1, 0, PROMPT)])
        feed(worker, "a", PROMPT, 15)
        worker.stepper.finish(["a"])
        worker.stepper.remove("a")
        got = collector.take("a", counts={ROWS: 15, SCORES: 0}, n_fed=15, timeout_s=5)
        np.testing.assert_array_equal(got.tensors[ROWS].storage[0], wanted(15).numpy())
        assert got.fired == {0: FIRES}


def test_a_request_that_is_away_keeps_its_record_however_many_come_and_go() -> None:
    board = np.zeros((BOARD_SIZE, BOARD_COLUMNS), dtype=np.int64)
    numbers, slot = Numbers(board), np.zeros(1, dtype=np.int64)
    (mine,) = numbers.take(["a"], slot)
    numbers.give("a", mine)
    board[mine, 5] = 13
    for i in range(BOARD_SIZE + 10):
        (other,) = numbers.take([f"x{i}"], slot)
        assert other % BOARD_SIZE != mine
        numbers.give(f"x{i}", other, is_over=True)
    assert numbers.n_away == 1
    assert numbers.take(["a"], slot) == [mine]
    assert not numbers.fresh
    assert board[mine, 5] == 13
    numbers.give("a", mine)
    numbers.finish(["a", "nobody"])
    assert numbers.n_away == 0
    assert numbers.take(["a"], slot) != [mine]
