"""Rows that cross the stages of a pipeline: results are those of one worker with all layers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from inspect_lens import LensRequest
from inspect_lens._engine.collect.collector import Collector
from inspect_lens._engine.protocol.messages import LENS, ROWS, SCORES, seal
from inspect_lens._engine.step.request_stepper import RequestStepper
from inspect_lens._engine.step.stages import LIST_KEY, ROWS_KEY, Crossing, Lent, Stages
from inspect_lens.errors import CaptureError
from inspect_lens.spec import EngineProbe, ProbeUse, TapPoint, tap_points
from tests.kit.steps import FACTS, HIDDEN, LAYERS, Worker, begin, exporter, rows, sealed
from tests.unit.engine.step.test_lens_steps import Head, asked, check, take

RNG = np.random.default_rng(4)
MLP = EngineProbe(
    kind="mlp",
    layers=LAYERS,
    tensors={
        "w1": RNG.normal(size=(3, 4, HIDDEN)).astype(np.float32),
        "w2": RNG.normal(size=4).astype(np.float32),
    },
)
WIDE = EngineProbe(
    layers=(0, 5), tensors={"weight": RNG.normal(size=(2, HIDDEN)).astype(np.float32)}
)
PROBES = {"mlp": MLP, "linear": WIDE}


class Stage(Worker):
    """One stage, and what waits in front of it."""

    def __init__(self, layers: tuple[int, ...], before: tuple[int, ...], is_last: bool) -> None:
        super().__init__(exporter(), layers=layers)
        self.state.remote = tap_points(["resid_post"], before) if before else ()
        self.stepper: RequestStepper = RequestStepper(
            self.state, self.stepper._exporter, is_last=is_last
        )
        self.stepper.stages = self.stages = Stages(is_last=is_last, ranks=2)
        if is_last:
            self.stepper.head = Head()
        for probe in PROBES.values():
            self.stepper.probes.add(probe)


class Pipeline:
    """Stages that work on several steps at a time, each one behind the other."""

    def __init__(self, *layers: tuple[int, ...]) -> None:
        before = [tuple(one for part in layers[:i] for one in part) for i in range(len(layers))]
        last = len(layers) - 1
        self.stages = [
            Stage(own, prior, i == last)
            for i, (own, prior) in enumerate(zip(layers, before, strict=True))
        ]
        self.waiting: list[list[Any]] = [[] for _ in layers]
        self.sent: list[int] = []
        """Numbers that left the first stage with each step."""

    def begin(self, collector: Collector, key: str, envelope: Any) -> None:
        begin(self.stages[0], collector, key, envelope)
        for stage in self.stages[1:]:
            stage.stepper.add(key, dict(envelope.pack()))

    def step(self, *parts: tuple[str, int, int, int]) -> None:
        """Begin a step; each other stage does what its predecessor did the time before."""
        self.waiting[0].append((list(parts), None))
        for i in reversed(range(len(self.stages))):
            if self.waiting[i]:
                self._run(i)

    def drain(self) -> None:
        for i in range(len(self.stages)):
            while self.waiting[i]:
                self._run(i)

    def _run(self, i: int) -> None:
        parts, tensors = self.waiting[i].pop(0)
        stage = self.stages[i]
        stage.stages.take(tensors, HIDDEN)
        assert not tensors, "the model would get what it does not know"
        stage.step(parts)
        going = stage.stages.give()
        if i == 0:
            self.sent.append(len(going.get(ROWS_KEY, ())))
        if i + 1 < len(self.stages):
            for tensor in going.values():
                assert tensor.numel() % 2 == 1, "tensor-parallel ranks would share it"
            self.waiting[i + 1].append((parts, dict(going)))
        else:
            assert not going

    def close(self) -> None:
        for stage in self.stages:
            stage.stepper.close()


SPLITS = [((0,), (2, 5)), ((0, 2), (5,)), ((0,), (2,), (5,)), ((0, 2, 5), ()), ((), (0, 2), (5,))]


@pytest.fixture(params=SPLITS, ids=str)
def pipeline(request: pytest.FixtureRequest) -> Iterator[Pipeline]:
    made = Pipeline(*request.param)
    yield made
    made.close()


def test_a_lens_reads_rows_of_all_stages(pipeline: Pipeline, collector: Collector) -> None:
    both = LensRequest(
        capture={"layers": [0, 2, 5]},
        lens={"layers": [0, 5], "top_k": 3, "tokens": [2, 39], "positions": "completion"},
    )
    pipeline.begin(collector, "a", sealed(collector, asked(), 10, 8))
    pipeline.begin(collector, "b", sealed(collector, both, 4, 8))
    pipeline.begin(collector, "c", sealed(collector, asked(positions=[1, 4]), 6, 8))
    # Chunks, other requests between, and then steps that repeat, several of them in flight.
    pipeline.step(("x", 9, 0, 3), ("a", 1, 0, 6))
    pipeline.step(("a", 1, 6, 4), ("b", 2, 0, 4), ("c", 3, 0, 6), ("x", 9, 3, 1))
    for i in range(6):
        pipeline.step(("b", 2, 4 + i, 1), ("a", 1, 10 + i, 1), ("x", 9, 4 + i, 1))
    pipeline.drain()
    check(take(collector, "a", 16, 16).tensors[LENS], 1, range(16))
    got = take(collector, "b", 6, 10, captured=10)
    check(got.tensors[LENS], 2, range(4, 10))
    for i, layer in enumerate(LAYERS):
        np.testing.assert_array_equal(got.tensors[ROWS].storage[i], rows(2, layer, 0, 10).numpy())
    named = take(collector, "c", 2, 6).tensors[LENS]
    check(type(named)(named.storage[:, :1], "float32"), 3, range(1, 2))
    check(type(named)(named.storage[:, 1:], "float32"), 3, range(4, 5))
    for stage in pipeline.stages:
        stage.stepper.finish(["a", "b", "c"])
        for key in "abc":
            stage.stepper.remove(key)
        assert not stage.stepper.is_watching
    pipeline.sent.clear()
    pipeline.step(("x", 9, 10, 1))
    pipeline.drain()
    assert pipeline.sent == [0], "nothing crosses where nobody asks"


def test_an_mlp_reads_rows_of_all_stages(pipeline: Pipeline, collector: Collector) -> None:
    uses = tuple(ProbeUse(name=name, positions="all") for name in PROBES)
    request = LensRequest(probes=uses, lens={"layers": [2, 5], "positions": [3]})
    envelope = seal(
        request, FACTS, reply=collector.address, n_prompt=6, max_tokens=8, probes=PROBES
    )
    pipeline.begin(collector, "a", envelope)
    pipeline.step(("a", 1, 0, 6), ("x", 9, 0, 2))
    for i in range(5):
        pipeline.step(("x", 9, 2 + i, 1), ("a", 1, 6 + i, 1))
    pipeline.drain()
    counts = {ROWS: 0, SCORES: 11, LENS: 1}
    found = collector.take("a", counts=counts, n_fed=11, timeout_s=5).tensors[SCORES]
    stream = [rows(1, layer, 0, 11).numpy() for layer in LAYERS]
    w1, w2 = (MLP.tensors[name].to_float32() for name in ("w1", "w2"))
    units = sum(x @ w.T for x, w in zip(stream, w1, strict=True))
    weight = WIDE.tensors["weight"].to_float32()
    linear = stream[0] @ weight[0] + stream[2] @ weight[1]
    scores = found.storage.sum(axis=0)
    np.testing.assert_allclose(scores[:, 0], np.maximum(units, 0) @ w2, rtol=1e-4, atol=1e-3)
    np.testing.assert_allclose(scores[:, 1], linear, rtol=1e-4, atol=1e-3)


def test_what_failed_on_one_stage_fails_and_its_neighbours_go_on(collector: Collector) -> None:
    pipeline = Pipeline((0, 2), (5,))
    try:
        for key in ("d", "b"):
            pipeline.begin(collector, key, sealed(collector, asked(), 4, 8))
        pipeline.step(("d", 1, 0, 4), ("b", 2, 0, 4))
        pipeline.drain()
        pipeline.stages[0].stepper.fail("d", CaptureError("here alone"))
        pipeline.step(("d", 1, 4, 1), ("b", 2, 4, 1))
        pipeline.step(("d", 1, 5, 1), ("b", 2, 5, 1))
        pipeline.drain()
        check(take(collector, "b", 6, 6).tensors[LENS], 2, range(6))
        with pytest.raises(CaptureError, match=r"here alone|an earlier stage of the pipeline"):
            take(collector, "d", 6, 6)
        assert "d" not in pipeline.stages[1].stepper._live.by_key
    finally:
        pipeline.close()


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_what_crosses_is_read_as_it_was_sent(ranks: int) -> None:
    ring = torch.randn(9, HIDDEN)
    lists = [Lent(LENS, [TapPoint("resid_post", 1)], ["a", ""], [2, 1], [4, 0], 0)]
    made = Crossing.room_for(lists, 3, ring, ranks)
    made.rows.copy_(ring[:3])
    tensors = made.tensors(ranks)
    assert all(t.dim() == 1 and (ranks == 1 or t.numel() % ranks) for t in tensors.values())
    found = Crossing.of({LIST_KEY: tensors[LIST_KEY], ROWS_KEY: tensors[ROWS_KEY]}, HIDDEN)
    assert found.lists == lists
    torch.testing.assert_close(found.rows, ring[:3])


def test_a_step_in_which_nothing_crosses_does_nothing_for_it(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline = Pipeline((0, 2), (5,))
    calls: list[int] = []
    monkeypatch.setattr(Stages, "cross", lambda *args: calls.append(1) or [])
    try:
        pipeline.begin(collector, "a", sealed(collector, LensRequest(capture={}), 4, 8))
        pipeline.step(("a", 1, 0, 4))
        pipeline.step(("a", 1, 4, 1))
        pipeline.drain()
        assert not calls
        pipeline.begin(collector, "b", sealed(collector, asked(), 4, 8))
        pipeline.step(("b", 2, 0, 4))
        pipeline.drain()
        assert len(calls) == 2
    finally:
        pipeline.close()


def test_more_rows_than_fit_fail_their_requests_and_say_so(collector: Collector) -> None:
    pipeline = Pipeline((0, 2), (5,))
    pipeline.stages[0].stepper.stages = pipeline.stages[0].stages = Stages(
        is_first=True, is_last=False, ranks=2, most_rows=3
    )
    try:
        # Names of their own: what the other stage says comes later, when others may run.
        for key in ("f", "g"):
            pipeline.begin(collector, key, sealed(collector, asked(), 4, 8))
        pipeline.begin(collector, "c", sealed(collector, LensRequest(capture={}), 4, 8))
        pipeline.step(("f", 1, 0, 2), ("g", 2, 0, 2), ("c", 3, 0, 2))
        pipeline.drain()
        # Each stage has a connection of its own, so the next one may be heard first.
        for key in ("f", "g"):
            with pytest.raises(CaptureError, match=r"4 rows for other .* 3 fit|an earlier stage"):
                take(collector, key, 2, 2)
        assert "c" in pipeline.stages[1].stepper._live.by_key
    finally:
        pipeline.close()


def test_what_comes_is_put_in_place_in_pieces(
    pipeline: Pipeline, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("inspect_lens._engine.step.stages.CROSSING_PIECE", 12 * HIDDEN)
    pipeline.begin(collector, "a", sealed(collector, asked(), 10, 8))
    pipeline.step(("a", 1, 0, 6))
    pipeline.step(("a", 1, 6, 4), ("x", 9, 0, 2))
    pipeline.drain()
    check(take(collector, "a", 10, 10).tensors[LENS], 1, range(10))
