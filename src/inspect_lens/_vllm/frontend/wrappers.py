"""In the front-end process: judges requests, isolates their cache, attaches their results.

The front-end is the API server, or the user's own process with offline `LLM` or `AsyncLLM`.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable
from functools import partial
from typing import Any, NoReturn

from inspect_lens._engine.protocol.processes import contained, ends_process
from inspect_lens._vllm.compat.engine_facts import routes_of
from inspect_lens._vllm.compat.features import busy, fault_of, pass_over
from inspect_lens._vllm.compat.monkeypatches import is_in_process
from inspect_lens._vllm.http.bodies import SERVED, Body, as_json, part_as_json
from inspect_lens._vllm.registered.contents import TIERS_KEY, at_once, forget_unused, tell_through
from inspect_lens._vllm.registered.persistent_hooks import raise_first
from inspect_lens._vllm.results.attach import (
    faults_told,
    log_fault,
    named,
    stop_at_alarm,
    unprepared,
)
from inspect_lens._vllm.results.choices import (
    Ticket,
    attached,
    carries_results,
    has_fields,
    has_tickets,
    is_running,
    keep_tickets,
    running_keys,
    ticket_keys,
    told_of,
)
from inspect_lens._vllm.results.event_loop import arrivals_of
from inspect_lens._vllm.results.streaming import Pace
from inspect_lens._vllm.sinks.process import is_by_rule, offers, settle, settle_now
from inspect_lens._vllm.telemetry import refused, streamed
from inspect_lens.errors import CapacityError, CaptureError, LensError, UnsupportedError
from inspect_lens.spec import ENVELOPE_KEY, LENS_KEYS, NO_REQUEST

from .admission import (
    acts_on_all,
    compiled_of,
    expect,
    has_lens_keys,
    is_plain,
    judge_early,
    resumable,
    rule_of,
    said_by,
    seal_for,
    seal_recorded,
    without_lens_keys,
)
from .state import front_end


async def attached_for_http(output: Any, body: Body | None) -> int:
    """Attach results, as JSON where a body has asked for them; how many choices have theirs."""
    before = attached(output)
    with faults_told():
        await _attach(output, body)
    return attached(output) - before


async def _attach(output: Any, body: Body | None) -> None:
    loop, front = asyncio.get_running_loop(), front_end()
    if front.results.is_light(output, encodes=body is not None):
        await arrivals_of(loop, front.results).attach(output)
        _encode(output, body)
        return
    # It copies or compresses much, for which no other response has to wait.
    await _apart(_attach_and_encode, output, body)
    if offers([output]):
        await settle(output, front.results.timeout_s)
        await _apart(_encode, output, body)


async def _apart(work: Callable[[Any, Body | None], None], output: Any, body: Body | None) -> None:
    """Do something for an output in a thread, which knows whose request it is."""
    loop, own = asyncio.get_running_loop(), contextvars.copy_context()
    await loop.run_in_executor(front_end().waiting, own.run, work, output, body)


def _attach_and_encode(output: Any, body: Body | None) -> None:
    front_end().results.attach(output)
    if not offers([output]):
        _encode(output, body)


async def _carry(output: Any, body: Body | None, *, may_wait: bool) -> None:
    """Put what is ready on an output of requests that go on, as JSON where a body has asked."""
    front = front_end()
    if may_wait:
        await arrivals_of(asyncio.get_running_loop(), front.results).wait_for(output)
    if front.results.n_bytes(output, is_kept=body is None) < _LARGE_PART:
        _carry_and_encode(output, body)
    else:  # rows of a prompt, for which no other response has to wait
        await _apart(_carry_and_encode, output, body)


async def _carry_at_pace(
    output: Any, body: Body | None, pace: Pace | None, choices: list[int]
) -> None:
    """`_carry` where that is due; who reads no events has each output carry what it can."""
    if body is None or pace is None:
        await _carry(output, body, may_wait=True)
        return
    pace.begin(choices)
    if not pace.is_due(choices):
        return
    await _carry(output, body, may_wait=pace.may_wait(choices))
    if _is_up_to_date(output):
        pace.note(choices)
        # Of several prompts each output is told of, since its event is known by its number.
        if body.n_prompts == 1:
            front_end().results.pause(output, pace.pause_s)


def _is_up_to_date(output: Any) -> bool:
    """Whether an output has carried something, or there was nothing on its way."""
    has_carried = any("inspect_lens_partial" in c.__dict__ for c in output.outputs)
    return has_carried or front_end().results.has_come(output)


def _carry_and_encode(output: Any, body: Body | None) -> None:
    front_end().results.carry(output, is_kept=body is None)
    _encode(output, body)


_LARGE_PART = 1 << 19
"""Bytes of rows that take longer to copy and to spell as JSON than to hand to a thread: most of a
millisecond."""


def carry_now(outputs: Iterable[Any], *, may_wait: bool) -> None:
    """Put what is ready on outputs of requests that go on; a fault fails the request alone."""
    results = front_end().results
    for output in filter(carries_results, outputs if results.n_open else ()):
        with contained(partial(results.spoil, running_keys(output))):
            if may_wait:
                results.wait_for(output)
            results.carry(output, is_kept=True)


def _encode(output: Any, body: Body | None) -> None:
    if body is None:
        return
    try:
        for completion in output.outputs:
            part = completion.__dict__.get("inspect_lens_partial") if body.takes_parts else None
            if part is not None and not hasattr(completion, "inspect_lens_partial_json"):
                completion.inspect_lens_partial_json = part_as_json(part, body.handles)
                streamed(part)
            if hasattr(completion, "inspect_lens") and not hasattr(completion, "inspect_lens_json"):
                completion.inspect_lens_json = as_json(completion, body.handles)
    finally:
        if body.is_over:  # its client went while a thread was at it
            body.forget()


def _input_processor_init(original: Callable[..., Any]) -> Callable[..., Any]:
    def init(self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        original(self, vllm_config, *args, **kwargs)
        front_end().learn(self, vllm_config)

    return init


def _process_inputs(original: Callable[..., Any]) -> Callable[..., Any]:
    def process_inputs(
        self: Any, request_id: str, prompt: Any, params: Any, *args: Any, **kwargs: Any
    ) -> Any:
        found = rule = None
        try:
            if not is_plain(self, params):
                found = compiled_of(self, params)
                if (adapters := getattr(self, "inspect_lens_adapters", None)) is not None:
                    adapters.note(kwargs.get("lora_request"), uses_lens=found is not None)
            # Hooks without a tier run as they are, and are not recorded.
            if found is None or (found.asked is NO_REQUEST and found.tiers.acts):
                rule = rule_of(self, request_id, params, kwargs.get("resumable"))
        except BaseException as error:  # noqa: BLE001 - the loop is everybody's
            pass_over(error, uses_lens=has_lens_keys(params) or acts_on_all(self))
        if found is None and rule is None:
            if has_lens_keys(params, LENS_KEYS):  # which ask for nothing, such as `false`
                params = without_lens_keys(params)
            return original(self, request_id, prompt, params, *args, **kwargs)
        if found is not None and kwargs.get("resumable"):
            raise resumable()
        plain = without_lens_keys(params)
        core = original(self, request_id, prompt, plain, *args, **kwargs)
        if (rule is not None and seal_recorded(core, self, rule)) or found is None:
            return core
        try:
            seal_for(core, found, self)
        except BaseException as error:  # noqa: BLE001 - the loop is everybody's
            pass_over(error, uses_lens=True)
        return core

    return process_inputs


def _add_request(original: Callable[..., Any]) -> Callable[..., Any]:
    def add_request(
        self: Any, request: Any, prompt: Any, parent_req: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        params = getattr(request, "sampling_params", None)
        extra = params.extra_args if params is not None else None
        if params is None or not extra:
            return original(self, request, prompt, parent_req, *args, **kwargs)
        if has_lens_keys(params, LENS_KEYS):
            raise refused(
                UnsupportedError(
                    "an EngineCoreRequest that somebody has made asks for the lens, and nobody "
                    "has judged it; give the engine the prompt with its sampling parameters"
                )
            )
        if ENVELOPE_KEY not in extra:
            return original(self, request, prompt, parent_req, *args, **kwargs)
        results, key = front_end().results, request.request_id
        is_recorded = is_by_rule(extra[ENVELOPE_KEY])
        try:
            reading = expect(front_end(), request, params, extra[ENVELOPE_KEY], prompt, parent_req)
        except BaseException as error:  # noqa: BLE001 - the loop is everybody's
            results.abandon([key])
            pass_over(error, uses_lens=not is_recorded)
            params.extra_args = {k: v for k, v in extra.items() if k != ENVELOPE_KEY} or None
        try:
            result = original(self, request, prompt, parent_req, *args, **kwargs)
        except BaseException:
            results.abandon([key])
            raise
        if (added := _ADDED.get()) is not None:
            added[key] = key if parent_req is None else parent_req.request_id
        # vLLM has the request by now, and would not forget it.
        with contained(partial(results.spoil, [key])):
            state = self.request_states[key]
            if reading is not None and reading.watches and TIERS_KEY in extra[ENVELOPE_KEY]:
                results.hear(key, partial(said_by, state.detokenizer))
            if not is_recorded:
                if state.queue is None:
                    _unprepared(self).append(key)
                else:
                    arrivals_of(asyncio.get_running_loop(), results).prepare_later(key)
                results.running.watch(key, state.queue)
                if reading is not None and reading.has_alarm:
                    stop_at_alarm(state, results)
        return result

    return add_request


def _unprepared(processor: Any) -> deque[str]:
    """Those of an engine's requests; see `Results.prepare`."""
    queue: deque[str] = processor.__dict__.setdefault("inspect_lens_unprepared", unprepared())
    return queue


def _abort_requests(original: Callable[..., Any]) -> Callable[..., Any]:
    def abort_requests(self: Any, request_ids: Any, internal: bool, *args: Any, **kw: Any) -> Any:
        ids = list(request_ids)
        aborted = original(self, ids, internal, *args, **kw)
        with contained(partial(log_fault, "aborted requests could not be forgotten")):
            # Also what has finished and was not taken: vLLM knows nothing of it any more.
            front_end().results.abandon([*aborted, *(ids if internal else ())])
        return aborted

    return abort_requests


def _new_completion_output(original: Callable[..., Any]) -> Callable[..., Any]:
    def new_completion_output(
        self: Any, token_ids: Any, finish_reason: Any, stop_reason: Any, *args: Any, **kw: Any
    ) -> Any:
        completion = original(self, token_ids, finish_reason, stop_reason, *args, **kw)
        results, key = front_end().results, self.request_id
        if (expected := results.expected(key)) is None:
            return completion
        try:
            if finish_reason is not None:
                ticket = Ticket(
                    key,
                    n_completion=self.detokenizer.num_output_tokens(),
                    n_last=len(token_ids),
                    said=said_by(self.detokenizer) if expected.keeps_text else None,
                    n_cached=self.num_cached_tokens,
                )
                if expected.is_recorded:
                    results.recorded.put(ticket)
                else:
                    completion.inspect_lens_ticket = ticket
            elif (streaming := expected.streaming) is not None and streaming.is_due:
                completion.inspect_lens_running = Ticket(
                    key,
                    n_completion=self.detokenizer.num_output_tokens(),
                    # Where an output is of several steps it is not known what the last one fed.
                    n_last=len(token_ids) if self.stream_interval == 1 else 1,
                )
        except BaseException as error:
            if ends_process(error):
                raise
            results.spoil([key], error)
            if finish_reason is not None and not expected.is_recorded:
                # Whoever takes the output gets the error.
                completion.inspect_lens_ticket = Ticket(key, n_completion=0)
        return completion

    return new_completion_output


class _Deferring(threading.local):
    """Errors of a batch of offline requests, kept until the batch is done."""

    def __init__(self) -> None:
        self.is_on = False
        self.errors: list[LensError] = []


_deferring = _Deferring()


def _output_add(original: Callable[..., Any]) -> Callable[..., Any]:
    def add(self: Any, next_output: Any, aggregate: bool, *args: Any, **kwargs: Any) -> Any:
        result = original(self, next_output, aggregate, *args, **kwargs)
        try:
            keep_tickets(self.outputs, next_output.outputs)
        except BaseException as error:
            if ends_process(error):
                raise
            if has_fields(self) or has_fields(next_output):
                # `outputs_of` raises it for whoever reads them.
                self.inspect_lens_fault = fault_of(error)
            log_fault("outputs of a request could not be merged", error)
        return result

    return add


def _engine_step(original: Callable[..., Any]) -> Callable[..., Any]:
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        outputs = original(self, *args, **kwargs)
        results, is_apart = front_end().results, not is_in_process(self)
        done = [output for output in outputs if has_tickets(output)]
        carry_now(outputs, may_wait=is_apart)
        recorded = results.recorded.take_unflushed()
        if (done or recorded) and not is_apart:
            # It takes no further step, in which workers would hear that requests are over, while
            # this one waits for results. An engine in a process of its own does.
            keys = [key for output in done for key in ticket_keys(output)] + recorded
            with contained(partial(results.spoil, keys)):
                raise_first(self.collective_rpc("inspect_lens_hooks", args=("flush", keys)))
        if is_apart and not done:
            results.prepare(_unprepared(self.output_processor))
        errors = results.attach_all(done)
        if front_end().registry.has_left:
            at_once(forget_unused(front_end().registry, tell_through(self)))
        if errors:
            if not _deferring.is_on:
                _raise_first(errors)
            # Raised by `run_engine` once the batch is done: raising here would leave the batch's
            # other requests in the engine for the next call.
            _deferring.errors += errors
            errors.clear()
        return outputs

    return step


def _raise_first(errors: list[LensError]) -> NoReturn:
    """Raise one error and let go of all: see `Results.attach_all`."""
    del errors[1:]
    raise errors.pop()


def _run_engine(original: Callable[..., Any]) -> Callable[..., Any]:
    def run_engine(self: Any, *args: Any, **kwargs: Any) -> Any:
        _deferring.is_on, _deferring.errors = True, []
        try:
            outputs = original(self, *args, **kwargs)
        finally:
            _deferring.is_on = False
        if _deferring.errors:
            _raise_first(_deferring.errors)
        settle_now(outputs, front_end().results.timeout_s)
        return outputs

    return run_engine


_ADDED: contextvars.ContextVar[dict[str, str] | None] = contextvars.ContextVar(
    "inspect_lens_added", default=None
)
"""Requests of a call that vLLM's front-end has, and its engine may not have yet; each with the one
that it is a choice of, or itself."""


def _all_added(added: dict[str, str]) -> None:
    """End a call's list: what its caller adds later, in the same context, is not of the call."""
    if _ADDED.get() is added:
        _ADDED.set(None)


async def _let_go(engine: Any, added: dict[str, str]) -> None:
    """Forget requests that failed on their way to the engine, which vLLM would keep for good."""
    if left := {of for key, of in added.items() if key in engine.output_processor.request_states}:
        with contained(partial(log_fault, "a request that failed could not be forgotten")):
            # The engine may have the first of several choices already.
            await engine.abort(left, internal=True)


def _engine_add_request(original: Callable[..., Any]) -> Callable[..., Any]:
    def add_request(self: Any, *args: Any, **kwargs: Any) -> Any:
        token = _ADDED.set(added := dict[str, str]())
        try:
            return original(self, *args, **kwargs)
        except BaseException:
            # Whoever runs the engine next would wait for them.
            with contained(partial(log_fault, "a request that failed could not be forgotten")):
                self.abort_request(list(set(added.values())), internal=True)
            raise
        finally:
            _ADDED.reset(token)

    return add_request


def _beam_search(original: Callable[..., Any]) -> Callable[..., Any]:
    def beam_search(self: Any, *args: Any, **kwargs: Any) -> Any:
        if front_end().registry.server is not None:
            raise refused(
                UnsupportedError(
                    "beam_search cannot be used with what INSPECT_LENS_SERVER does to requests: "
                    "the tokens of a beam are prompt to its next one; leave one of them out"
                )
            )
        return original(self, *args, **kwargs)

    return beam_search


async def _with_results(
    engine: Any, outputs: AsyncGenerator[Any, None], body: Body | None, first: int, missing: int
) -> AsyncGenerator[Any, None]:
    """Outputs with their results, of which so many are missing still."""
    _ADDED.set(added := dict[str, str]())
    pace, takes_parts = None if body is None else Pace(), body is None or body.takes_parts
    try:
        # With n > 1 and streaming, choices finish in different outputs of one request.
        async with contextlib.aclosing(outputs):
            async for output in outputs:
                _all_added(added)
                if (fault := getattr(output, "inspect_lens_fault", None)) is not None:
                    raise fault
                if ours := told_of(output):
                    running = [c.index for c in filter(is_running, ours)] if takes_parts else []
                    if running:
                        with faults_told():
                            await _carry_at_pace(output, body, pace, running)
                    if has_tickets(output):
                        missing -= await attached_for_http(output, body)
                if missing > 0 and output.finished:
                    raise CaptureError(
                        f"{missing} choices of this request finished without their results; "
                        "nothing partial is returned"
                    )
                if body is not None and ours:
                    body.take(output, first)
                yield output
    except Exception as error:  # noqa: BLE001 - raised as what it is
        told = named(error)
        if body is not None:
            body.error = told
        try:
            if told is error:
                raise  # with what it says of where it comes from
            raise told from None if told is error.__cause__ else error
        finally:
            del told  # its traceback holds this frame, with an output in it
    finally:
        _all_added(added)
        if pace is not None:
            pace.end()
        await _let_go(engine, added)


def _async_generate(original: Callable[..., Any]) -> Callable[..., Any]:
    def generate(self: Any, *args: Any, **kwargs: Any) -> AsyncGenerator[Any, None]:
        # When it is called, and not when it is iterated: a server still has its status to choose.
        params = kwargs.get("sampling_params", args[1] if len(args) > 1 else None)
        body, first, missing = SERVED.get(), 0, 0
        try:
            if body is not None:
                first = body.begin(params)
            if not is_plain(self.input_processor, params):
                prompt = kwargs.get("prompt", args[0] if args else None)
                missing = judge_early(self.input_processor, prompt, params)
                front_end().results.running.routes = routes_of(self)
        except CapacityError as error:
            raise busy(str(refused(error))) from error
        except BaseException as error:  # noqa: BLE001 - the loop is everybody's
            pass_over(error, uses_lens=has_lens_keys(params) or acts_on_all(self.input_processor))
        return _with_results(self, original(self, *args, **kwargs), body, first, missing)

    return generate


FRONT_END_WRAPPERS: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    "input_processor_init": _input_processor_init,
    "process_inputs": _process_inputs,
    "add_request": _add_request,
    "abort_requests": _abort_requests,
    "new_completion_output": _new_completion_output,
    "output_add": _output_add,
    "engine_step": _engine_step,
    "engine_add_request": _engine_add_request,
    "beam_search": _beam_search,
    "run_engine": _run_engine,
    "async_generate": _async_generate,
}
"""Wrapper by name of the monkeypatch."""
