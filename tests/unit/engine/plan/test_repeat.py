"""Steps that repeat the last one's plan give what a plan of their own would have given."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from inspect_lens import CaptureSpec, LensRequest, SteeringVector
from inspect_lens._engine import plan
from inspect_lens._engine.collect.collector import Collector
from inspect_lens._engine.protocol.messages import ROWS, SCORES
from inspect_lens._engine.tap.op import tap
from tests.kit.steps import HIDDEN, LAYERS, Worker, begin, exporter, rows, sealed


@pytest.fixture
def advanced(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Positions that requests had reached in repeated steps."""
    seen: list[int] = []
    original = plan.Repeat.advance

    def advance(self: Any) -> Any:
        seen.append(int(self.position[0]) + 1)
        return original(self)

    monkeypatch.setattr(plan.Repeat, "advance", advance)
    return seen


def decode(worker: Worker, live: dict[str, int], steps: int) -> None:
    for _ in range(steps):
        worker.step([(key, int(key[1:]), at, 1) for key, at in live.items()])
        for key in live:
            live[key] += 1


def test_decode_steps_repeat_and_leave_the_same_rows(
    worker: Worker, collector: Collector, advanced: list[int]
) -> None:
    request = LensRequest(capture=CaptureSpec(layers=(0, 5)))
    for i in (1, 2):
        begin(worker, collector, f"r{i}", sealed(collector, request, 4, 9))
    worker.step([("r1", 1, 0, 4), ("r2", 2, 0, 4)])
    assert not worker.state.is_active, "a prefill is not repeated"
    decode(worker, {"r1": 4, "r2": 4}, 8)
    assert len(advanced) == 7
    for i in (1, 2):
        taken = collector.take(f"r{i}", counts={ROWS: 12, SCORES: 0}, n_fed=12, timeout_s=5)
        expected = torch.stack([rows(i, layer, 0, 12) for layer in (0, 5)])
        np.testing.assert_array_equal(taken.tensors[ROWS].to_float32(), expected.numpy())
        worker.stepper.remove(f"r{i}")
    assert worker.state.is_active, "nobody has run a step since"
    worker.stepper.disarm()
    assert not worker.state.flags.any()


def test_the_taps_are_idle_where_a_step_asks_for_nothing(
    worker: Worker, collector: Collector, advanced: list[int]
) -> None:
    request = LensRequest(capture=CaptureSpec(layers=(0,), positions="prompt"))
    begin(worker, collector, "r1", sealed(collector, request, 3, 9))
    begin(worker, collector, "r2", sealed(collector, request, 9, 9))
    worker.step([("r1", 1, 0, 3), ("r2", 2, 0, 3)])
    decode(worker, {"r1": 3, "r2": 3}, 2)
    assert worker.state.is_active
    decode(worker, {"r1": 5, "r2": 5}, 4)
    assert worker.state.is_active
    decode(worker, {"r1": 9, "r2": 9}, 1)
    assert not worker.state.is_active
    assert not worker.state.flags.any()
    for key in ("r1", "r2"):
        worker.stepper.remove(key)
        collector.discard(key)


def test_a_request_that_joins_or_leaves_ends_the_repetition(
    worker: Worker, collector: Collector, advanced: list[int]
) -> None:
    request = LensRequest(capture=CaptureSpec(layers=(2,)))
    begin(worker, collector, "r1", sealed(collector, request, 2, 20))
    begin(worker, collector, "r2", sealed(collector, request, 2, 20))
    worker.step([("r1", 1, 0, 2), ("r2", 2, 0, 2)])
    live = {"r1": 2, "r2": 2}
    decode(worker, live, 3)
    assert len(advanced) == 2
    worker.stepper.remove("r1")
    collector.discard("r1")
    # Its place in the batch goes to a plain request, which must not be captured.
    live = {"r9": 7, "r2": 5}
    decode(worker, live, 3)
    assert len(advanced) == 4
    worker.stepper.leave(["r2"])
    taken = collector.take("r2", counts={ROWS: 8, SCORES: 0}, n_fed=8, timeout_s=5)
    np.testing.assert_array_equal(taken.tensors[ROWS].to_float32()[0], rows(2, 2, 0, 8).numpy())
    worker.stepper.remove("r2")
    worker.stepper.disarm()


@pytest.mark.parametrize(
    ("which", "expected"),
    [
        ({"position_indices": [6]}, [6]),
        ({"phase": "decode"}, [4, 5, 6, 7, 8, 9]),
        ({"phase": "prefill"}, [2, 3]),
    ],
)
def test_what_begins_or_ends_ahead_keeps_a_step_from_repeating(
    worker: Worker, collector: Collector, which: dict[str, Any], expected: list[int]
) -> None:
    """A prompt of four tokens, its last two fed like sampled ones."""
    vector = SteeringVector(activations=np.ones((1, HIDDEN)), layer_indices=[0], **which)
    begin(worker, collector, "r1", sealed(collector, LensRequest(edits=(vector,)), 4, 20))
    worker.step([("r1", 1, 0, 2)])
    edited = []
    for at in range(2, 10):
        stepper = worker.stepper
        stepper.begin(["r1"], np.zeros(1, int), np.ones(1, int), np.asarray([at]))
        hidden = torch.zeros(1, HIDDEN)
        tap(hidden, None, worker.ctls[0])
        stepper.end_step("eager")
        if hidden.any():
            edited.append(at)
    assert edited == expected
    worker.stepper.remove("r1")
    collector.discard("r1")


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["decode", "decode", "decode", "chunk", "drop", "swap", "skip"]),
            st.integers(0, 3),
        ),
        max_size=25,
    ),
    st.lists(st.sampled_from(["all", "prompt", "completion"]), min_size=4, max_size=4),
)
def test_any_course_of_steps_gives_each_request_its_own_rows(
    collector: Collector, operations: list[tuple[str, int]], positions: list[Any]
) -> None:
    """Against the truth, which rows that name themselves know."""
    worker = Worker(exporter())
    n_prompt, fed = 5, {}
    order = []
    for i in range(4):
        request = LensRequest(capture=CaptureSpec(layers=LAYERS, positions=positions[i]))
        begin(worker, collector, f"r{i}", sealed(collector, request, n_prompt, 40))
        fed[f"r{i}"] = 0
        order.append(f"r{i}")
    try:
        for operation, number in operations:
            key = f"r{number}"
            if operation == "drop" and key in fed:
                worker.stepper.remove(key)
                del fed[key]
                order.remove(key)
                collector.discard(key)
            elif operation == "swap":
                order.reverse()
            elif operation in ("decode", "chunk", "skip") and order:
                now = [k for k in order if operation != "skip" or k != key]
                count = {k: 2 if operation == "chunk" and k == key else 1 for k in now}
                if now:
                    worker.step([(k, int(k[1:]), fed[k], count[k]) for k in now])
                for k in now:
                    fed[k] += count[k]
        worker.stepper.leave(fed)
        for key, n in fed.items():
            i = int(key[1:])
            where = positions[i]
            lo, hi = {"all": (0, n), "prompt": (0, min(n, 5)), "completion": (5, n)}[where]
            if n < n_prompt or hi <= lo:
                continue
            taken = collector.take(key, counts={ROWS: hi - lo, SCORES: 0}, n_fed=n, timeout_s=5)
            for rank, layer in enumerate(LAYERS):
                np.testing.assert_array_equal(
                    taken.tensors[ROWS].to_float32()[rank], rows(i, layer, lo, hi - lo).numpy()
                )
    finally:
        for key in fed:
            collector.discard(key)
        worker.stepper.close()
