"""In the front-end process: judges requests, isolates their cache, attaches their results.

The front-end is the API server, or the user's own process with offline `LLM` or `AsyncLLM`.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable
from typing import Any, NoReturn

from inspect_lens._engine._envelope import Envelope
from inspect_lens.errors import CapacityError, CaptureError, LensError
from inspect_lens.spec import ENVELOPE_KEY, parse_extra_args

from ._arrivals import arrivals_of
from ._choices import Ticket
from ._compat import busy, is_in_process
from ._front import front_end
from ._hook_book import raise_first
from ._scores import Reading
from ._sealing import judge_early, request_of, resumable, seal_core, without_lens_keys
from ._serve import as_json, is_serving

__all__ = ["FRONT_END_WRAPPERS", "front_end"]

logger = logging.getLogger("vllm.inspect_lens")


def _verify_args(original: Callable[..., Any]) -> Callable[..., Any]:
    def verify_args(self: Any) -> None:
        original(self)
        # Runs for every request, also when the engine core decodes one: cheap when idle, and
        # a sealed request was judged before.
        extra = self.extra_args
        if extra and ENVELOPE_KEY not in extra:
            front_end().judge(extra)

    return verify_args


def _input_processor_init(original: Callable[..., Any]) -> Callable[..., Any]:
    def init(self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        original(self, vllm_config, *args, **kwargs)
        front_end().learn(self, vllm_config)

    return init


def _process_inputs(original: Callable[..., Any]) -> Callable[..., Any]:
    def process_inputs(
        self: Any, request_id: str, prompt: Any, params: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if (found := request_of(self, params)) is None:
            return original(self, request_id, prompt, params, *args, **kwargs)
        if kwargs.get("resumable"):
            raise resumable()
        plain = without_lens_keys(params)
        core = original(self, request_id, prompt, plain, *args, **kwargs)
        seal_core(core, *found, getattr(self, "inspect_lens_book", None))
        return core

    return process_inputs


def _add_request(original: Callable[..., Any]) -> Callable[..., Any]:
    def add_request(
        self: Any, request: Any, prompt: Any, parent_req: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        params = getattr(request, "sampling_params", None)
        extra = params.extra_args if params is not None else None
        if params is None or not extra or ENVELOPE_KEY not in extra:
            return original(self, request, prompt, parent_req, *args, **kwargs)
        n_prompt = len(request.prompt_token_ids)
        n_max = n_prompt + max(params.max_tokens or 1, 1) - 1
        reading = _reading(extra[ENVELOPE_KEY], n_prompt, n_max)
        results = front_end().results
        results.expect(
            request.request_id,
            extra[ENVELOPE_KEY],
            n_prompt=n_prompt,
            n_max=n_max,
            reading=reading,
            request=None if parent_req is None else parent_req.request_id,
        )
        try:
            result = original(self, request, prompt, parent_req, *args, **kwargs)
        except BaseException:
            results.abandon([request.request_id])
            raise
        _remember(self, request.request_id)
        if reading is not None and reading.has_alarm:
            _stop_at_alarm(self.request_states[request.request_id])
        return result

    return add_request


_UNPREPARED_MOST = 1 << 14


def _unprepared(processor: Any) -> deque[str]:
    """Requests of an engine whose results nobody has prepared for yet; see `Results.prepare`."""
    queue: deque[str] = processor.__dict__.setdefault("inspect_lens_unprepared", deque())
    return queue


def _remember(processor: Any, key: str) -> None:
    # Nobody takes them out where an engine is not stepped by its caller.
    if len(queue := _unprepared(processor)) < _UNPREPARED_MOST:
        queue.append(key)


def _reading(packed: dict[str, Any], n_prompt: int, n_max: int) -> Reading | None:
    """What reads the probes of a sealed request."""
    probes = Envelope.unpack(packed).probes
    if probes is None:
        return None
    return Reading(
        front_end().registry.reads_of(packed),
        lo=probes.lo,
        n_prompt=n_prompt,
        n_max=n_max,
    )


def _stop_at_alarm(state: Any) -> None:
    """End a request as a stop string would, once an alarm is raised.

    vLLM then finishes it with the reason `stop`, and tells the engine to give it up.
    """
    detokenizer, key = state.detokenizer, state.request_id
    update = detokenizer.update

    @functools.wraps(update)
    def update_or_stop(*args: Any, **kwargs: Any) -> Any:
        stop = update(*args, **kwargs)
        if stop is not None:
            return stop
        name = front_end().results.alarm(key, detokenizer.num_output_tokens())
        return None if name is None else f"inspect_lens:alarm:{name}"

    detokenizer.update = update_or_stop


def _abort_requests(original: Callable[..., Any]) -> Callable[..., Any]:
    def abort_requests(self: Any, request_ids: Any, internal: bool, *args: Any, **kw: Any) -> Any:
        ids = list(request_ids)
        aborted = original(self, ids, internal, *args, **kw)
        # Also what has finished and was not taken: vLLM knows nothing of it any more.
        front_end().results.abandon([*aborted, *(ids if internal else ())])
        return aborted

    return abort_requests


def _new_completion_output(original: Callable[..., Any]) -> Callable[..., Any]:
    def new_completion_output(
        self: Any, token_ids: Any, finish_reason: Any, stop_reason: Any, *args: Any, **kw: Any
    ) -> Any:
        completion = original(self, token_ids, finish_reason, stop_reason, *args, **kw)
        results = front_end().results
        if finish_reason is not None and results.is_expected(self.request_id):
            completion.inspect_lens_ticket = Ticket(
                self.request_id,
                n_completion=self.detokenizer.num_output_tokens(),
                n_last=len(token_ids),
            )
        elif results.streams_tokens(self.request_id):
            completion.inspect_lens_scores = results.take_new_scores(
                self.request_id, self.detokenizer.num_output_tokens()
            )
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
        earlier = {c.index: getattr(c, "inspect_lens_scores", {}) for c in self.outputs}
        result = original(self, next_output, aggregate, *args, **kwargs)
        tickets = {
            completion.index: completion.inspect_lens_ticket
            for completion in next_output.outputs
            if hasattr(completion, "inspect_lens_ticket")
        }
        for completion in self.outputs:
            if completion.index in tickets:
                completion.inspect_lens_ticket = tickets[completion.index]
        for completion in next_output.outputs:
            keep_scores(self.outputs, completion, earlier.get(completion.index, {}))
        return result

    return add


def keep_scores(outputs: list[Any], later: Any, earlier: dict[str, list[float]]) -> None:
    """Give token scores of two outputs to the choice that they were merged into, or the later one.

    vLLM adds up what has come of a text, or lets the whole of it take the place of less.
    """
    scores: dict[str, list[float]] = getattr(later, "inspect_lens_scores", {})
    for completion in outputs:
        if completion.index == later.index and (scores or earlier):
            both = {name: earlier.get(name, []) + scores.get(name, []) for name in earlier | scores}
            completion.inspect_lens_scores = both


def _engine_step(original: Callable[..., Any]) -> Callable[..., Any]:
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        outputs = original(self, *args, **kwargs)
        results, is_apart = front_end().results, not is_in_process(self)
        done = [output for output in outputs if has_tickets(output)]
        if done and not is_apart:
            # It takes no further step, in which workers would hear that requests are over, while
            # this one waits for results. An engine in a process of its own does.
            keys = [key for output in done for key in ticket_keys(output)]
            raise_first(self.collective_rpc("inspect_lens_hooks", args=("flush", keys)))
        if is_apart and not done:
            results.prepare(_unprepared(self.output_processor))
        if errors := results.attach_all(done):
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
        return outputs

    return run_engine


def _async_generate(original: Callable[..., Any]) -> Callable[..., Any]:
    async def outputs_of(self: Any, *args: Any, **kwargs: Any) -> AsyncGenerator[Any, None]:
        # With n > 1 and streaming, choices finish in different outputs of one request.
        params = kwargs.get("sampling_params", args[1] if len(args) > 1 else None)
        missing: int = params.n if params is not None and _asks_for_results(params) else 0
        async with contextlib.aclosing(original(self, *args, **kwargs)) as outputs:
            async for output in outputs:
                if has_tickets(output):
                    missing -= await _attached_for_http(output)
                if output.finished and missing > 0:
                    raise CaptureError(
                        f"{CaptureError.__name__}: {missing} choices of this request finished "
                        "without their results; nothing partial is returned"
                    )
                yield output

    def generate(self: Any, *args: Any, **kwargs: Any) -> AsyncGenerator[Any, None]:
        # When it is called, and not when it is iterated: a server still has its status to choose.
        judge_early(
            self.input_processor,
            kwargs.get("prompt", args[0] if args else None),
            kwargs.get("sampling_params", args[1] if len(args) > 1 else None),
        )
        return outputs_of(self, *args, **kwargs)

    return generate


def _asks_for_results(params: Any) -> bool:
    """Whether a request uses the lens; a bad one is refused elsewhere."""
    try:
        return parse_extra_args(getattr(params, "extra_args", None)) is not None
    except LensError:
        return False


async def _attached_for_http(output: Any) -> int:
    """Attach results, encoded where this process serves HTTP; returns how many choices got one."""
    loop, front, before = asyncio.get_running_loop(), front_end(), _attached(output)
    try:
        if front.results.is_light(output, encodes=is_serving()):
            await arrivals_of(loop, front.results).attach(output)
            _encode(output)
        else:
            # It copies or compresses much, for which no other response has to wait.
            await loop.run_in_executor(front.waiting, _attach_and_encode, output)
    except CapacityError as error:
        raise busy(str(error)) from error
    except CaptureError as error:
        # The body's `type` is vLLM's own; clients tell from the text that a retry is no use.
        raise CaptureError(f"{CaptureError.__name__}: {error}") from error
    return _attached(output) - before


def _attach_and_encode(output: Any) -> None:
    front_end().results.attach(output)
    _encode(output)


def _encode(output: Any) -> None:
    if is_serving():
        for completion in output.outputs:
            if hasattr(completion, "inspect_lens") and not hasattr(completion, "inspect_lens_json"):
                completion.inspect_lens_json = as_json(completion)


def _attached(output: Any) -> int:
    return sum(hasattr(completion, "inspect_lens") for completion in output.outputs)


def has_tickets(output: Any) -> bool:
    """Whether an output holds finished choices that used the lens."""
    return any(
        hasattr(completion, "inspect_lens_ticket") and not hasattr(completion, "inspect_lens")
        for completion in _choices(output)
    )


def ticket_keys(output: Any) -> list[str]:
    """Finished choices of an output that used the lens."""
    tickets = (getattr(c, "inspect_lens_ticket", None) for c in _choices(output))
    return [ticket.key for ticket in tickets if ticket is not None]


def _choices(output: Any) -> list[Any]:
    """Choices of generated text; engines that pool have outputs that are none."""
    outputs = getattr(output, "outputs", None)
    return outputs if isinstance(outputs, list) else []


FRONT_END_WRAPPERS: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    "verify_args": _verify_args,
    "input_processor_init": _input_processor_init,
    "process_inputs": _process_inputs,
    "add_request": _add_request,
    "abort_requests": _abort_requests,
    "new_completion_output": _new_completion_output,
    "output_add": _output_add,
    "engine_step": _engine_step,
    "run_engine": _run_engine,
    "async_generate": _async_generate,
}
"""Wrapper by seam name."""
