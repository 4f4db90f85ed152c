"""Gates that stay open: what they decided stands when a request is pre-empted and comes back."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from inspect_lens import CaptureSpec, LensRequest
from inspect_lens._engine.collect.collector import Collector
from inspect_lens._engine.export.transport import Numbers
from inspect_lens._engine.protocol.messages import BOARD_COLUMNS, BOARD_SIZE, ROWS
from inspect_lens._engine.protocol.messages import SCORES as TOKEN_SCORES
from inspect_lens._engine.protocol.programs import open_among
from inspect_lens.spec import Add, Gate
from tests.kit.gate_twin import expected_gate
from tests.kit.steps import HIDDEN, Worker, begin, exporter, rows, sealed

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
    got = collector.take("a", counts={ROWS: 17, TOKEN_SCORES: 0}, n_fed=17, timeout_s=5)
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
        got = collector.take("a", counts={ROWS: 15, TOKEN_SCORES: 0}, n_fed=15, timeout_s=5)
        np.testing.assert_array_equal(got.tensors[ROWS].storage[0], wanted(15).numpy())
        assert got.fired == {0: FIRES}


SCORES = [0.0] * PROMPT + [1.0, -1.0, 0.6, 1.0, -0.3, -0.4, 2.0, -0.1, -4.0, 1.0]
NEXT = Gate(
    direction=np.eye(HIDDEN, dtype=np.float32)[3],
    layer=5,
    threshold=0.1,
    scope="next",
    ema=0.5,
    closes_below=-0.2,
)


@pytest.mark.parametrize("is_shadow", [False, True])
def test_what_a_running_gate_decided_on_each_token_stands(
    collector: Collector, is_shadow: bool
) -> None:
    sign = 1.0

    def make(number: int, layer: int, first: int, count: int) -> torch.Tensor:
        out = rows(number, layer, first, count)
        out[:, 3] = sign * torch.tensor(SCORES[first : first + count])
        return out

    gate = NEXT.model_copy(update={"shadow": is_shadow})
    other = np.eye(HIDDEN, dtype=np.float32)[7]
    edit = Add(vector=other, layers=[2], when=gate, positions="completion")
    asked = LensRequest(capture=CaptureSpec(layers=(2,)), edits=[edit])
    worker, n = Worker(exporter(), make=make), len(SCORES)
    begin(worker, collector, "a", envelope := sealed(collector, asked, PROMPT, n - PROMPT + 1))
    worker.step([("a", 1, 0, 4)])
    worker.step([("a", 1, 4, PROMPT - 4)])
    feed(worker, "a", PROMPT, 15)
    worker.stepper.remove("a")
    # Of one that ends while it is away, nothing is left.
    in_use = worker.stepper.rows_in_use
    begin(worker, collector, "b", sealed(collector, asked, PROMPT, 2))
    worker.step([("b", 1, 0, PROMPT)])
    worker.stepper.remove("b")
    worker.stepper.finish(["b"])
    assert worker.stepper.rows_in_use == in_use > 0
    worker.stepper.add("a", dict(envelope.pack()))
    # Computed again, all scores would decide the other way. One token is new.
    sign = -1.0
    worker.step([("a", 1, 0, 12)])
    worker.step([("a", 1, 12, 3)])
    sign = 1.0
    feed(worker, "a", 15, n)
    got = collector.take("a", counts={ROWS: n, TOKEN_SCORES: 0}, n_fed=n, timeout_s=5)
    factors, opens = expected_gate(gate, SCORES[PROMPT:])
    expected = rows(1, 2, 0, n)
    expected[:15, 3] = -torch.tensor(SCORES[:15])
    expected[15:, 3] = torch.tensor(SCORES[15:])
    if not is_shadow:
        expected[PROMPT:, 7] += torch.from_numpy(factors)
    assert 0 < factors.sum() < len(factors)
    np.testing.assert_allclose(got.tensors[ROWS].storage[0], expected.numpy(), rtol=1e-6)
    assert got.fired == {0: PROMPT + int(opens.argmax())}
    assert open_among(got.open_at[0], n - PROMPT - 1) == int(factors.sum())
    worker.stepper.finish(["a"])
    worker.stepper.remove("a")
    assert worker.stepper.rows_in_use == 0
    worker.stepper.close()


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
