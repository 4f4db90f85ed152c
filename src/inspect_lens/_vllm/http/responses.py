"""In the API server: results into responses and streams, requests out of bodies, one route."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Iterable, Sequence
from functools import cache, partial
from typing import Any

from pydantic import PrivateAttr

from inspect_lens._vllm import traces
from inspect_lens._vllm.compat.engine_facts import computing_facts
from inspect_lens._vllm.compat.features import FEATURES, all_off, is_off, require, turn_off
from inspect_lens._vllm.compat.guard import pass_over
from inspect_lens._vllm.compat.monkeypatches import SERVER_PATCHES, monkeypatch, verify, wrap
from inspect_lens._vllm.compat.off import reason_of
from inspect_lens._vllm.metrics import delivered, failed, refused, stored
from inspect_lens._vllm.results.expected import choices_of, has_fields
from inspect_lens.errors import LensError, UnsupportedError
from inspect_lens.spec import (
    LENS_KEYS,
    NATIVE_KEY,
    EngineFacts,
    TensorData,
    encode_saved,
    parse_extra_args,
)

from .bodies import LensBodies, has_lens_words, xargs_of
from .payloads import PayloadStore, add_fetch_route, handle_entries, inline_entries
from .registry_routes import add_hook_routes, add_registry_routes
from .sweep_route import add_sweep_route

__all__ = [
    "as_json",
    "install_when_serving",
    "is_serving",
    "payloads",
    "refuse_bodies",
    "with_results",
]


def with_results(response: Any, found: list[dict[str, Any]]) -> Any:
    """Put results into a response: the first choice's at the top, each one's on its choice."""
    if not any(found) or not hasattr(response, "choices"):
        return response
    kind: Any = type(response)
    made = _with_results_of(kind).model_construct(**dict(response))
    made._found = found
    return made


@cache
def _with_results_of(kind: Any) -> Any:
    """A response of tokens that also has results: those of vLLM drop what they do not know."""

    class WithResults(kind):  # type: ignore[misc]
        _found: list[dict[str, Any]] = PrivateAttr(default_factory=list)

        def model_dump(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
            body: dict[str, Any] = super().model_dump(*args, **kwargs)
            if len(self._found) > 1:
                for choice, result in zip(body["choices"], self._found, strict=True):
                    choice.update(result)
            return body | self._found[0]

    return WithResults


logger = logging.getLogger("vllm.inspect_lens")

_SERVER_MODULES = (
    "vllm.entrypoints.openai.api_server",
    "vllm.entrypoints.launchers.api_server",
    "vllm.entrypoints.openai.chat_completion.serving",
)


class _Front:
    """The front-end of this process, once it has an engine."""

    end: Any = None


payloads = PayloadStore(on_change=stored)
"""The store of this process; a handle is valid at the process that made it."""


def is_serving() -> bool:
    """Whether this process is an API server."""
    main = getattr(getattr(sys.modules.get("__main__"), "__spec__", None), "name", None)
    return any(name in sys.modules or name == main for name in _SERVER_MODULES)


def install_when_serving(front_end: Any = None) -> None:
    """Wrap the HTTP layer where this process is an API server, or becomes one."""
    if front_end is not None:
        _Front.end = front_end
    if not is_serving():
        return
    refuse_bodies()
    if is_off("http") is not None:
        return
    try:
        verify(SERVER_PATCHES)
        for name, make in _WRAPPERS.items():
            wrap(monkeypatch(name), make)
    except Exception as error:  # noqa: BLE001 - vLLM's start must not end here
        # Bodies are refused from now on, where `routers` could be wrapped.
        reason = reason_of(error)
        logger.warning("inspect_lens: %s: off: %s", FEATURES["http"], reason)
        turn_off("http", reason)


def refuse_bodies(keys: Collection[str] = LENS_KEYS) -> None:
    """Have bodies judged where this process is an API server, also where all else is off."""
    if not is_serving():
        return
    try:
        wrap(monkeypatch("routers"), partial(_routers, keys))
    except Exception as error:  # noqa: BLE001 - vLLM's start must not end here
        logger.error("inspect_lens: bodies with lens keys are passed over: %s", error)


def refuse_params(keys: Collection[str]) -> None:
    """Refuse bodies that come to vLLM's handlers by no route, as those of `vllm run-batch` do."""
    if not is_serving():
        return

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def to_sampling_params(self: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                if has_lens_words(self, keys):
                    require("lens")
            except BaseException as error:  # noqa: BLE001 - a door
                pass_over(error, uses_lens=True)
            return original(self, *args, **kwargs)

        return to_sampling_params

    try:
        for name in ("chat_params", "completion_params"):
            wrap(monkeypatch(name), make)
    except Exception as error:  # noqa: BLE001 - vLLM's start must not end here
        logger.error("inspect_lens: lens keys of batch files are passed over: %s", error)


def as_json(completion: Any) -> dict[str, Any]:
    """A choice's result as it stands in a response: `activations` and `inspect_lens`."""
    result: dict[str, Any] = {"inspect_lens": completion.inspect_lens.model_dump(mode="json")}
    tensors: dict[str, TensorData] = completion.inspect_lens_tensors
    if tensors:
        is_binary = completion.inspect_lens_transport == "binary"
        try:
            entries = handle_entries(tensors, payloads) if is_binary else inline_entries(tensors)
        except LensError as error:
            failed(error)
            raise
        plain = getattr(completion, "inspect_lens_plain", {})
        result["activations"] = entries | {n: {"__json__": value} for n, value in plain.items()}
    if (saved := getattr(completion, "inspect_lens_saved", None)) is not None:
        result["hook_results"] = encode_saved(saved)
    delivered(completion)
    return result


def results_of(outputs: Iterable[Any]) -> list[dict[str, Any]]:
    """JSON of each finished choice, in order; empty dicts for choices without a result."""
    return [
        getattr(completion, "inspect_lens_json", {})
        for output in outputs
        for completion in output.outputs
    ]


def decorate(response: Any, outputs: Sequence[Any]) -> Any:
    """Put results into a response: the first choice's at the top, each one's on its choice."""
    try:
        return _decorated(response, results_of(outputs))
    except BaseException as error:  # noqa: BLE001 - a door
        pass_over(error, uses_lens=has_results(outputs))
        return response


def has_results(outputs: Iterable[Any]) -> bool:
    """Whether anything of ours stands on outputs."""
    choices = [completion for output in outputs for completion in choices_of(output)]
    return any(hasattr(completion, "inspect_lens_json") for completion in choices)


def _decorated(response: Any, found: list[dict[str, Any]]) -> Any:
    if not any(found) or not hasattr(response, "choices"):
        return response
    for key, value in found[0].items():
        setattr(response, key, value)
    if len(found) > 1:
        for choice, result in zip(response.choices, found, strict=True):
            for key, value in result.items():
                setattr(choice, key, value)
    return response


def _chat_full(original: Callable[..., Any]) -> Callable[..., Any]:
    async def full(self: Any, request: Any, result_generator: Any, *args: Any, **kw: Any) -> Any:
        _check_handler(self, request)
        last: dict[int, Any] = {}
        watched = _watch(result_generator, last)
        response = await original(self, request, watched, *args, **kw)
        return decorate(response, list(last.values()))

    return full


def _chat_batch(original: Callable[..., Any]) -> Callable[..., Any]:
    async def batch(self: Any, request: Any, generators: Any, *args: Any, **kw: Any) -> Any:
        lasts: list[dict[int, Any]] = [{} for _ in generators]
        watched = [_watch(g, last) for g, last in zip(generators, lasts, strict=True)]
        response = await original(self, request, watched, *args, **kw)
        return decorate(response, [last[0] for last in lasts if last])

    return batch


def _completion_full(original: Callable[..., Any]) -> Callable[..., Any]:
    def full(self: Any, final_res_batch: Any, *args: Any, **kw: Any) -> Any:
        return decorate(original(self, final_res_batch, *args, **kw), final_res_batch)

    return full


def _chat_stream(original: Callable[..., Any]) -> Callable[..., Any]:
    async def stream(
        self: Any, request: Any, result_generator: Any, *args: Any, **kw: Any
    ) -> AsyncGenerator[str, None]:
        _check_handler(self, request)
        seen = _Seen()
        chunks = original(self, request, _collect(result_generator, seen, 1), *args, **kw)
        async for chunk in _with_results(chunks, seen, "chat.completion.chunk"):
            yield chunk

    return stream


def _completion_stream(original: Callable[..., Any]) -> Callable[..., Any]:
    async def stream(
        self: Any, request: Any, engine_inputs: Any, result_generator: Any, *args: Any, **kw: Any
    ) -> AsyncGenerator[str, None]:
        seen = _Seen()
        watched = _collect(result_generator, seen, request.n or 1)
        chunks = original(self, request, engine_inputs, watched, *args, **kw)
        async for chunk in _with_results(chunks, seen, "text_completion"):
            yield chunk

    return stream


def _tokens_full(original: Callable[..., Any]) -> Callable[..., Any]:
    async def full(self: Any, request: Any, result_generator: Any, *args: Any, **kw: Any) -> Any:
        last: dict[int, Any] = {}
        watched = _watch(result_generator, last)
        response = await original(self, request, watched, *args, **kw)
        try:
            return with_results(response, results_of(last.values()))
        except BaseException as error:  # noqa: BLE001 - a door
            pass_over(error, uses_lens=has_results(last.values()))
            return response

    return full


def _tokens_stream(original: Callable[..., Any]) -> Callable[..., Any]:
    async def stream(
        self: Any, request: Any, result_generator: Any, *args: Any, **kw: Any
    ) -> AsyncGenerator[str, None]:
        seen = _Seen()
        chunks = original(self, request, _collect(result_generator, seen, 1), *args, **kw)
        async for chunk in _with_results(chunks, seen, "inference.generate.chunk"):
            yield chunk

    return stream


def _check_handler(handler: Any, request: Any) -> None:
    """Refuse where another API's handler would rebuild the response without our fields."""
    if ".openai." not in type(handler).__module__ and parse_extra_args(request.vllm_xargs):
        raise refused(
            UnsupportedError(
                f"{type(handler).__name__} has no place for activations; use /v1/chat/completions "
                "or /v1/completions"
            )
        )


async def _watch(outputs: AsyncIterator[Any], last: dict[int, Any]) -> AsyncGenerator[Any, None]:
    async for output in outputs:
        last[0] = output
        yield output


class _Seen:
    """What has come of a stream."""

    def __init__(self) -> None:
        self.results: dict[int, dict[str, Any]] = {}
        """Results of finished choices, by index."""
        self.scores: list[dict[str, Any]] = []
        """Token scores that no event has carried yet."""

    def take(self, output: Any, first: int) -> None:
        """Take what is ours from an output."""
        for completion in output.outputs:
            index = first + completion.index
            scores = completion.__dict__.pop("inspect_lens_scores", None)
            if scores:
                self.scores.append({"index": index, "probes": scores})
            result = getattr(completion, "inspect_lens_json", None)
            if result:
                self.results[index] = result


async def _collect(
    outputs: AsyncIterator[Any], seen: _Seen, per_prompt: int
) -> AsyncGenerator[Any, None]:
    """Pass outputs through, keeping what is ours by the index of its choice."""
    async for item in outputs:
        prompt, output = item if isinstance(item, tuple) else (0, item)
        try:
            seen.take(output, prompt * per_prompt)
        except BaseException as error:  # noqa: BLE001 - a door
            pass_over(error, uses_lens=has_fields(output))
        yield item


async def _with_results(
    chunks: AsyncIterator[str], seen: _Seen, kind: str
) -> AsyncGenerator[str, None]:
    """Send token scores behind their tokens, and the results before the stream ends."""
    async for chunk in chunks:
        is_end = chunk.startswith("data: [DONE]")
        if is_end and seen.results:
            yield f"data: {json.dumps(_event(seen.results, kind))}\n\n"
        yield chunk
        if seen.scores and not is_end:
            scores, seen.scores = seen.scores, []
            event = {"object": kind, "choices": [], "inspect_lens_scores": scores}
            yield f"data: {json.dumps(event)}\n\n"


def _event(seen: dict[int, dict[str, Any]], kind: str) -> dict[str, Any]:
    first = seen[min(seen)]
    event: dict[str, Any] = {"object": kind, "choices": [], **first}
    if len(seen) > 1:
        event["inspect_lens_choices"] = [{"index": i, **seen[i]} for i in sorted(seen)]
    return event


def _facts() -> EngineFacts | None:
    """Facts of the engine that is served, where it is known."""
    return getattr(_Front.end, "facts", None)


def _to_sampling_params(original: Callable[..., Any]) -> Callable[..., Any]:
    def to_sampling_params(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            if self.model_extra or self.vllm_xargs:
                self.vllm_xargs = xargs_of(self, _facts())
        except BaseException as error:  # noqa: BLE001 - a door
            pass_over(error, uses_lens=has_lens_words(self))
        return original(self, *args, **kwargs)

    return to_sampling_params


def _refuse(what: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make a wrapper that refuses lens requests where no result could be returned."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def refusing(self: Any, *args: Any, **kwargs: Any) -> Any:
            is_ours = False
            try:
                is_ours = NATIVE_KEY in (xargs_of(self, _facts()) or {})
            except BaseException as error:  # noqa: BLE001 - a door
                pass_over(error, uses_lens=has_lens_words(self))
            if is_ours:
                raise refused(
                    UnsupportedError(
                        f"{what} cannot be used with {', '.join(LENS_KEYS[:3])}; use sampling "
                        "through /v1/chat/completions or /v1/completions"
                    )
                )
            return original(self, *args, **kwargs)

        return refusing

    return make


def _routers(keys: Collection[str], original: Callable[..., Any]) -> Callable[..., Any]:
    def register(app: Any, *args: Any, **kwargs: Any) -> Any:
        made = original(app, *args, **kwargs)
        try:
            if is_off("http") is None:
                add_routes(app)
        except Exception as error:  # noqa: BLE001 - vLLM's start must not end here
            turn_off("http", reason_of(error))
        try:
            app.add_middleware(LensBodies, front_end=lambda: _Front.end, keys=keys)
            if traces.is_on():
                app.add_middleware(traces.NotesTrace)  # outermost: the others refuse
        except Exception as error:  # noqa: BLE001 - nor here
            logger.error("inspect_lens: bodies with lens keys are passed over: %s", error)
        return made

    def add_routes(app: Any) -> None:
        found: list[dict[str, Any]] = []

        async def about() -> dict[str, Any]:
            described = _Front.end.describe() if _Front.end is not None else {}
            if not found:
                try:  # a vocabulary takes a moment to hash, and does not change
                    found.append(await asyncio.to_thread(computing_facts, app.state))
                except Exception as error:  # noqa: BLE001 - the rest is an answer without it
                    pass_over(error, uses_lens=False)
            return {
                **described,
                "off": all_off(),
                "stored_bytes": payloads.n_bytes,
                "computes_with": found[0] if found else {},
            }

        add_fetch_route(app, payloads, lambda: getattr(_Front.end, "siblings", None))
        app.get("/v1/inspect_lens")(about)
        add_registry_routes(app, lambda: _Front.end)
        add_hook_routes(app)
        add_sweep_route(app, lambda: _Front.end)

    return register


_WRAPPERS: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    "chat_full": _chat_full,
    "chat_batch": _chat_batch,
    "chat_stream": _chat_stream,
    "completion_full": _completion_full,
    "completion_stream": _completion_stream,
    "chat_params": _to_sampling_params,
    "completion_params": _to_sampling_params,
    "chat_beam": _refuse("beam search"),
    "completion_beam": _refuse("beam search"),
    "responses_params": _refuse("/v1/responses"),
    "transcription_params": _refuse("/v1/audio/transcriptions"),
    "transcription_beam": _refuse("/v1/audio/transcriptions"),
    "translation_params": _refuse("/v1/audio/translations"),
    "translation_beam": _refuse("/v1/audio/translations"),
    "tokens_full": _tokens_full,
    "tokens_stream": _tokens_stream,
    "routers": partial(_routers, LENS_KEYS),
}
