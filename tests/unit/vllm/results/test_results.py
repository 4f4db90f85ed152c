"""Tickets and results in the front-end: merged outputs, failing choices, aborts, salts."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import weakref
from collections.abc import AsyncGenerator, Iterable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from inspect_lens import CaptureSpec, LensRequest, SteeringVector
from inspect_lens._base.partial import Partial
from inspect_lens._engine.collect.placement import Collected, Further
from inspect_lens._engine.protocol.messages import SCORES, seal
from inspect_lens._vllm.frontend.wrappers import FRONT_END_WRAPPERS
from inspect_lens._vllm.registered.probe_scores import Reading, Reads
from inspect_lens._vllm.registered.registry import Registry
from inspect_lens._vllm.results.attach import Results
from inspect_lens._vllm.results.choices import Ticket, has_tickets, is_running
from inspect_lens.errors import CaptureError
from inspect_lens.spec import EngineProbe, TensorData, tap_points
from tests.kit.facts import engine_facts

FACTS = engine_facts(
    n_layers=2, hidden=4, sites=("resid_pre", "resid_post"),
    taps=tap_points(["resid_pre", "resid_post"], (0, 1)), max_step_tokens=32,
)  # fmt: skip


def completion(index: int, key: str | None = None) -> Any:
    made = SimpleNamespace(index=index, text="x", token_ids=[1])
    if key is not None:
        made.inspect_lens_ticket = Ticket(key, n_completion=2)
    return made


def output(*completions: Any, finished: bool = True) -> Any:
    return SimpleNamespace(outputs=list(completions), finished=finished)


def test_a_merged_output_keeps_its_ticket() -> None:
    def merge(self: Any, next_output: Any, aggregate: bool) -> None:
        for mine, theirs in zip(self.outputs, next_output.outputs, strict=True):
            mine.text += theirs.text

    add = FRONT_END_WRAPPERS["output_add"](merge)
    first, last = output(completion(0), finished=False), output(completion(0, "k"))
    add(first, last, True)
    assert first.outputs[0].text == "xx"
    assert has_tickets(first)


@pytest.mark.parametrize("aggregate", [True, False])
def test_outputs_that_vllm_merges_say_how_long_the_text_is_by_then(aggregate: bool) -> None:
    """What is ready of results is taken when somebody reads the output, by that."""
    from vllm.outputs import CompletionOutput, RequestOutput

    from inspect_lens._vllm.compat.monkeypatches import monkeypatch as named
    from inspect_lens._vllm.compat.monkeypatches import resolve

    def delta(index: int, n_completion: int, *, is_last: bool = False) -> Any:
        one = CompletionOutput(index, "x", [1], None, None)
        name = "inspect_lens_ticket" if is_last else "inspect_lens_running"
        setattr(one, name, Ticket(f"k{index}", n_completion))
        return RequestOutput("r", None, [1], None, [one], finished=False)

    add = FRONT_END_WRAPPERS["output_add"](resolve(named("output_add"))[2])
    waiting = delta(0, 1)
    for later in (delta(0, 2), delta(1, 1), delta(0, 3), delta(1, 2, is_last=True)):
        add(waiting, later, aggregate)
    mine, other = waiting.outputs
    assert mine.inspect_lens_running == Ticket("k0", 3)
    assert (is_running(mine), is_running(other)) == (True, False)
    assert other.inspect_lens_ticket == Ticket("k1", 2)


def test_steps_of_an_engine_that_nobody_asks_for_results_open_nothing(results: Results) -> None:
    assert results.attach_all([]) == []
    assert results._collector is None


@pytest.mark.parametrize("is_in_process", [True, False])
def test_only_an_engine_that_waits_for_its_caller_is_asked_for_what_is_kept(
    monkeypatch: pytest.MonkeyPatch, is_in_process: bool
) -> None:
    attached: list[Any] = []
    kept = SimpleNamespace(take_unflushed=list)
    fake = SimpleNamespace(attach_all=attached.extend, recorded=kept, n_open=0, spoil=list)
    monkeypatch.setattr(
        "inspect_lens._vllm.frontend.wrappers.front_end",
        lambda: SimpleNamespace(results=fake, registry=Registry()),
    )
    asked: list[Any] = []
    engine = SimpleNamespace(collective_rpc=lambda *what, args: asked.append((*what, args)) or [])
    if is_in_process:
        engine.model_executor = None
    done = [output(completion(0, "k")), output(completion(0, "plain")), output(completion(0))]
    assert FRONT_END_WRAPPERS["engine_step"](lambda self: done)(engine) is done
    assert attached == done[:2]
    flush = ("inspect_lens_hooks", ("flush", ["k", "plain"]))
    assert asked == ([flush] if is_in_process else [])


@pytest.fixture
def results() -> Results:
    return Results(timeout_s=0.1)


def expect(results: Results, key: str, request: LensRequest) -> str | None:
    envelope = seal(
        request,
        FACTS,
        reply=results.address,
        n_prompt=3,
        max_tokens=4,
        epoch=results.salt,
    )
    results.expect(key, envelope.pack(), n_prompt=3)
    return envelope.steer_hash


def test_when_one_choice_fails_none_is_left(results: Results) -> None:
    for key in "ab":
        expect(results, key, LensRequest(capture=CaptureSpec(layers=(0,))))
    with pytest.raises(CaptureError, match="4 of 4 captured rows"):
        results.attach(output(completion(0, "a"), completion(1, "b")))
    assert results.n_open == 0


def test_what_an_engine_aborts_unread_is_an_error_at_once() -> None:
    results = Results(timeout_s=60.0)
    expect(results, "d", LensRequest(capture=CaptureSpec(layers=(0,))))
    ended = completion(0)
    ended.inspect_lens_ticket = Ticket("d", n_completion=0, n_last=0)
    with pytest.raises(CaptureError, match="aborted before its first token"):
        results.attach(output(ended))
    assert results.n_open == 0


def test_failures_of_ever_other_steering_take_no_more_memory_and_no_salt_comes_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("inspect_lens._vllm.results.attach._FAILURES_MOST", 3, raising=False)
    results, salts = Results(timeout_s=0.001), []
    for i in range(20):
        vector = SteeringVector(activations=np.full((1, 4), 1.0 + i % 5), layer_indices=[0])
        salts.append(expect(results, f"k{i}", LensRequest(edits=[vector])))
        with pytest.raises(CaptureError):
            results.attach(output(completion(0, f"k{i}")))
    assert len(set(salts)) == 20
    assert len(results._failures) <= 3


@pytest.mark.parametrize("is_batch", [False, True])
def test_who_is_interrupted_while_waiting_leaves_nothing(
    results: Results, monkeypatch: pytest.MonkeyPatch, is_batch: bool
) -> None:
    for key in "ef":
        expect(results, key, LensRequest(capture=CaptureSpec(layers=(0,))))
    assert results._collector is not None

    def interrupted(*args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(results._collector.notifier, "wait_for", interrupted)
    one, other = completion(0, "e"), completion(1, "f")
    with pytest.raises(KeyboardInterrupt):
        results.attach_all([output(one), output(other)] if is_batch else [output(one, other)])
    assert results.n_open == results._collector.n_open == 0


@pytest.mark.parametrize("way", ["attach", "step", "run"])
def test_an_error_goes_with_who_holds_it_and_takes_its_request_along(
    results: Results, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """Its traceback leads to the memory of results, which must not wait for the collector."""
    for key in "gh":
        expect(results, key, LensRequest(capture=CaptureSpec(layers=(0,))))
    held = [weakref.ref(results._expected[key].envelope) for key in "gh"]
    monkeypatch.setattr(
        "inspect_lens._vllm.frontend.wrappers.front_end",
        lambda: SimpleNamespace(results=results, registry=Registry()),
    )
    engine = SimpleNamespace(collective_rpc=lambda *_, **__: [], model_executor=None)

    def step() -> None:
        done = [output(completion(0, key)) for key in "gh"]
        FRONT_END_WRAPPERS["engine_step"](lambda self: done)(engine)

    ways: dict[str, Any] = {
        "attach": lambda: results.attach(output(completion(0, "g"))),
        "step": step,
        "run": lambda: FRONT_END_WRAPPERS["run_engine"](lambda self: step())(engine),
    }
    gc.collect()
    gc.disable()
    try:
        with contextlib.suppress(CaptureError):
            ways[way]()
        if way == "attach":
            results.abandon("h")
        assert [one() for one in held] == [None, None]
    finally:
        gc.enable()


def test_an_aborted_request_is_an_error_and_not_an_answer_without_rows(results: Results) -> None:
    expect(results, "c", LensRequest(capture=CaptureSpec(layers=(0,))))
    results.abandon(["c"])
    with pytest.raises(CaptureError, match="aborted"):
        results.attach(output(completion(0, "c")))


def test_the_salt_changes_after_a_failure_and_between_processes(results: Results) -> None:
    vector = SteeringVector(activations=np.ones((1, 4)), layer_indices=[0])
    request = LensRequest(edits=(vector,))
    before = expect(results, "d", request)
    assert expect(results, "e", request) == before
    with pytest.raises(CaptureError, match="must not be used"):
        results.attach(output(completion(0, "d")))
    assert expect(results, "f", request) != before
    assert expect(Results(timeout_s=0.1), "g", request) != before


def core_request(key: str, params: Any) -> Any:
    from vllm.v1.engine import EngineCoreRequest

    values = {field: None for field in EngineCoreRequest.__struct_fields__}
    known = {
        "request_id": key,
        "external_req_id": "outside",
        "prompt_token_ids": [1, 2, 3],
        "sampling_params": params,
        "arrival_time": 0.0,
    }
    return EngineCoreRequest(**{**values, **known})


def processor_of_two_choices(results: Results, monkeypatch: pytest.MonkeyPatch) -> Any:
    """vLLM's own, with two choices of the request `inside`."""
    from vllm.sampling_params import RequestOutputKind, SamplingParams
    from vllm.v1.engine.output_processor import OutputProcessor
    from vllm.v1.engine.parallel_sampling import ParentRequest

    from inspect_lens._vllm.compat.monkeypatches import monkeypatch as named
    from inspect_lens._vllm.compat.monkeypatches import resolve
    from inspect_lens.spec import ENVELOPE_KEY

    monkeypatch.setattr(
        "inspect_lens._vllm.frontend.wrappers.front_end",
        lambda: SimpleNamespace(results=results, registry=Registry()),
    )
    wrapped = {
        name: FRONT_END_WRAPPERS[name](resolve(named(name))[2])
        for name in ("add_request", "abort_requests")
    }
    processor = type("Wrapped", (OutputProcessor,), wrapped)(None, log_stats=False)

    capture = LensRequest(capture=CaptureSpec(layers=(0,)))
    envelope = seal(capture, FACTS, reply=results.address, n_prompt=3, max_tokens=4)
    params = SamplingParams(
        n=2, max_tokens=4, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY
    )
    params.extra_args = {ENVELOPE_KEY: envelope.pack()}
    parent = ParentRequest(core_request("inside", params))
    for index in range(2):
        key, own = parent.get_child_info(index)
        processor.add_request(core_request(key, own), None, parent, index)
    assert results.n_open == 2
    return processor


def left_nothing(results: Results) -> bool:
    assert results._collector is not None
    return not (results.n_open or results._choices or results._collector.n_open)


@pytest.mark.parametrize(
    ("finished", "internal"),
    # Of a request that has finished vLLM knows no outside id.
    [(0, True), (1, True), (2, True), (0, False), (1, False)],
)
def test_a_client_that_goes_away_leaves_no_choice_that_has_finished(
    results: Results, monkeypatch: pytest.MonkeyPatch, finished: int, internal: bool
) -> None:
    from vllm.v1.engine import EngineCoreOutput, FinishReason

    processor = processor_of_two_choices(results, monkeypatch)
    for index in range(finished):
        ended = EngineCoreOutput(
            request_id=f"{index}_inside", new_token_ids=[7], finish_reason=FinishReason.LENGTH
        )
        processor.process_outputs([ended])
    assert results.n_open == 2
    processor.abort_requests(iter(["inside" if internal else "outside"]), internal=internal)
    assert left_nothing(results)


def test_choices_that_cannot_be_sent_are_forgotten_by_vllm_and_its_engine(
    results: Results, monkeypatch: pytest.MonkeyPatch
) -> None:
    processors, told = list[Any](), list[str]()

    async def generate(self: Any) -> AsyncGenerator[Any, None]:
        processors.append(processor_of_two_choices(results, monkeypatch))
        raise OverflowError("no message can hold it")
        yield

    async def abort(keys: Iterable[str], *, internal: bool) -> None:
        told.extend(processors[0].abort_requests(keys, internal))

    class Engine(SimpleNamespace):
        @property
        def output_processor(self) -> Any:
            return processors[0]

    async def read() -> None:
        async for _ in FRONT_END_WRAPPERS["async_generate"](generate)(engine):
            pass

    engine = Engine(
        input_processor=SimpleNamespace(inspect_lens_facts=FACTS), engine_core=None, abort=abort
    )
    monkeypatch.setattr("inspect_lens._vllm.frontend.wrappers.judge_early", lambda *args: 0)
    monkeypatch.setattr("inspect_lens._vllm.frontend.wrappers.routes_of", lambda engine: {})
    monkeypatch.setattr(
        "inspect_lens._vllm.frontend.wrappers.front_end",
        lambda: SimpleNamespace(results=results, registry=Registry()),
    )
    with pytest.raises(OverflowError):
        asyncio.run(read())
    assert sorted(told) == ["0_inside", "1_inside"], "the engine may have the first one"
    assert left_nothing(results)
    assert not processors[0].request_states
    assert not processors[0].parent_requests


def test_a_request_that_vllm_does_not_take_is_not_expected(
    results: Results, monkeypatch: pytest.MonkeyPatch
) -> None:
    from inspect_lens.spec import ENVELOPE_KEY

    monkeypatch.setattr(
        "inspect_lens._vllm.frontend.wrappers.front_end",
        lambda: SimpleNamespace(results=results, registry=Registry()),
    )

    def full(*args: Any) -> None:
        raise ValueError("too many requests")

    capture = LensRequest(capture=CaptureSpec(layers=(0,)))
    envelope = seal(capture, FACTS, reply=results.address, n_prompt=3, max_tokens=4)
    params = SimpleNamespace(extra_args={ENVELOPE_KEY: envelope.pack()}, max_tokens=4)
    with pytest.raises(ValueError, match="too many"):
        FRONT_END_WRAPPERS["add_request"](full)(None, core_request("r", params), None)
    assert results.n_open == 0


@pytest.mark.parametrize("alarm", [None, "stop"])
def test_scores_of_tokens_behind_the_end_are_not_read(results: Results, alarm: str | None) -> None:
    # The engine runs ahead of a front-end that is slow, which then finds a stop string.
    probe = EngineProbe(layers=(0,), tensors={"weight": np.ones((1, 4))}, threshold=3.5)
    registry = Registry({"p": probe})
    uses = LensRequest(probes=[{"name": "p", "tokens": True, "alarm": alarm}])
    envelope = seal(
        uses, FACTS, reply=results.address, n_prompt=3, max_tokens=9, probes=registry.probes
    )
    reading = Reading(
        Reads(uses.probes, registry.probes), lo=envelope.probes.lo if envelope.probes else 0,
        n_prompt=3, n_max=11,
    )  # fmt: skip
    results.expect("k", envelope.pack(), n_prompt=3, reading=reading)
    come = np.arange(1.0, 8.0, dtype=np.float32).reshape(1, 7, 1)  # of seven sampled tokens

    class Ahead:
        def further(self, key: str, since: dict[int, int], *, n_fed: int, **_: Any) -> Any:
            return Further({SCORES: come[:, since[SCORES] : n_fed - 3]}, {}, {})

        def take(self, key: str, *, counts: dict[int, int], **_: Any) -> Any:
            return Collected({SCORES: TensorData(come[:, : counts[SCORES]], "float32")}, 0, ())

        saved = SimpleNamespace(take=lambda *_, **__: None)

    results._collector = Ahead()  # type: ignore[assignment]
    streamed: list[float] = []
    for n_completion in (1, 2, 3):
        going_on = completion(0)
        going_on.inspect_lens_running = Ticket("k", n_completion=n_completion)
        results.carry(output(going_on), is_kept=True)
        streamed += partial_scores(going_on)
        assert streamed == come[0, : n_completion - 1, 0].tolist()
    assert results.alarm("k", 3) is None
    choice = completion(0)
    choice.inspect_lens_ticket = Ticket("k", n_completion=4)
    results.attach(output(choice))
    (receipt,) = choice.inspect_lens.probes
    assert receipt.tokens == (1.0, 2.0, 3.0)
    assert (receipt.n_tokens, receipt.score, receipt.alarm_position) == (3, 2.0, None)
    assert partial_scores(choice) == [3.0]


def partial_scores(completion: Any) -> list[float]:
    part: Partial | None = getattr(completion, "inspect_lens_partial", None)
    return [] if part is None else list(part.scores["p"])
