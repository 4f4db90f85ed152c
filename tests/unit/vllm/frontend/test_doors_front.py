"""A fault at a door of the front-end is the error of its own request, and of nobody else."""

# ruff: noqa: F811

from __future__ import annotations

import asyncio
import signal
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from inspect_lens import LensRequest
from inspect_lens._engine.collect import collector
from inspect_lens._vllm.frontend import admission, wrappers
from inspect_lens._vllm.frontend.wrappers import FRONT_END_WRAPPERS
from inspect_lens._vllm.results import attach as attaching
from inspect_lens._vllm.results import event_loop
from inspect_lens._vllm.results.attach import stop_at_alarm
from inspect_lens.errors import CaptureError, LensError, UnsupportedError
from inspect_lens.spec import ENVELOPE_KEY
from tests.unit.vllm.results.test_ahead import N_PROMPT, REQUESTS, Engine
from tests.unit.vllm.results.test_arrivals import (
    N_COMPLETION,
    attach,
    begun,
    ended,
    last_step,
    removed,
)
from tests.unit.vllm.results.test_results import completion, output
from tests.unit.vllm.worker.test_doors_worker import one_fault as fault  # noqa: F401
from tests.unit.vllm.worker.test_doors_worker import raising


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    made = Engine()
    with ThreadPoolExecutor(1) as pool:
        front = SimpleNamespace(results=made.results, waiting=pool, registry=made.registry)
        monkeypatch.setattr(wrappers, "front_end", lambda: front)
        yield made
        monkeypatch.undo()
    assert made.results.n_open == made.collector.n_open == 0
    assert not made.results._spoiled
    made.worker.stepper.close()
    made.collector.close()


def state_of(key: str) -> Any:
    detokenizer = SimpleNamespace(num_output_tokens=lambda: N_COMPLETION, update=lambda: None)
    return SimpleNamespace(
        request_id=key, detokenizer=detokenizer, num_cached_tokens=0, stream_interval=1
    )


def outputs_of(keys: list[str], *, finished: bool = True) -> list[Any]:
    """What vLLM's output handler makes of some requests, one after the other."""
    make = FRONT_END_WRAPPERS["new_completion_output"](lambda *args: completion(0))
    reason = "length" if finished else None
    return [output(make(state_of(key), [1], reason, None)) for key in keys]


def test_a_request_that_somebody_has_made_is_not_passed_over() -> None:
    """vLLM hands an `EngineCoreRequest` on without the processor that judges requests."""
    params = SimpleNamespace(extra_args={"inspect_lens": {"capture": {"layers": [0]}}})
    made = SimpleNamespace(request_id="r", sampling_params=params)
    came: list[Any] = []
    add = FRONT_END_WRAPPERS["add_request"](lambda self, request, *rest: came.append(request))
    with pytest.raises(UnsupportedError, match="nobody has judged it"):
        add(None, made, "a prompt")
    assert not came


@pytest.mark.parametrize("where", ["Ticket", "carry", "has_come"])
def test_outputs_of_others_are_handed_out(
    engine: Engine,
    monkeypatch: pytest.MonkeyPatch,
    fault: BaseException,
    where: str,
) -> None:
    ill, other = begun(engine, 2, "tokens")
    with monkeypatch.context() as patch:
        if where == "Ticket":
            real = wrappers.Ticket

            def ticket(key: str, *, n_completion: int, n_last: int = 1, **more: Any) -> Any:
                if key == ill and n_completion:
                    raise fault
                return real(key, n_completion=n_completion, n_last=n_last, **more)

            patch.setattr(wrappers, "Ticket", ticket)
        else:
            patch.setattr(engine.results, where, raising(fault))
        plain, going_on = outputs_of(["nobody's", ill], finished=where == "Ticket")
        wrappers.carry_now([plain, going_on], may_wait=True)
        last_step(engine, [ill, other])
        engine.worker.stepper.leave([ill, other])
        if where == "Ticket":
            bad, good = outputs_of([ill, other])
    if where != "Ticket":
        bad, good = outputs_of([ill, other])
    assert not hasattr(plain.outputs[0], "inspect_lens_ticket")
    error, nothing = attach(engine, [bad, good])
    removed(engine, [ill, other])
    assert isinstance(error, CaptureError)
    assert type(fault).__name__ in str(error)
    assert nothing is None
    assert good.inspect_lens.n_completion == N_COMPLETION


def test_an_alarm_that_cannot_be_looked_at_ends_its_own_text(
    engine: Engine,
    monkeypatch: pytest.MonkeyPatch,
    fault: BaseException,
) -> None:
    ill, other = begun(engine, 2, "tokens")
    state = state_of(ill)
    stop_at_alarm(state, engine.results)
    with monkeypatch.context() as patch:
        patch.setattr(engine.results, "the_collector", raising(fault))
        assert state.detokenizer.update() == "inspect_lens:fault", "vLLM stops it"
    last_step(engine, [ill, other])
    engine.worker.stepper.leave([ill, other])
    error, nothing = engine.results.attach_each(outputs_of([ill, other]))
    removed(engine, [ill, other])
    assert isinstance(error, CaptureError)
    assert nothing is None


def test_outputs_that_cannot_be_merged_are_an_error_to_their_reader(
    monkeypatch: pytest.MonkeyPatch, fault: BaseException
) -> None:
    add = FRONT_END_WRAPPERS["output_add"](lambda self, later, aggregate: None)
    monkeypatch.setattr(wrappers, "keep_tickets", raising(fault))
    plain, ours = output(completion(0)), output(completion(0))
    add(plain, output(completion(0)), True)
    add(ours, output(completion(0, "k")), True)
    monkeypatch.setattr(wrappers, "judge_early", lambda *args: 0)

    async def made(self: Any, one: Any) -> Any:
        yield one

    async def read(one: Any) -> list[Any]:
        generate = FRONT_END_WRAPPERS["async_generate"](made)
        fake = SimpleNamespace(input_processor=None, engine_core=None)
        return [found async for found in generate(fake, one)]

    assert asyncio.run(read(plain)) == [plain]
    with pytest.raises(CaptureError, match=type(fault).__name__):
        asyncio.run(read(ours))


def test_an_abort_goes_on(
    engine: Engine,
    monkeypatch: pytest.MonkeyPatch,
    fault: BaseException,
) -> None:
    abort = FRONT_END_WRAPPERS["abort_requests"](lambda self, ids, internal: ids)
    with monkeypatch.context() as patch:
        patch.setattr(engine.results, "abandon", raising(fault))
        assert abort(None, ["a"], True) == ["a"]


@pytest.mark.parametrize("where", ["_accept_block", "place", "_accept_openings", "sweep"])
def test_a_message_that_cannot_be_taken_in_fails_its_own_requests_at_once(
    engine: Engine,
    monkeypatch: pytest.MonkeyPatch,
    fault: BaseException,
    where: str,
) -> None:
    engine.results.timeout_s = 20.0
    with monkeypatch.context() as patch:
        if where == "sweep":
            patch.setattr(engine.collector.memory, "sweep", raising(fault))
            patch.setattr(collector, "_SWEEP_S", 0.0)
        else:
            owner = engine.collector._placing if where == "place" else engine.collector
            patch.setattr(owner, where, raising(fault))
        keys = begun(engine, 1, "rows")
        last_step(engine, keys)
        (error,) = engine.results.attach_each(ended(engine, keys))
        removed(engine, keys)
        assert engine.collector._thread.is_alive()
    if where == "sweep":
        assert error is None
    else:
        assert isinstance(error, LensError)
        assert "could not be taken in" in str(error)
    later = begun(engine, 1, "rows")
    last_step(engine, later)
    assert engine.results.attach_each(ended(engine, later)) == [None]
    removed(engine, later)


def test_who_cannot_be_told_of_results_keeps_nobody_else(
    engine: Engine,
    fault: BaseException,
) -> None:
    told: list[bool] = []
    broken = raising(fault)
    for call in (broken, lambda: told.append(True)):
        engine.collector.notifier.watch(call)
        if call is not broken:
            good = call
    keys = begun(engine, 1, "rows")
    last_step(engine, keys)
    assert engine.results.attach_each(ended(engine, keys)) == [None]
    removed(engine, keys)
    assert told
    engine.collector.notifier.unwatch(broken)
    engine.collector.notifier.unwatch(good)


@pytest.mark.parametrize("where", ["_watch", "_attach_soon", "_next"])
def test_a_fault_in_the_event_loop_reaches_who_waits_there(
    engine: Engine,
    monkeypatch: pytest.MonkeyPatch,
    fault: BaseException,
    where: str,
) -> None:
    keys = begun(engine, 2, "both")
    last_step(engine, keys)
    outputs = ended(engine, keys)
    others: list[bool] = []

    async def other() -> None:
        await asyncio.sleep(0.05)
        others.append(True)

    with monkeypatch.context() as patch:
        patch.setattr(event_loop.Arrivals, where, raising(fault))
        given = attach(engine, outputs, other())
    engine.results.abandon(keys)
    removed(engine, keys)
    assert others == [True], "the loop goes on"
    assert [isinstance(error, CaptureError) for error in given] == [True, True]


@pytest.mark.parametrize("is_light", [True, False])
def test_a_fault_where_results_are_attached_is_an_error_of_the_request(
    engine: Engine,
    monkeypatch: pytest.MonkeyPatch,
    fault: BaseException,
    is_light: bool,
) -> None:
    keys = begun(engine, 1, "both")
    last_step(engine, keys)
    (one,) = ended(engine, keys)
    monkeypatch.setattr(engine.results, "is_light", lambda one, encodes: is_light)
    monkeypatch.setattr(wrappers, "_encode", raising(fault))
    with pytest.raises(CaptureError, match=type(fault).__name__):
        asyncio.run(wrappers.attached_for_http(one, None))
    removed(engine, keys)


def test_what_is_prepared_wrongly_fails_its_own_request(
    engine: Engine,
    monkeypatch: pytest.MonkeyPatch,
    fault: BaseException,
) -> None:
    prepare = attaching.prepare
    ill = "none yet"

    def broken(key: str, *args: Any) -> bool:
        if key == ill:
            raise fault
        return prepare(key, *args)

    monkeypatch.setattr(attaching, "prepare", broken)
    first = engine.start(LensRequest(**REQUESTS["rows"]))
    ill = first
    keys = [first, *engine.prepared(1, "rows")]
    engine.results.prepare(deque([first]))
    engine.step([first], 0, N_PROMPT)
    engine.run(keys)
    engine.worker.stepper.leave(keys)
    error, nothing = engine.results.attach_each(ended(engine, keys))
    removed(engine, keys)
    assert isinstance(error, CaptureError)
    assert nothing is None


def test_in_process_a_flush_that_fails_is_an_error_of_its_step(
    engine: Engine,
    monkeypatch: pytest.MonkeyPatch,
    fault: BaseException,
) -> None:
    keys = begun(engine, 1, "rows")
    last_step(engine, keys)
    outputs = ended(engine, keys)
    monkeypatch.setattr(wrappers, "is_in_process", lambda engine: True)
    step = FRONT_END_WRAPPERS["engine_step"](lambda self: outputs)
    with pytest.raises(CaptureError, match=type(fault).__name__):
        step(SimpleNamespace(collective_rpc=raising(fault)))
    removed(engine, keys)


PLAIN: dict[str, Any] = {"kv_hint": 1}
OURS: dict[str, Any] = {"output_residual_stream": [0]}


@pytest.mark.parametrize("extra", [None, PLAIN, OURS], ids=["nothing", "else", "lens"])
@pytest.mark.parametrize("door", ["process_inputs", "async_generate"])
def test_a_request_without_the_lens_is_not_touched_by_its_faults(
    monkeypatch: pytest.MonkeyPatch,
    fault: BaseException,
    door: str,
    extra: dict[str, Any] | None,
) -> None:
    broken = raising(fault)
    monkeypatch.setattr(admission, "parse_extra_args", broken)
    wrapped = FRONT_END_WRAPPERS[door](lambda *args, **kw: "done")
    params = SimpleNamespace(extra_args=extra, n=1)
    processor = SimpleNamespace(inspect_lens_facts=None)
    arguments = {
        "process_inputs": (processor, "r", "prompt", params),
        "async_generate": (
            SimpleNamespace(input_processor=processor, engine_core=None),
            "prompt",
            params,
        ),
    }[door]
    if extra is OURS:
        with pytest.raises(CaptureError, match=type(fault).__name__):
            wrapped(*arguments)
        return
    wrapped(*arguments)


@pytest.mark.parametrize("where", ["expect", "_unprepared"])
def test_a_request_that_cannot_be_noted_is_not_left_behind(
    engine: Engine,
    monkeypatch: pytest.MonkeyPatch,
    fault: BaseException,
    where: str,
) -> None:
    (key,) = begun(engine, 1, "rows")
    packed = engine.results._expected[key].packed
    params = SimpleNamespace(extra_args={ENVELOPE_KEY: packed}, max_tokens=4)
    request = SimpleNamespace(request_id=key, sampling_params=params, prompt_token_ids=[1, 2, 3])
    add = FRONT_END_WRAPPERS["add_request"](lambda *args: "added")
    with monkeypatch.context() as patch:
        patch.setattr(wrappers, where, raising(fault))
        if where == "expect":
            with pytest.raises(CaptureError, match=type(fault).__name__):
                add(SimpleNamespace(), request, None)
            removed(engine, [key])
            return
        assert add(SimpleNamespace(), request, None) == "added"
    (error,) = engine.results.attach_each(outputs_of([key]))
    removed(engine, [key])
    assert isinstance(error, CaptureError)


def test_ctrl_c_at_ones_own_engine_is_passed_on(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(signal, "getsignal", lambda number: signal.default_int_handler)
    keys = begun(engine, 1, "rows")
    outputs = ended(engine, keys)
    with monkeypatch.context() as patch:
        patch.setattr(attaching.Results, "_begin", raising(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            engine.results.attach_all(outputs)
    engine.results.abandon(keys)
    removed(engine, keys)
