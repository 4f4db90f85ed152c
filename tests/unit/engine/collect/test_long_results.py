"""Requests that may become as long as the context have room by the hundred, and grow alone."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from inspect_lens import CaptureSpec, LensRequest
from inspect_lens._engine.collect import result_memory
from inspect_lens._engine.collect.collector import Collector
from inspect_lens._engine.collect.result_memory import ResultMemory, Stream
from inspect_lens._engine.protocol.messages import ROWS, SCORES, seal
from inspect_lens._engine.protocol.readouts import seal_capture
from inspect_lens.errors import CapacityError
from inspect_lens.spec import EngineProbe, ProbeUse
from tests.kit.steps import FACTS, HIDDEN, LAYERS, Worker, begin, exporter, rows, sealed

CONTEXT = 1 << 17
ALL = LensRequest(capture=CaptureSpec(layers=LAYERS))


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def test_256_captures_of_a_large_model_without_max_tokens_have_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(result_memory, "_RESERVE", 1 << 43)  # as in a process of its own
    facts: Any = SimpleNamespace(
        n_layers=80,
        hidden=8192,
        dtype="bfloat16",
        is_speculative=False,
        sites=("resid_post",),
        widths=(),
        ranks=1,
    )
    capture = seal_capture(CaptureSpec(), facts, n_prompt=1000, n_max=CONTEXT)
    assert capture is not None
    before = resident_bytes()
    memory = ResultMemory(0)
    streams = [Stream(capture, 1000) for _ in range(256)]
    for stream in streams:
        assert (stream.taps, stream.most, stream.row_bytes) == (80, CONTEXT, 16 << 10)
        stream.open(memory)
        assert stream.room >= 1 << 13
    # What has not come takes no memory, nor do the notes of what has.
    assert resident_bytes() - before < 256 << 20
    for stream in streams:
        assert stream.slab is not None
        stream.slab.flags[:80] = 1
        assert not stream.has(80)


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    """A front-end whose results have room for a few positions at first."""
    # 4 positions at 3 taps.
    monkeypatch.setattr(ResultMemory, "most_rows", lambda self, row_bytes: 12)
    monkeypatch.setattr(result_memory, "_RESERVE", 1 << 18)
    monkeypatch.setattr(result_memory, "_LEAST_RESERVE", 0)
    monkeypatch.setattr(result_memory, "_HUGE_PAGE", mmap.PAGESIZE)
    made = Collector()
    yield made
    made.close()


STEPS = st.lists(st.integers(1, 9), min_size=1, max_size=9)


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(STEPS, st.sampled_from(["none", "mean", "max"]), st.booleans(), st.data())
def test_results_that_grow_are_exact(
    short: Collector, steps: list[int], reduce: Any, preempted: bool, data: Any
) -> None:
    worker = Worker(exporter(), sum_rows=data.draw(st.sampled_from([0, 7])))
    n = sum(steps)
    request = LensRequest(capture=CaptureSpec(layers=LAYERS, reduce=reduce))
    n_prompt = data.draw(st.integers(1, n))
    before = data.draw(st.integers(0, n)) if preempted else 0
    for key in ("a", "b"):
        begin(worker, short, key, sealed(short, request, n_prompt, 5000))
    for number, key in enumerate("ab"):
        first = 0
        for count in [before, 0, *steps]:
            if not count:
                first = 0
                continue
            # Sampled tokens come one by one.
            while count:
                now = min(count, n_prompt - first, 32) if first < n_prompt else 1
                worker.step([(key, number, first, now)])
                first, count = first + now, count - now
        worker.stepper.remove(key)
    for number, key in enumerate("ab"):
        got = short.take(key, counts={ROWS: n, SCORES: 0}, n_fed=n, timeout_s=5)
        whole = np.stack([rows(number, layer, 0, n).numpy() for layer in LAYERS])
        if reduce != "none":
            whole = getattr(whole, reduce)(axis=1, keepdims=True)
        np.testing.assert_allclose(got.tensors[ROWS].storage, whole, rtol=1e-6)
    worker.stepper.close()


def test_scores_that_grow_are_those_of_results_that_did_not(
    short: Collector, collector: Collector
) -> None:
    """One row of scores stands for all taps of a worker, also where there came to be room."""
    probe = EngineProbe(layers=LAYERS, tensors={"weight": np.ones((3, HIDDEN))})
    request = LensRequest(probes=(ProbeUse(name="p", positions="all"),))
    scores = []
    for owner in (short, collector):
        worker = Worker(exporter())
        worker.stepper.probes.add(probe)
        envelope = seal(
            request, FACTS, reply=owner.address, n_prompt=6, max_tokens=5000, probes={"p": probe}
        )
        begin(worker, owner, "p", envelope)
        worker.step([("p", 1, 0, 6)])
        for position in range(6, 40):
            worker.step([("p", 1, position, 1)])
        worker.stepper.remove("p")
        got = owner.take("p", counts={ROWS: 0, SCORES: 40}, n_fed=40, timeout_s=5)
        scores.append(got.tensors[SCORES].storage)
        worker.stepper.close()
    assert scores[0].shape == (1, 40, 1)
    assert np.unique(scores[0]).size == 40
    np.testing.assert_array_equal(*scores)


def test_what_finds_no_room_fails_alone_and_at_once(short: Collector) -> None:
    """The others of the same message are served."""
    worker = Worker(exporter())
    fitting = sealed(short, LensRequest(capture=CaptureSpec(layers=(0,), positions=[0, 1])), 4, 2)
    listed = LensRequest(capture=CaptureSpec(layers=LAYERS, positions=list(range(4, 6000))))
    for key, envelope in (
        ("first", fitting),
        ("large", sealed(short, listed, 6001, 2)),
        ("last", fitting),
    ):
        begin(worker, short, key, envelope)
    worker.step([("first", 1, 0, 2), ("large", 2, 0, 2), ("last", 3, 0, 2)])
    for number, key in ((1, "first"), (3, "last")):
        got = short.take(key, counts={ROWS: 2, SCORES: 0}, n_fed=2, timeout_s=5)
        np.testing.assert_array_equal(got.tensors[ROWS].storage[0], rows(number, 0, 0, 2))
    with pytest.raises(CapacityError, match="open or held"):
        short.take("large", counts={ROWS: 2, SCORES: 0}, n_fed=6, timeout_s=5)
    worker.stepper.close()


def test_what_cannot_grow_fails_alone(short: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Worker(exporter())
    for key in "ab":
        begin(worker, short, key, sealed(short, ALL, 4, 5000))
    larger = Stream.larger
    refused = []

    def full(self: Stream, until: int) -> Any:
        if until > 16:
            refused.append(until)
            raise CapacityError("no room")
        return larger(self, until)

    monkeypatch.setattr(Stream, "larger", full)
    worker.step([("a", 1, 0, 4), ("b", 2, 0, 4)])
    for position in range(4, 30):
        worker.step([("a", 1, position, 1)] + [("b", 2, position, 1)] * (position < 16))
    worker.stepper.leave("ab")
    with pytest.raises(CapacityError, match="no room"):
        short.take("a", counts={ROWS: 30, SCORES: 0}, n_fed=30, timeout_s=5)
    got = short.take("b", counts={ROWS: 16, SCORES: 0}, n_fed=16, timeout_s=5)
    np.testing.assert_array_equal(got.tensors[ROWS].storage[2], rows(2, 5, 0, 16))
    assert len(refused) == 1
    worker.stepper.close()
