"""Worker and front-end together over a real socket: what goes in comes out, whole or not at all."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from inspect_lens import CaptureSpec, LensRequest, SteeringVector
from inspect_lens._engine.collect import collector as collecting
from inspect_lens._engine.collect import result_memory
from inspect_lens._engine.collect.collector import Collector
from inspect_lens._engine.export import transport
from inspect_lens._engine.export.transport import Copier, Exporter, Rows
from inspect_lens._engine.protocol.messages import ROWS, SCORES, ArenaWriter, Block, Failure
from inspect_lens._engine.tap.edit_table import Bank
from inspect_lens.errors import CapacityError, CaptureError
from tests.kit.steps import (
    CAPTURE,
    HIDDEN,
    Worker,
    begin,
    exporter,
    rows,
    sealed,
)
from tests.kit.waiting import until


def test_chunks_overlaps_and_surplus_rows_are_placed_by_position(
    worker: Worker, collector: Collector
) -> None:
    begin(worker, collector, "a", sealed(collector, CAPTURE, 10, 6))
    worker.step([("x", 9, 0, 3), ("a", 1, 0, 6)])
    worker.step([("a", 1, 6, 4)])
    worker.step([("a", 1, 0, 12)])  # computed again after a pre-emption
    worker.step([("a", 1, 12, 1), ("x", 9, 3, 1)])
    worker.step([("a", 1, 13, 1)])  # past the stop
    got = collector.take("a", counts={ROWS: 13, SCORES: 0}, n_fed=13, timeout_s=5)
    assert ROWS in got.tensors
    expected = torch.stack([rows(1, 0, 0, 13), rows(1, 5, 0, 13)])
    np.testing.assert_array_equal(got.tensors[ROWS].storage, expected.numpy())
    assert got.tensors[ROWS].shape == (2, 13, HIDDEN)
    assert got.paths == ("eager",)


def test_a_long_step_is_told_of_in_parts(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport, "_BLOCK_BYTES", 10 * HIDDEN * 4)
    worker = Worker(exporter())
    blocks = []
    send = worker.stepper._exporter._send

    def noting(reply: str, message: Any) -> bool:
        if isinstance(message, Block):
            blocks.append((message.tap, message.shape))
        return send(reply, message)

    monkeypatch.setattr(worker.stepper._exporter, "_send", noting)
    try:
        begin(worker, collector, "p", sealed(collector, CAPTURE, 10, 6))
        worker.step([("p", 1, 0, 4)])
        worker.step([("p", 1, 4, 6)])  # of which one part has no room for both taps
        got = collector.take("p", counts={ROWS: 10, SCORES: 0}, n_fed=10, timeout_s=5)
    finally:
        worker.stepper.close()
    assert blocks == [(0, (2, 4, HIDDEN)), (0, (1, 6, HIDDEN)), (1, (1, 6, HIDDEN))]
    expected = torch.stack([rows(1, 0, 0, 10), rows(1, 5, 0, 10)])
    np.testing.assert_array_equal(got.tensors[ROWS].storage, expected.numpy())


@pytest.mark.parametrize("is_busy", [False, True])
def test_memory_of_dropped_results_goes_back_though_rows_come_all_the_time(
    worker: Worker, collector: Collector, monkeypatch: pytest.MonkeyPatch, is_busy: bool
) -> None:
    monkeypatch.setattr(collecting, "_SWEEP_S", 0.1)

    def captured(key: str, max_tokens: int) -> None:
        begin(worker, collector, key, sealed(collector, CAPTURE, 10, max_tokens))
        worker.step([(key, 1, 0, 10)])
        collector.take(key, counts={ROWS: 10, SCORES: 0}, n_fed=10, timeout_s=5)

    memory = collector.memory
    # Much room, of which a text that ended early took ten rows; nobody asks for as much again.
    captured("m0", 2000)
    many = 2 * 2000 * HIDDEN * 4
    assert memory.kept >= many
    monkeypatch.setattr(result_memory, "_KEPT_S", 0.3)
    n = itertools.count(1)

    def has_gone() -> bool:
        if is_busy:
            captured(f"m{next(n)}", 6)
        return memory.kept < many

    assert until(has_gone)


def test_missing_rows_fail_the_request_with_their_number(
    worker: Worker, collector: Collector
) -> None:
    begin(worker, collector, "b", sealed(collector, CAPTURE, 4, 4))
    worker.step([("b", 1, 0, 4)])
    with pytest.raises(CaptureError, match="2 of 10 captured rows"):
        collector.take("b", counts={ROWS: 5, SCORES: 0}, n_fed=5, timeout_s=0.2)
    assert collector.n_open == 0


def test_unreported_steering_fails_the_request(worker: Worker, collector: Collector) -> None:
    vector = SteeringVector(activations=np.ones((1, HIDDEN)), layer_indices=[2])
    begin(worker, collector, "c", sealed(collector, LensRequest(edits=(vector,)), 4, 4))
    worker.step([("c", 1, 0, 4)])
    with pytest.raises(CaptureError, match="must not be used"):
        collector.take("c", counts={ROWS: 0, SCORES: 0}, n_fed=6, timeout_s=0.2)


def test_steered_tokens_are_counted_once(worker: Worker, collector: Collector) -> None:
    vector = SteeringVector(
        activations=np.ones((1, 2, HIDDEN)), layer_indices=[2], position_indices=[0, 3]
    )
    begin(worker, collector, "d", sealed(collector, LensRequest(edits=(vector,)), 4, 4))
    worker.step([("d", 1, 0, 2)])
    worker.step([("d", 1, 0, 4)])
    worker.step([("d", 1, 4, 1)])
    got = collector.take("d", counts={ROWS: 0, SCORES: 0}, n_fed=5, timeout_s=5)
    assert got.n_steered == 2


def test_a_full_table_fails_its_request_and_no_other(worker: Worker, collector: Collector) -> None:
    def many(seed: int) -> LensRequest:
        values = np.random.default_rng(seed).normal(size=(1, 8, HIDDEN))
        return LensRequest(edits=(SteeringVector(activations=values, layer_indices=[0]),))

    begin(worker, collector, "e", sealed(collector, many(0), 8, 2))
    held = worker.stepper.rows_in_use
    begin(worker, collector, "f", sealed(collector, many(1), 8, 2))
    assert worker.stepper.rows_in_use == held
    with pytest.raises(CapacityError, match="12 rows"):
        collector.take("f", counts={ROWS: 0, SCORES: 0}, n_fed=8, timeout_s=5)
    worker.step([("e", 1, 0, 8)])
    assert collector.take("e", counts={ROWS: 0, SCORES: 0}, n_fed=8, timeout_s=5).n_steered == 8
    worker.stepper.remove("e")
    assert worker.stepper.rows_in_use == 0


class BrokenExporter(Exporter):
    """One that cannot send rows, and keeps what it is told of failures."""

    def __init__(self) -> None:
        arena = ArenaWriter(1 << 20)
        super().__init__(arena, Copier(arena))
        self.failures: list[Failure] = []

    def send(self, reply: str, rows: Rows, path: str) -> bool:
        raise RuntimeError("the wire is cut")

    def send_failure(self, reply: str, failure: Failure) -> None:
        self.failures.append(failure)


def test_a_fault_in_a_step_fails_its_requests_and_raises_nothing(collector: Collector) -> None:
    exporter = BrokenExporter()
    worker = Worker(exporter)
    worker.stepper.add("j", sealed(collector, CAPTURE, 4, 2).pack())
    worker.step([("j", 1, 0, 4)])
    assert [(f.key, f.message) for f in exporter.failures] == [("j", "the wire is cut")]
    assert not worker.stepper.is_watching
    assert not worker.state.is_active
    assert not worker.state.flags.any()


def test_what_a_batch_is_steered_with_is_placed_once(
    worker: Worker, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    bank = worker.stepper._bank
    placed: list[str] = []
    original = Bank._admit

    def admit(self: Bank, envelope: Any, *rest: Any) -> Any:
        placed.append(envelope.steer_hash)
        return original(self, envelope, *rest)

    monkeypatch.setattr(Bank, "_admit", admit)

    def request(scale: float, phase: Any = "both") -> LensRequest:
        values = np.arange(1.0, HIDDEN + 1)[None]
        vector = SteeringVector(activations=values, layer_indices=[2], scale=scale, phase=phase)
        return LensRequest(edits=(vector,), capture=CaptureSpec(layers=(2,)))

    for key in ("a", "b", "c"):
        begin(worker, collector, key, sealed(collector, request(1.0), 4, 4))
    begin(worker, collector, "d", sealed(collector, request(3.0), 4, 4))
    # Where its prompt ends is part of it.
    for key, n_prompt in (("e", 4), ("f", 5)):
        begin(worker, collector, key, sealed(collector, request(1.0, "decode"), n_prompt, 4))
    worker.stepper.take_up()
    assert len(placed) == len(set(placed)) == 4
    assert worker.stepper.rows_in_use == 1, "a direction is shared by all scales"
    for key in ("a", "c"):
        worker.stepper.remove(key)
    worker.step([("b", 7, 0, 4), ("d", 8, 0, 4), ("e", 9, 0, 4), ("f", 6, 0, 4)])
    for key, number, scale in (("b", 7, 1.0), ("d", 8, 3.0), ("e", 9, 0.0), ("f", 6, 0.0)):
        got = collector.take(key, counts={ROWS: 4, SCORES: 0}, n_fed=4, timeout_s=5)
        expected = rows(number, 2, 0, 4).numpy() + scale * np.arange(1.0, HIDDEN + 1)
        np.testing.assert_allclose(got.tensors[ROWS].storage[0], expected)
        worker.stepper.remove(key)
    assert (worker.stepper.rows_in_use, bank._held) == (0, {})
    begin(worker, collector, "g", sealed(collector, request(1.0), 4, 4))
    worker.stepper.take_up()
    assert len(placed) == 5
    worker.stepper.remove("g")


def test_an_envelope_of_another_release_fails_its_request() -> None:
    exporter = BrokenExporter()
    worker = Worker(exporter)
    worker.stepper.add("k", {"v": 99, "reply": "ipc:///nowhere"})
    worker.stepper.take_up()
    assert "99" in exporter.failures[0].message


def test_a_dead_front_end_does_not_stop_the_worker(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("inspect_lens._engine.export.transport._SEND_TIMEOUT_S", 0.1)
    monkeypatch.setattr("inspect_lens._engine.export.transport.SEND_QUEUE", 1)
    worker = Worker(exporter())
    packed = sealed(collector, CAPTURE, 30, 2).pack() | {"reply": "ipc:///nowhere-at-all"}
    worker.stepper.add("l", packed)
    for i in range(4):
        worker.step([("l", 1, i, 1)])
    assert not worker.stepper.is_watching
    worker.stepper.close()


OPERATIONS = st.lists(
    st.tuples(st.sampled_from(["add", "step", "remove"]), st.integers(0, 4)), max_size=30
)


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(OPERATIONS)
def test_any_order_of_events_leaves_nothing_behind(
    worker: Worker, collector: Collector, operations: list[tuple[str, int]]
) -> None:
    open_before = collector.n_open
    fed: dict[str, int] = {}
    for operation, number in operations:
        key = f"r{number}"
        if operation == "add":
            values = np.random.default_rng(number).normal(size=(1, HIDDEN))
            vector = SteeringVector(activations=values, layer_indices=[2], norm_match=True)
            request = LensRequest(
                capture=CaptureSpec(layers=(0,)) if number % 2 else None,
                edits=(vector,) if number != 1 else (),
            )
            begin(worker, collector, key, sealed(collector, request, 3, 20))
            fed[key] = 0
        elif operation == "step" and fed:
            worker.step([(k, int(k[1:]), fed[k], 2) for k in fed])
            fed = {k: n + 2 for k, n in fed.items() if n < 18}
        elif operation == "remove":
            worker.stepper.remove(key)
            collector.discard(key)
            fed.pop(key, None)
        assert not worker.state.is_active
        assert not worker.state.flags.any()
        assert not worker.state.flags.any()
    for number in range(5):
        worker.stepper.remove(f"r{number}")
        collector.discard(f"r{number}")
    assert worker.stepper.rows_in_use == 0
    assert collector.n_open == open_before


def steering(seed: int = 0, n: int = 8) -> LensRequest:
    values = np.random.default_rng(seed).normal(size=(1, n, HIDDEN))
    return LensRequest(edits=(SteeringVector(activations=values, layer_indices=[0]),))


def test_a_retry_does_not_start_behind_blocks_that_its_failed_twin_left(
    worker: Worker, collector: Collector
) -> None:
    begin(worker, collector, "m", sealed(collector, steering(0), 8, 2))
    begin(worker, collector, "n", sealed(collector, steering(1), 8, 2))
    worker.stepper.take_up()
    with pytest.raises(CapacityError):
        collector.take("n", counts={ROWS: 0, SCORES: 0}, n_fed=8, timeout_s=5)
    worker.stepper.remove("m")
    # The same salt, and four tokens that the cache already had.
    begin(worker, collector, "o", sealed(collector, steering(1), 8, 2))
    worker.step([("o", 1, 4, 4)])
    with pytest.raises(CaptureError, match="failed request with the same steering"):
        collector.take("o", counts={ROWS: 0, SCORES: 0}, n_fed=8, timeout_s=5)
    # From its first token on there is nothing to be wrong.
    begin(worker, collector, "p", sealed(collector, steering(1), 8, 2))
    worker.step([("p", 1, 0, 8)])
    assert collector.take("p", counts={ROWS: 0, SCORES: 0}, n_fed=8, timeout_s=5).n_steered == 8
    worker.stepper.remove("p")


def test_a_vector_for_many_positions_takes_one_row(worker: Worker, collector: Collector) -> None:
    vector = SteeringVector(
        activations=np.ones((1, HIDDEN)), layer_indices=[0], position_indices=list(range(50))
    )
    begin(worker, collector, "q", sealed(collector, LensRequest(edits=(vector,)), 60, 2))
    assert worker.stepper.rows_in_use == 1
    worker.stepper.remove("q")
    assert worker.stepper.rows_in_use == 0


def test_a_fault_outside_a_step_fails_all_and_raises_nothing(collector: Collector) -> None:
    from inspect_lens._vllm.compat.features import guarded

    exporter = BrokenExporter()
    worker = Worker(exporter)
    worker.stepper.add("r", sealed(collector, CAPTURE, 4, 2).pack())

    def broken() -> None:
        raise KeyError("no such field in this vLLM")

    guarded(worker.stepper, broken)
    assert [f.key for f in exporter.failures] == ["r"]
    assert not worker.stepper.is_watching
