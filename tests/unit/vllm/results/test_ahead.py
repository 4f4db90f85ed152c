"""Results that are made ready while their rows still come, and taken together when all have."""

from __future__ import annotations

import itertools
from collections import deque
from threading import Lock
from typing import Any

import numpy as np
import pytest

from inspect_lens import CaptureSpec, LensRequest
from inspect_lens._engine.collect.collector import Collector
from inspect_lens._engine.protocol.messages import Failure, Opened, Opening, seal
from inspect_lens._vllm.registered.probe_scores import Reading, Reads
from inspect_lens._vllm.registered.registry import Registry
from inspect_lens._vllm.results.attach import Results
from inspect_lens._vllm.results.choices import Choice, Ticket
from inspect_lens.errors import CaptureError, SpecError
from inspect_lens.probe import pool_scores
from inspect_lens.spec import EngineProbe, ProbeUse
from tests.kit.steps import FACTS, HIDDEN, LAYERS, Worker, exporter
from tests.unit.vllm.results.test_results import completion, output

RNG = np.random.default_rng(0)
PROBES = {
    name: EngineProbe(
        layers=LAYERS, tensors={"weight": RNG.normal(size=(3, HIDDEN)), "bias": RNG.normal()}
    )
    for name in ("p", "q", "r")
}
N_PROMPT, N_MAX = 3, 7
KEYS = (f"ahead{i}" for i in itertools.count())


class Engine:
    """A front-end and a worker."""

    def __init__(self) -> None:
        self.results = Results(timeout_s=2.0)
        self.worker = Worker(exporter())
        for probe in PROBES.values():
            self.worker.stepper.probes.add(probe)
        self.asked: dict[str, int] = {}
        self.registry = Registry(PROBES)
        self.uses: dict[str, tuple[ProbeUse, ...]] = {}

    @property
    def collector(self) -> Collector:
        return self.results.the_collector()

    def start(self, request: LensRequest, *, is_waiting: bool = False) -> str:
        key = next(KEYS)
        # Equal requests share their uses, as those that vLLM is given do, and are read together.
        uses = self.uses.setdefault(str(request.probes), request.probes)
        reads = Reads(uses, self.registry.probes) if uses else None
        envelope = seal(
            request,
            FACTS,
            reply=self.results.address,
            n_prompt=N_PROMPT,
            max_tokens=N_MAX - N_PROMPT + 1,
            probes=None if reads is None else reads.asked,
        )
        sizes = {"n_prompt": N_PROMPT, "n_max": N_MAX}
        lo = 0 if envelope.probes is None else envelope.probes.lo
        reading = None if reads is None else Reading(reads, lo=lo, **sizes)
        self.results.expect(key, envelope.pack(), reading=reading, **sizes)
        if not is_waiting:
            self.worker.stepper.add(key, dict(envelope.pack()))
        self.asked[key] = len(self.asked)
        return key

    def step(self, keys: list[str], position: int, tokens: int = 1) -> None:
        self.worker.step([(key, self.asked[key], position, tokens) for key in keys])

    def run(self, keys: list[str], first: int = N_PROMPT, until: int = N_MAX) -> None:
        for position in range(first, until):
            self.step(keys, position)

    def prepared(self, n: int, name: str) -> list[str]:
        """Requests of `REQUESTS` that are prepared for, when their prompts have been fed."""
        keys = [self.start(LensRequest(**REQUESTS[name])) for _ in range(n)]
        self.step(keys, 0, N_PROMPT)
        self.settle()
        self.results.prepare(deque(keys))
        return keys

    def end(self, keys: list[str], n_completion: int = N_MAX - N_PROMPT + 1) -> list[Any]:
        self.worker.stepper.leave(keys)
        choices = [completion(0) for _ in keys]
        for choice, key in zip(choices, keys, strict=True):
            choice.inspect_lens_ticket = Ticket(key, n_completion=n_completion)
        outputs = [output(choice) for choice in choices]
        self.errors = self.results.attach_all(outputs)
        for key in keys:
            self.worker.stepper.remove(key)
        return outputs

    def settle(self) -> None:
        """Wait until the receiving thread has done what the worker asked of it."""
        probe = self.start(LensRequest(capture=CaptureSpec(layers=(0,))))
        self.step([probe], 0, N_PROMPT)
        self.end([probe], 1)
        assert not self.errors


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Choices that were taken on their own."""
    found: list[str] = []
    take = Choice.take

    def note(self: Choice, *args: Any, **kwargs: Any) -> None:
        found.append(self.ticket.key)
        take(self, *args, **kwargs)

    monkeypatch.setattr(Choice, "take", note)
    return found


REQUESTS: dict[str, dict[str, Any]] = {
    "rows": {"capture": CaptureSpec(layers=(0, 5))},
    "some rows": {"capture": CaptureSpec(layers=(2,), positions=(0, 4, -1))},
    "prompt": {"capture": CaptureSpec(layers=(2,), positions="prompt")},
    "means": {"probes": ["p", "q"]},
    "one mean": {"probes": ["r"]},
    "means of prompts": {"probes": [{"name": "p", "positions": "prompt"}]},
    "both": {"capture": CaptureSpec(layers=(5,)), "probes": ["q", "p"]},
    "other pools": {"probes": ["p", {"name": "q", "aggregate": "max"}]},
    "two kinds of means": {"probes": ["p", {"name": "q", "positions": "all"}]},
    "tokens": {"probes": [{"name": "p", "tokens": True}]},
    "reduced": {"capture": CaptureSpec(layers=(0, 5), reduce="mean"), "probes": ["p"]},
}


def results_of(outputs: list[Any]) -> list[Any]:
    found = []
    for one in outputs:
        (choice,) = one.outputs
        assert one.inspect_lens is choice.inspect_lens
        named = {name: t.storage.tolist() for name, t in choice.inspect_lens_tensors.items()}
        as_torch = {n: t.tolist() for n, t in getattr(choice, "activations", {}).items()}
        assert named == as_torch
        part = getattr(choice, "inspect_lens_partial", None)
        scores = None if part is None else dict(part.scores)
        found.append((choice.inspect_lens.model_dump(), named, scores))
    return found


@pytest.mark.parametrize("asked", REQUESTS.values(), ids=REQUESTS.keys())
@pytest.mark.parametrize("n_completion", [1, 2, 4, 5])
def test_it_makes_no_difference_to_anything(
    engine: Engine, asked: dict[str, Any], n_completion: int
) -> None:
    """All rows, bits of scores, and receipts; also of texts that end early."""
    found = []
    for prepared_at in (None, N_PROMPT, N_MAX - 1):
        engine.asked.clear()
        keys = [engine.start(LensRequest(**asked)) for _ in range(3)]
        queue = deque(keys)
        engine.step(keys, 0, N_PROMPT)
        for position in range(N_PROMPT, N_PROMPT + n_completion - 1):
            if position == prepared_at:
                engine.settle()
                engine.results.prepare(queue)
                assert not queue
            engine.step(keys, position)
        found.append(results_of(engine.end(keys, n_completion)))
        assert not engine.errors
    assert found[0] == found[1] == found[2]
    receipt = found[0][0][0]
    assert receipt["n_completion"] == n_completion
    assert [p["score"] is None for p in receipt["probes"] or ()] == [
        n_completion == 1 and p["name"] in ("p", "q", "r") and p["first_position"] is None
        for p in receipt["probes"] or ()
    ]


def test_requests_that_wait_for_the_engine_keep_no_others_from_being_prepared(
    engine: Engine,
) -> None:
    asked = LensRequest(**REQUESTS["both"])
    waiting = [engine.start(asked, is_waiting=True) for _ in range(40)]
    begun = engine.start(asked)
    engine.step([begun], 0, N_PROMPT)
    engine.settle()
    queue = deque([*waiting, begun])
    while engine.results.expected(begun).prepared is None:  # type: ignore[union-attr]
        assert len(queue) == 41
        engine.results.prepare(queue)
    assert sorted(queue) == sorted(waiting)
    engine.results.abandon([*waiting, begun])
    engine.worker.stepper.remove(begun)
    while queue:
        assert engine.results.prepare(queue), "of those that are over nothing is left"


def test_what_has_come_is_taken_together_and_waits_for_nobody(
    engine: Engine, waits: list[str]
) -> None:
    keys = [engine.start(LensRequest(**REQUESTS["both"])) for _ in range(40)]
    queue = deque(keys)
    assert not engine.results.prepare(queue)
    assert list(queue) == keys[32:] + keys[:32], "no worker has taken them up"
    together = [keys[i : i + 8] for i in range(0, 40, 8)]
    for some in together:
        engine.step(some, 0, N_PROMPT)
    engine.settle()
    waits.clear()
    engine.results.prepare(queue)
    engine.results.prepare(queue)
    assert not queue
    for some in together:
        engine.run(some)
    engine.settle()
    waits.clear()
    engine.collector.notifier.hurry.set()  # as somebody does who reads scores as they come
    outputs = engine.end(keys)
    assert not engine.errors
    assert not waits
    assert not engine.collector.notifier.hurry.is_set(), "nobody waits any more"
    for number, one in enumerate(outputs):
        rows = one.activations["residual_stream"][0].numpy()
        truth = np.zeros((N_MAX, HIDDEN))
        truth[:, 0], truth[:, 1], truth[:, 2] = number, 5, np.arange(N_MAX)
        np.testing.assert_array_equal(rows, truth)
        for name, receipt in zip("qp", one.inspect_lens.probes, strict=True):
            assert (receipt.name, receipt.first_position) == (name, N_PROMPT)
            scores = np.full(N_MAX - N_PROMPT, PROBES[name].bias("bias"))
            weight = PROBES[name].tensors["weight"].to_float32().astype(np.float64)
            for layer, mine in zip(LAYERS, weight, strict=True):
                truth[:, 1] = layer
                scores += truth[N_PROMPT:] @ mine
            assert receipt.score == pytest.approx(pool_scores(scores, "mean"), rel=1e-5)


def test_rows_that_are_late_are_waited_for(engine: Engine, waits: list[str]) -> None:
    keys = engine.prepared(2, "both")
    engine.run(keys[:1])
    engine.run(keys[1:], until=N_MAX - 1)
    engine.settle()
    waits.clear()
    late, accept, is_held = [], engine.collector._accept, Lock()

    def keep(data: bytes) -> None:
        # The thread that receives may be in here while rows are given back.
        with is_held:
            if is_late := engine.collector._accept != accept:
                late.append(data)
        if not is_late:
            accept(data)

    engine.collector._accept = keep  # type: ignore[method-assign]
    engine.step(keys[1:], N_MAX - 1)
    wait_for = engine.collector.notifier.wait_for

    def wait(*args: Any) -> bool:
        with is_held:
            engine.collector._accept = accept  # type: ignore[method-assign]
            while late:
                accept(late.pop(0))
        return wait_for(*args)

    engine.collector.notifier.wait_for = wait  # type: ignore[method-assign]
    first, second = engine.end(keys)
    assert not engine.errors
    assert waits == keys[1:]
    assert second.activations["residual_stream"][0, :, 0].tolist() == N_MAX * [1.0]
    assert first.inspect_lens.probes[0].n_tokens == second.inspect_lens.probes[0].n_tokens == 4


def test_rows_that_are_computed_again_lie_where_they_were_to_come(
    engine: Engine, waits: list[str]
) -> None:
    (key,) = keys = engine.prepared(1, "both")
    engine.run(keys, until=5)
    # Pre-empted, and taken up again under another number.
    engine.asked[key] = 9
    engine.step(keys, 0, 5)
    engine.run(keys, 5)
    engine.settle()
    waits.clear()
    (one,) = engine.end(keys)
    assert not waits
    assert one.activations["residual_stream"][0, :, 0].tolist() == N_MAX * [9.0]


def test_a_failure_is_told_of_what_was_prepared(engine: Engine) -> None:
    keys = engine.prepared(2, "both")
    engine.run(keys)
    engine.settle()
    with engine.collector.notifier.changed:
        engine.collector._pending[keys[0]].failure = Failure(keys[0], "SpecError", "so it is")
    failed, whole = engine.end(keys)
    (error,) = engine.errors
    assert isinstance(error, SpecError)
    assert "so it is" in str(error)
    assert not hasattr(failed, "inspect_lens")
    assert whole.inspect_lens.probes[0].n_tokens == 4


def test_one_score_that_is_no_number_fails_its_own_request(engine: Engine) -> None:
    keys = engine.prepared(3, "means")
    engine.run(keys)
    engine.settle()
    whole = [engine.results._expected[key].prepared.whole for key in keys]  # type: ignore[union-attr]
    assert all(one is not None for one in whole)
    whole[1].columns[2, 1] = np.nan  # type: ignore[union-attr]
    outputs = engine.end(keys)
    assert ["'q' gave NaN" in str(error) for error in engine.errors] == [True]
    assert [hasattr(one, "inspect_lens") for one in outputs] == [True, False, True]
    assert outputs[0].inspect_lens.probes[1].score == pytest.approx(
        outputs[2].inspect_lens.probes[1].score
        - 2 * PROBES["q"].tensors["weight"].to_float32()[:, 0].sum(),
        rel=1e-4,
    )


def test_an_aborted_request_that_was_prepared_leaves_nothing(engine: Engine) -> None:
    (key,) = engine.prepared(1, "both")
    engine.results.abandon([key])
    engine.worker.stepper.remove(key)
    engine.settle()
    choice = completion(0)
    choice.inspect_lens_ticket = Ticket(key, n_completion=5)
    (error,) = engine.results.attach_all([output(choice)])
    assert isinstance(error, CaptureError)


@pytest.mark.parametrize("is_speculative", [False, True])
@pytest.mark.parametrize("taps", [2, 3])
def test_what_drafts_or_other_workers_may_change_is_made_at_the_end(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, is_speculative: bool, taps: int
) -> None:
    """Of three taps a worker has two: the others are those of a later stage of the pipeline."""
    key = engine.start(LensRequest(**REQUESTS["means"]))
    expected = engine.results._expected[key]
    object.__setattr__(expected.envelope, "is_speculative", is_speculative)
    name = engine.worker.stepper.arena.name
    with engine.collector.notifier.changed:
        opening = Opening(77, key, [(0, 0), (0, taps)], 0)
        engine.collector._accept_openings(Opened(name, [opening]))
    engine.results.prepare(deque([key]))
    assert expected.prepared is not None
    assert bool(expected.prepared.coming) == (taps == 3 and not is_speculative)
    engine.results.abandon([key])
