"""In the API server: what a body asks of the lens, read once, and large bodies beside the loop.

vLLM would have it read where the parameters of sampling are made, on the event loop that serves
everybody, and makes 1 of a `true` in `vllm_xargs` before.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable, Collection, Mapping, MutableMapping
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, cast

from pydantic_core import from_json

from inspect_lens._vllm.compat.api_keys import lacks_key
from inspect_lens._vllm.compat.guard import pass_over
from inspect_lens.errors import CapacityError, LensError, SpecError, UnsupportedError
from inspect_lens.spec import (
    ENVELOPE_KEY,
    LENS_KEYS,
    NATIVE_KEY,
    OWN_WORDS,
    PLACES,
    EngineFacts,
    LensRequest,
    PatternBudget,
    TensorLimits,
    check_size,
    judging,
    lens_args,
    parse_extra_args,
    refuse_own_word,
    split_body,
)

from .refusals import refusal

__all__ = [
    "TOKENS_PATH",
    "ReadBodies",
    "RefuseLostKeys",
    "asked_of",
    "has_lens_words",
    "lost_keys",
    "pattern_budget",
    "read_body",
    "refuse",
    "typed",
    "whole_body",
    "xargs_of",
]

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

TOKENS_PATH = "/inference/v1/generate"
_SERVED = (
    "/v1/chat/completions",
    "/v1/chat/completions/batch",
    "/v1/completions",
    "/invocations",
    TOKENS_PATH,
)
"""Ends of paths whose handlers read lens keys."""
_UNGUARDED = "/invocations"
"""Where vLLM asks for no key of `--api-key`."""
_NO_KEY = (
    "this server asks for a key (--api-key) where something is asked of the lens; send "
    "'Authorization: Bearer KEY'"
)
_MARKS = tuple(key.encode() for key in LENS_KEYS)
_ESCAPED = re.compile(rb"\\u00[4-7]")
"""A letter that no encoder of JSON escapes: a key may be hidden."""
_SMALL = 1 << 16
HELD_BANKS = 8
"""Times the table of steering rows: what vectors of requests under way may take together."""


@dataclass
class _Held:
    request: LensRequest | None
    is_read: bool
    patterns: PatternBudget = field(default_factory=PatternBudget)


_held: ContextVar[_Held | None] = ContextVar("inspect_lens_body", default=None)


class ReadBodies:
    """ASGI middleware: parses and judges what a body asks of the lens before vLLM sees it."""

    _threads = ThreadPoolExecutor(2, thread_name_prefix="inspect-lens-read")

    def __init__(self, app: Callable[..., Awaitable[None]], front_end: Callable[[], Any]) -> None:
        """Wrap an application."""
        self._app = app
        self._front_end = front_end
        self._n_bytes = 0
        """Of vectors of requests under way."""

    async def __call__(self, scope: Mapping[str, Any], receive: Receive, send: Send) -> None:
        """Handle a connection."""
        path: str = scope.get("path", "")
        front = self._front_end()
        is_served = scope["type"] == "http" and scope["method"] == "POST" and path.endswith(_SERVED)
        if not is_served or front is None:
            await self._app(scope, receive, send)
            return
        body, again = await whole_body(receive)
        hides = _ESCAPED.search(body) is not None
        if not hides and not any(mark in body for mark in _MARKS):
            await self._app(scope, again, send)
            return
        if path.endswith(_UNGUARDED) and lacks_key(scope):
            await refuse(SpecError(_NO_KEY), send, status=401)
            return
        facts: EngineFacts | None = front.facts
        try:
            if len(body) <= _SMALL and b"zstd" not in body and not hides:
                held = read_body(path, body, facts)
            else:
                loop = asyncio.get_running_loop()
                held = await loop.run_in_executor(self._threads, read_body, path, body, facts)
            n_bytes = 0 if held.request is None else _vector_bytes(held.request)
            self._admit(n_bytes, facts)
        except LensError as error:
            await refuse(error, send)
            return
        self._n_bytes += n_bytes
        token = _held.set(held)
        try:
            await self._app(scope, again, send)
        finally:
            _held.reset(token)
            # Tasks that outlive the request were started with its context.
            held.request, held.patterns = None, PatternBudget()
            self._n_bytes -= n_bytes

    def _admit(self, n_bytes: int, facts: EngineFacts | None) -> None:
        if facts is None or not n_bytes or not self._n_bytes:
            return
        most = HELD_BANKS * facts.bank_rows * facts.hidden * 4
        if self._n_bytes + n_bytes > most:
            raise CapacityError(
                f"steering vectors of requests under way take {self._n_bytes} bytes, and together "
                f"with the {n_bytes} of this one more than {most}; try again later, register "
                "vectors that many requests use, or raise INSPECT_LENS_BANK_BYTES"
            )


async def whole_body(receive: Receive) -> tuple[bytes, Receive]:
    """Read a body; returns it, and what gives its messages to the application."""
    messages = [await receive()]
    while messages[-1]["type"] == "http.request" and messages[-1].get("more_body"):
        messages.append(await receive())
    waiting = iter(messages)

    async def again() -> Message:
        return next(waiting, None) or await receive()

    return b"".join(message.get("body", b"") for message in messages), again


@judging("the body")
def read_body(path: str, body: bytes, facts: EngineFacts | None) -> _Held:
    """Parse what a body asks of the lens."""
    check_size(body)
    try:
        fields = from_json(body)
    except ValueError as error:
        if "recursion" in str(error):
            raise SpecError("the body is nested too deep") from None
        return _Held(None, is_read=False)
    if path.endswith(TOKENS_PATH):
        fields = fields.get("sampling_params") if isinstance(fields, dict) else None
        args = fields.get("extra_args") if isinstance(fields, dict) else None
        if not isinstance(args, dict):
            return _Held(None, is_read=False)
    elif isinstance(fields, dict):
        args = lens_args(cast("dict[str, Any]", fields))
    else:
        return _Held(None, is_read=False)
    request = parse_extra_args(args, limits=None if facts is None else TensorLimits.of(facts))
    for edit in () if request is None else request.edits:
        for tensor in edit.tensors.values():
            tensor.sha256  # noqa: B018 - worked out here, and not on the event loop
    return _Held(request, is_read=True)


def asked_of(
    extra_args: Mapping[str, Any] | None, facts: EngineFacts | None = None
) -> LensRequest | None:
    """What parameters ask of the lens: as their body said it, where one was read."""
    held = _held.get()
    if held is not None and held.is_read and _is_raw(extra_args):
        return held.request
    return parse_extra_args(extra_args, limits=None if facts is None else TensorLimits.of(facts))


def pattern_budget() -> PatternBudget:
    """That of the body that is served, which may have many prompts; a new one elsewhere."""
    held = _held.get()
    return PatternBudget() if held is None else held.patterns


def xargs_of(request: Any, facts: EngineFacts | None) -> dict[str, Any] | None:
    """What a body of vLLM asks of the lens, and its other extra arguments.

    vLLM passes over fields that it does not know: what is meant for the lens there must not be
    lost in silence, nor what almost is.
    """
    unknown: dict[str, Any] = request.model_extra or {}
    xargs: dict[str, Any] = getattr(request, "vllm_xargs", None) or {}
    if not unknown and not xargs:
        return None
    if isinstance(xargs.get(NATIVE_KEY), LensRequest):
        return xargs  # read before: the body is one of several prompts
    body = {**unknown, **({"vllm_xargs": xargs} if xargs else {})}
    args = split_body(body, where="the body").args
    return typed(args, asked_of(args, facts))


def has_lens_words(request: Any, keys: Collection[str] = LENS_KEYS) -> bool:
    """Whether a body has anything of ours in it, wherever it stands."""
    places = [getattr(request, "vllm_xargs", None), getattr(request, "model_extra", None)]
    found = [place for place in places if isinstance(place, dict)]
    inner = [place[name] for place in found for name in PLACES if isinstance(place.get(name), dict)]
    return any(key in place for place in (*found, *inner) for key in keys)


def typed(args: Mapping[str, Any], request: LensRequest | None) -> dict[str, Any] | None:
    """Arguments with the request in the place of its spelling; None where nothing is left."""
    others = {key: value for key, value in args.items() if key not in LENS_KEYS}
    if request is not None:
        others[NATIVE_KEY] = request
    return others or None


def _is_raw(extra_args: Mapping[str, Any] | None) -> bool:
    """Whether lens keys are there as a client spelled them."""
    asked = extra_args or {}
    return not isinstance(asked.get(NATIVE_KEY), LensRequest) and any(k in asked for k in LENS_KEYS)


def _vector_bytes(request: LensRequest) -> int:
    return request.tensor_bytes


async def refuse(error: LensError, send: Send, *, status: int | None = None) -> None:
    """Answer with an error, in the form of vLLM's own; `status` in the place of the error's."""
    status = status or error.status
    body = json.dumps(refusal(error, status=status)).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


_FINE = (
    "/v1/chat/completions",
    "/v1/chat/completions/batch",
    "/v1/completions",
    "/v1/responses",
    "/invocations",
    "/render",
    "/tokenize",
    "/count_tokens",
)
"""Ends of paths whose handlers read lens keys, refuse them, or generate nothing."""
_GENERATE = ("/v1/messages", TOKENS_PATH)
"""Ends of paths that generate text, and whose own fields none of our words is among."""
_WORDS = tuple(f'"{word}"'.encode() for word in (ENVELOPE_KEY, *OWN_WORDS))


class RefuseLostKeys:
    """ASGI middleware: HTTP 400 for a JSON body with lens keys that its route would drop."""

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        """Wrap an application."""
        self._app = app

    async def __call__(self, scope: Mapping[str, Any], receive: Receive, send: Send) -> None:
        """Handle a connection."""
        if scope["type"] != "http" or not _is_suspect(scope):
            await self._app(scope, receive, send)
            return
        body, again = await whole_body(receive)
        problem = None
        try:
            problem = lost_keys(scope["path"], body)
        except BaseException as error:  # noqa: BLE001 - a door
            pass_over(error, uses_lens=any(mark in body for mark in _MARKS))
        if problem is not None:
            await refuse(UnsupportedError(problem), send)
            return
        await self._app(scope, again, send)


def lost_keys(path: str, body: bytes) -> str | None:
    """Why a body must not be handled by a route that knows nothing of the lens, or None."""
    generates = path.endswith(_GENERATE)
    if not any(mark in body for mark in (*_MARKS, *(_WORDS if generates else ()))):
        return None
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):
        return None  # vLLM has words for it
    if not isinstance(fields, dict):
        return None
    asked = cast("dict[str, Any]", fields)
    found = [key for key in LENS_KEYS if key in asked]
    for place in PLACES:
        inner = asked.get(place)
        found += [f"{place}.{key}" for key in LENS_KEYS if isinstance(inner, dict) and key in inner]
    if generates and not found:
        return _own_words(asked)
    if not found:
        return None
    where = (
        "put them into sampling_params.extra_args"
        if path.endswith(TOKENS_PATH)
        else "use /v1/chat/completions, /v1/completions or /inference/v1/generate"
    )
    return f"{path} would pass over {', '.join(found)}; {where}"


def _own_words(asked: dict[str, Any]) -> str | None:
    """What is wrong with the words of a body that generates text."""
    try:
        for key in asked:
            refuse_own_word(key, "the body")
    except SpecError as error:
        return str(error)
    return None


def _is_suspect(scope: Mapping[str, Any]) -> bool:
    """Whether the body of a request has to be looked at."""
    path: str = scope["path"]
    if scope["method"] != "POST" or path.endswith(_FINE):
        return False
    # Ours have bodies of their own.
    if "/v1/inspect_lens" in path or "/v1/hooks" in path:
        return False
    kinds = [value for name, value in scope["headers"] if name == b"content-type"]
    return any(b"json" in kind.lower() for kind in kinds)
