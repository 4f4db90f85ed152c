"""Receipts that are made while the engine is waited for are those that would be made at the end."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm")

from inspect_lens import CaptureSpec, LensRequest, SteeringVector
from inspect_lens._engine.collect.result_memory import ARRIVED
from inspect_lens._engine.protocol.envelope import seal
from inspect_lens._engine.protocol.messages import ROWS, SCORES, Opened, Opening
from inspect_lens._engine.protocol.shared_memory import ArenaWriter
from inspect_lens._vllm.frontend import wrappers
from inspect_lens._vllm.frontend.wrappers import FRONT_END_WRAPPERS
from inspect_lens._vllm.registered.probe_scores import Reading, Reads
from inspect_lens._vllm.registered.registry import Registry
from inspect_lens._vllm.results.attach import Results
from inspect_lens._vllm.results.ticket import Ticket
from inspect_lens.spec import EngineProbe
from tests.unit.vllm.results.test_results import FACTS, completion, expect, output


@pytest.fixture
def results() -> Results:
    return Results(timeout_s=0.1)


PREPARED_REQUESTS: list[dict[str, Any]] = [
    {"capture": CaptureSpec(layers=(0,))},
    {"capture": CaptureSpec(layers=(0, 1), positions=(0, 2, 4))},
    {"capture": CaptureSpec(layers=(0, 1), site=("resid_pre", "resid_post"))},
    {"probes": ["p", "q"]},
    {"capture": CaptureSpec(layers=(1,)), "probes": ["q", {"name": "p", "aggregate": "max"}]},
    {"probes": ["p"], "edits": [SteeringVector(activations=np.ones((1, 4)), layer_indices=[0])]},
]


@pytest.mark.parametrize("asked", PREPARED_REQUESTS)
@pytest.mark.parametrize("n_completion", [1, 2, 4])
def test_what_was_kept_what_would_have_been_made(
    results: Results, monkeypatch: pytest.MonkeyPatch, asked: dict[str, Any], n_completion: int
) -> None:
    probes = {
        name: EngineProbe(layers=(layer,), tensors={"weight": np.ones((1, 4)), "bias": layer})
        for name, layer in (("p", 0), ("q", 1))
    }
    registry, request = Registry(probes), LensRequest(**asked)
    sizes = {"n_prompt": 3, "n_max": 6}
    # vLLM is given the board of a worker, of which there is none here.
    monkeypatch.setattr("inspect_lens._engine.collect.pending.Pending.fed", lambda self: (0, 6))
    found, tensors, arena = [], list[Any](), ArenaWriter(1 << 16)
    for is_prepared in (False, True):
        key = f"k{is_prepared}"
        reads = Reads(request.probes, registry.probes) if request.probes else None
        envelope = seal(
            request, FACTS, reply=results.address, n_prompt=3, max_tokens=4,
            probes=None if reads is None else reads.asked,
        )  # fmt: skip
        lo = 0 if envelope.probes is None else envelope.probes.lo
        reading = None if reads is None else Reading(reads, lo=lo, **sizes)
        results.expect(key, envelope.pack(), reading=reading, **sizes)
        collector = results.the_collector()
        streams = collector._pending[key].streams
        shares = [(0, streams[i].taps) if i in streams else (0, 0) for i in (ROWS, SCORES)]
        opening = Opening(1 + is_prepared, key, shares, len(request.edits))
        with collector.notifier.changed:
            collector._accept_openings(Opened(arena.name, [opening]))
        if is_prepared:
            results.prepare(deque([key]))
            kept = results._expected[key].prepared
            made = None if kept is None else kept.receipt
            assert (made is None) == bool(request.edits), "how much was steered is known at the end"
        for stream in streams.values():
            assert stream.slab is not None
            n = stream.taps * stream.room * stream.width
            values = stream.slab.array(np.dtype(np.float32), (n,))
            values[:] = np.arange(len(values))
            stream.slab.flags[:] = ARRIVED
        choice = completion(0)
        choice.inspect_lens_ticket = Ticket(key, n_completion=n_completion)
        results.attach(output(choice))
        found.append(choice.inspect_lens)
        tensors.append({n: x.storage.tolist() for n, x in choice.inspect_lens_tensors.items()})
        if is_prepared:
            assert (choice.inspect_lens is made) == (made is not None), "it is used"
    plain, prepared = found
    assert prepared == plain
    assert tensors[0] == tensors[1]
    assert prepared.model_dump_json() == plain.model_dump_json()
    assert type(plain).model_validate_json(prepared.model_dump_json()) == plain
    for receipt in plain.probes:
        assert receipt.n_tokens == n_completion - 1
        assert (receipt.score is None) == (n_completion == 1)


def test_each_engine_prepares_for_its_own_requests_and_remembers_so_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prepared: list[list[str]] = []
    fake = SimpleNamespace(
        recorded=SimpleNamespace(take_unflushed=list),
        prepare=lambda queue: prepared.append(list(queue)),
        attach_all=lambda outputs: [],
    )
    monkeypatch.setattr(
        wrappers, "front_end", lambda: SimpleNamespace(results=fake, registry=Registry())
    )
    monkeypatch.setattr(wrappers, "_UNPREPARED_MOST", 3)
    one, other = (SimpleNamespace(output_processor=SimpleNamespace()) for _ in range(2))
    for i in range(5):
        wrappers._remember(one.output_processor, f"one-{i}")
    wrappers._remember(other.output_processor, "other")
    step = FRONT_END_WRAPPERS["engine_step"](lambda self: [output(completion(0))])
    for engine in (other, one, SimpleNamespace(model_executor=None)):
        step(engine)
    assert prepared == [["other"], ["one-0", "one-1", "one-2"]], "the third waits for no engine"


def test_what_is_over_is_not_prepared(results: Results) -> None:
    expect(results, "k", LensRequest(capture=CaptureSpec(layers=(0,))))
    results.abandon(["k"])
    queue = deque(["k", "gone"])
    results.prepare(queue)
    assert not queue
