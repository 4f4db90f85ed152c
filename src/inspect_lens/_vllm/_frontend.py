"""In the front-end process: judges requests, isolates their cache, attaches their results.

The front-end is the API server, or the user's own process with offline `LLM` or `AsyncLLM`.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import logging
import threading
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

import inspect_lens
from inspect_lens._engine._envelope import Envelope, seal
from inspect_lens._settings import Settings
from inspect_lens.errors import CapacityError, CaptureError, LensError, SpecError, UnsupportedError
from inspect_lens.spec import (
    ENVELOPE_KEY,
    LENS_KEYS,
    EngineFacts,
    LensRequest,
    check_request,
    parse_extra_args,
)

from ._compat import busy
from ._facts import facts_of, refusal
from ._results import Results, Ticket
from ._serve import as_json, install_when_serving, is_serving

__all__ = ["FRONT_END_WRAPPERS", "front_end"]

logger = logging.getLogger("vllm.inspect_lens")


class FrontEnd:
    """What this process knows: its engines' facts, and the results it waits for."""

    def __init__(self) -> None:
        self.settings = Settings.load()
        self.engines: list[EngineFacts | str] = []
        """Facts of each engine of this process, or why the lens does not serve it."""
        self.results = Results(self.settings.result_timeout_s)
        # Of our own: whoever waits for rows must not keep vLLM's threads from their work.
        self.waiting = ThreadPoolExecutor(32, thread_name_prefix="inspect-lens-wait")

    def learn(self, processor: Any, vllm_config: Any) -> None:
        """Take note of an engine; called when its input processor is made."""
        reason = refusal(vllm_config)
        # Read again: one process can hold engines with different settings.
        facts = facts_of(vllm_config, Settings.load()) if reason is None else None
        processor.inspect_lens_facts = facts
        processor.inspect_lens_refusal = reason
        self.engines.append(facts if facts is not None else str(reason))
        # The server's modules may not have been imported when the plug-in was loaded.
        install_when_serving(self.describe)

    def describe(self) -> dict[str, Any]:
        """What an operator wants to know: versions, engines, and what is in flight."""
        return {
            "version": inspect_lens.__version__,
            "engines": [
                {"not_served": e} if isinstance(e, str) else asdict(e) for e in self.engines
            ],
            "open_requests": self.results.n_open,
        }

    def judge(self, extra_args: dict[str, Any]) -> None:
        """Refuse a bad request as early as its parameters are known.

        With one engine in the process its facts are used; with several it is not known yet
        which one is meant, and `process_inputs` judges again.
        """
        request = parse_extra_args(extra_args)
        if request is not None and len(self.engines) == 1:
            facts = self.engines[0]
            if isinstance(facts, str):
                raise not_served(facts)
            check_request(request, facts)


def not_served(reason: str) -> UnsupportedError:
    """The error for a lens request to an engine that the lens does not serve."""
    return UnsupportedError(f"the lens does not serve this engine: {reason}")


class _Holder:
    front_end: FrontEnd | None = None


def front_end() -> FrontEnd:
    """The front-end state of this process, made when first needed."""
    if _Holder.front_end is None:
        _Holder.front_end = FrontEnd()
    return _Holder.front_end


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
        extra = getattr(params, "extra_args", None)
        request = parse_extra_args(extra)
        if request is None or extra is None:
            return original(self, request_id, prompt, params, *args, **kwargs)
        if kwargs.get("resumable"):
            raise UnsupportedError("streaming input sessions cannot be captured or steered")
        facts: EngineFacts | None = self.inspect_lens_facts
        if facts is None:
            raise not_served(self.inspect_lens_refusal)
        check_request(request, facts)
        # The caller's parameters stay as they are; vectors travel once, in the envelope.
        plain = copy.copy(params)
        plain.extra_args = {k: v for k, v in extra.items() if k not in LENS_KEYS} or None
        core = original(self, request_id, prompt, plain, *args, **kwargs)
        _seal(core, request, facts)
        return core

    return process_inputs


def _seal(core: Any, request: LensRequest, facts: EngineFacts) -> None:
    """Put the sealed request where the worker finds it, and keep its cache blocks apart."""
    sampling = core.sampling_params
    if core.prompt_token_ids is None:
        raise UnsupportedError("prompt embeddings: the lens needs a prompt of tokens")
    if request.capture is not None and sampling.n > 1 and request.capture.transport == "binary":
        raise SpecError("activations_transport='binary' with n > 1; use n=1 or inline transport")
    n_prompt = len(core.prompt_token_ids)
    envelope = seal(
        request,
        facts,
        reply=front_end().results.address,
        n_prompt=n_prompt,
        max_tokens=sampling.max_tokens,
        epoch=front_end().results.salt,
    )
    sampling.extra_args = {**(sampling.extra_args or {}), ENVELOPE_KEY: envelope.pack()}
    if envelope.steer_hash is not None:
        # Equal steering shares blocks; nobody else reads them.
        core.cache_salt = f"{core.cache_salt or ''}|inspect_lens:{envelope.steer_hash}"
    needs_prompt = _needs_whole_prompt(envelope, n_prompt)
    if needs_prompt and request.skip_reading_prefix_cache is False:
        raise SpecError(
            "skip_reading_prefix_cache=false beside a capture of prompt tokens: cached tokens have "
            "no rows; leave it out, or capture positions='completion'"
        )
    if needs_prompt or request.skip_reading_prefix_cache:
        sampling.skip_reading_prefix_cache = True


def _needs_whole_prompt(envelope: Envelope, n_prompt: int) -> bool:
    """Whether rows are wanted of prompt tokens that a cache hit would not compute.

    vLLM always computes the last prompt token.
    """
    return envelope.capture is not None and envelope.capture.lo < n_prompt - 1


def _add_request(original: Callable[..., Any]) -> Callable[..., Any]:
    def add_request(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        params = getattr(request, "sampling_params", None)
        extra = params.extra_args if params is not None else None
        if extra and ENVELOPE_KEY in extra:
            front_end().results.expect(
                request.request_id,
                extra[ENVELOPE_KEY],
                n_prompt=len(request.prompt_token_ids),
            )
        return original(self, request, *args, **kwargs)

    return add_request


def _abort_requests(original: Callable[..., Any]) -> Callable[..., Any]:
    def abort_requests(self: Any, request_ids: Any, internal: bool, *args: Any, **kw: Any) -> Any:
        aborted = original(self, request_ids, internal, *args, **kw)
        for key in aborted:
            front_end().results.discard(key)
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
                self.request_id, n_completion=self.detokenizer.num_output_tokens()
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
        result = original(self, next_output, aggregate, *args, **kwargs)
        tickets = {
            completion.index: completion.inspect_lens_ticket
            for completion in next_output.outputs
            if hasattr(completion, "inspect_lens_ticket")
        }
        for completion in self.outputs:
            if completion.index in tickets:
                completion.inspect_lens_ticket = tickets[completion.index]
        return result

    return add


def _engine_step(original: Callable[..., Any]) -> Callable[..., Any]:
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        outputs = original(self, *args, **kwargs)
        for output in outputs:
            if has_tickets(output):
                try:
                    front_end().results.attach(output)
                except LensError as error:
                    if not _deferring.is_on:
                        raise
                    # Raised by `run_engine` once the batch is done: raising here would leave
                    # the batch's other requests in the engine for the next call.
                    _deferring.errors.append(error)
        return outputs

    return step


def _run_engine(original: Callable[..., Any]) -> Callable[..., Any]:
    def run_engine(self: Any, *args: Any, **kwargs: Any) -> Any:
        _deferring.is_on, _deferring.errors = True, []
        try:
            outputs = original(self, *args, **kwargs)
        finally:
            _deferring.is_on = False
        if _deferring.errors:
            raise _deferring.errors[0]
        return outputs

    return run_engine


def _async_generate(original: Callable[..., Any]) -> Callable[..., Any]:
    async def generate(self: Any, *args: Any, **kwargs: Any) -> AsyncGenerator[Any, None]:
        # With n > 1 and streaming, choices finish in different outputs of one request.
        params = kwargs.get("sampling_params", args[1] if len(args) > 1 else None)
        loop, waiting = asyncio.get_running_loop(), front_end().waiting
        missing: int = params.n if params is not None and _asks_for_results(params) else 0
        async with contextlib.aclosing(original(self, *args, **kwargs)) as outputs:
            async for output in outputs:
                if has_tickets(output):
                    # In a thread: it may wait for rows, and it compresses tensors for HTTP.
                    try:
                        missing -= await loop.run_in_executor(waiting, _attach_for_http, output)
                    except CapacityError as error:
                        raise busy(str(error)) from error
                if output.finished and missing > 0:
                    raise CaptureError(
                        f"{CaptureError.__name__}: {missing} choices of this request finished "
                        "without their results; nothing partial is returned"
                    )
                yield output

    return generate


def _asks_for_results(params: Any) -> bool:
    """Whether a request uses the lens; a bad one is refused elsewhere."""
    try:
        return parse_extra_args(getattr(params, "extra_args", None)) is not None
    except LensError:
        return False


def _attach_for_http(output: Any) -> int:
    """Attach results, encoded where this process serves HTTP; returns how many choices got one."""
    before = _attached(output)
    try:
        front_end().results.attach(output)
    except CaptureError as error:
        # The body's `type` is vLLM's own; clients tell from the text that a retry is no use.
        raise CaptureError(f"{CaptureError.__name__}: {error}") from error
    if is_serving():
        for completion in output.outputs:
            if hasattr(completion, "inspect_lens") and not hasattr(completion, "inspect_lens_json"):
                completion.inspect_lens_json = as_json(completion)
    return _attached(output) - before


def _attached(output: Any) -> int:
    return sum(hasattr(completion, "inspect_lens") for completion in output.outputs)


def has_tickets(output: Any) -> bool:
    """Whether an output holds finished choices that used the lens."""
    return any(
        hasattr(completion, "inspect_lens_ticket") and not hasattr(completion, "inspect_lens")
        for completion in getattr(output, "outputs", None) or ()
    )


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
