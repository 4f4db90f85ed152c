"""In the API server: what a body asks of the lens, read once, and large bodies beside the loop.

vLLM would have it read where the parameters of sampling are made, on the event loop that serves
everybody, and makes 1 of a `true` in `vllm_xargs` before.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, cast

from pydantic_core import from_json

from inspect_lens._vllm.compat.api_server import lacks_key
from inspect_lens._vllm.compat.features import FEATURES, is_off, require
from inspect_lens._vllm.compat.guard import pass_over
from inspect_lens._vllm.compat.off import not_served
from inspect_lens._vllm.traces import Asked
from inspect_lens.errors import CapacityError, LensError, SpecError, UnsupportedError
from inspect_lens.spec import (
    ENVELOPE_KEY,
    LENS_KEYS,
    OWN_WORDS,
    PLACES,
    EngineFacts,
    PatternBudget,
    TensorLimits,
    check_size,
    judging,
    parse_extra_args,
    refuse_own_word,
    split_body,
)

from .refusals import Message, Send, refuse
from .responses import SERVED, Answer, Body

Receive = Callable[[], Awaitable[Message]]

TOKENS_PATH = "/inference/v1/generate"
_SERVED = (
    "/v1/chat/completions",
    "/v1/chat/completions/batch",
    "/v1/completions",
    "/invocations",
    TOKENS_PATH,
)
"""Ends of paths whose handlers read lens keys."""
_FINE = ("/render", "/tokenize", "/count_tokens")
"""Ends of paths that generate nothing."""
_OWN = ("/v1/inspect_lens", "/v1/hooks")
"""Of our own routes, which have bodies of their own."""
_GENERATE = ("/v1/messages", TOKENS_PATH)
"""Ends of paths that generate text, and whose own fields none of our words is among."""
_UNGUARDED = "/invocations"
"""Where vLLM asks for no key of `--api-key`."""
_NO_KEY = (
    "this server asks for a key (--api-key) where something is asked of the lens; send "
    "'Authorization: Bearer KEY'"
)
_KEYS = tuple(key.encode() for key in LENS_KEYS)
_WORDS = tuple(f'"{word}"'.encode() for word in (ENVELOPE_KEY, *OWN_WORDS))
_ESCAPED = re.compile(rb"\\u00[4-7]")
"""A letter that no encoder of JSON escapes: a key may be hidden."""
_SMALL = 1 << 16
_MOST_TABLES = 8
"""Times the table of steering rows: what vectors of requests under way may take together."""


class LensBodies:
    """ASGI middleware: what a body asks of the lens is parsed and judged before vLLM sees it.

    A JSON body that asks for something is refused where its route would pass over it, and
    everywhere while the lens is off.
    """

    _threads = ThreadPoolExecutor(2, thread_name_prefix="inspect-lens-read")

    def __init__(
        self,
        app: Callable[..., Awaitable[None]],
        front_end: Callable[[], Any],
        keys: Collection[str] = LENS_KEYS,
    ) -> None:
        """Wrap an application; `keys` are those that are refused while the lens is off."""
        self._app = app
        self._front_end = front_end
        self._keys = keys
        self._n_bytes = 0
        """Of vectors of requests under way."""

    async def __call__(self, scope: Mapping[str, Any], receive: Receive, send: Send) -> None:
        if not _may_ask(scope):
            await self._app(scope, receive, send)
            return
        path: str = scope["path"]
        body, again = await whole_body(receive)
        has_keys = any(key in body for key in _KEYS)
        is_hidden = _ESCAPED.search(body) is not None
        has_words = path.endswith(_GENERATE) and any(word in body for word in _WORDS)
        if not (has_keys or is_hidden or has_words or _runs_hooks(scope)):
            await self._app(scope, again, send)
            return
        asked: Body | None = None
        n_bytes, span = 0, Asked(scope)
        try:
            front = self._front_end()
            facts: EngineFacts | None = getattr(front, "facts", None)
            off = self._off(front)
            if path.endswith(_UNGUARDED) and lacks_key(scope) and _is_ours(off):
                await refuse(error := SpecError(_NO_KEY), send, status=401)
                span.end(401, error=error)
                return
            read = partial(read_body, path, body, facts, off)
            if len(body) <= _SMALL and b"zstd" not in body and not is_hidden:
                asked = read()
            else:
                asked = await asyncio.get_running_loop().run_in_executor(self._threads, read)
            if asked is not None and asked.request is not None:
                n_bytes = asked.request.tensor_bytes
            self._admit(n_bytes, facts)
        except LensError as error:
            span.end(error.status, error=error)
            await refuse(error, send)
            return
        except BaseException as error:  # noqa: BLE001 - the loop is everybody's
            pass_over(error, uses_lens=has_keys)
        if asked is None:
            await self._app(scope, again, send)
            return
        self._n_bytes += n_bytes
        token, answer = SERVED.set(asked), Answer(send, asked)
        is_traced = asked.request is not None and span.span is not None
        asked.span = span.span if is_traced else None
        try:
            await self._app(span.scope if is_traced else scope, again, answer)
        except Exception as error:
            asked.error = asked.error or error
            raise
        finally:
            SERVED.reset(token)
            if is_traced:
                span.end(answer.status, asked.request, asked.results.values(), asked.error)
            asked.forget()
            self._n_bytes -= n_bytes

    def _admit(self, n_bytes: int, facts: EngineFacts | None) -> None:
        if facts is None or not n_bytes or not self._n_bytes:
            return
        most = _MOST_TABLES * facts.bank_rows * facts.hidden * 4
        if self._n_bytes + n_bytes > most:
            raise CapacityError(
                f"steering vectors of requests under way take {self._n_bytes} bytes, and together "
                f"with the {n_bytes} of this one more than {most}; try again later, register "
                "vectors that many requests use, or raise INSPECT_LENS_BANK_BYTES"
            )

    def _off(self, front: Any) -> tuple[str, Collection[str]] | None:
        """Why the lens is off in this process, with the keys that are refused then; or None."""
        for feature in ("lens", "http"):
            if (reason := is_off(feature)) is not None:
                return f"{FEATURES[feature]}: off in this server: {reason}", self._keys
        refusal: str | None = getattr(front, "refusal", None)
        # An engine that is not served refuses all of them, whoever else is loaded.
        return None if refusal is None else (str(not_served(refusal)), LENS_KEYS)


def _runs_hooks(scope: Mapping[str, Any]) -> bool:
    """Whether persistent hooks run on every request, whose answer then says so."""
    client = getattr(getattr(scope.get("app"), "state", None), "engine_client", None)
    book = getattr(getattr(client, "input_processor", None), "inspect_lens_book", None)
    return bool(getattr(book, "hooks", ())) and scope["path"].endswith(_SERVED)


def _may_ask(scope: Mapping[str, Any]) -> bool:
    """Whether the body of a request has to be looked at."""
    if scope["type"] != "http" or scope["method"] != "POST":
        return False
    path: str = scope["path"]
    if path.endswith(_SERVED):
        return True
    if path.endswith(_FINE) or any(own in path for own in _OWN):
        return False
    kinds = [value for name, value in scope["headers"] if name == b"content-type"]
    return any(b"json" in kind.lower() for kind in kinds)


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
def read_body(
    path: str,
    body: bytes,
    facts: EngineFacts | None,
    off: tuple[str, Collection[str]] | None = None,
) -> Body | None:
    """Parse what a body asks of the lens; None where its route serves no results."""
    if (fields := _fields(body)) is None:
        return None  # vLLM has words for it
    is_tokens = path.endswith(TOKENS_PATH)
    params = fields.get("sampling_params") if is_tokens else fields
    params = cast("dict[str, Any]", params) if isinstance(params, dict) else {}
    if off is not None:
        reason, keys = off
        if _keys_in(fields, keys) or _keys_in(params, keys):
            raise UnsupportedError(reason)
        if not _is_ours(off):
            return None  # the other keys are another plug-in's
    if is_tokens or not path.endswith(_SERVED):
        _refuse_lost(path, fields)
    if not path.endswith(_SERVED):
        return None
    args = params.get("extra_args") if is_tokens else split_body(fields, where="the body").args
    if not isinstance(args, dict):
        return None
    request = parse_extra_args(args, limits=None if facts is None else TensorLimits.of(facts))
    if request is not None and fields.get("use_beam_search"):
        raise UnsupportedError(
            f"use_beam_search cannot be used with {', '.join(_keys_in(fields))}: beams have no "
            "results; leave one of them out"
        )
    for edit in () if request is None else request.edits:
        for tensor in edit.tensors.values():
            tensor.sha256  # noqa: B018 - worked out here, and not on the event loop
    chunks = "chat.completion.chunk" if "messages" in fields else "text_completion"
    kind = "inference.generate.chunk" if is_tokens else chunks
    return Body(request, kind, {k: v for k, v in args.items() if k not in LENS_KEYS})


_BOM = b"\xef\xbb\xbf"


def _fields(body: bytes) -> dict[str, Any] | None:
    check_size(body)
    try:
        fields = from_json(body)
    except ValueError as error:
        if "recursion" in str(error):
            raise SpecError("the body is nested too deep") from None
        if body.startswith(_BOM):
            return _fields(body.removeprefix(_BOM))  # vLLM reads past it, too
        return None
    return cast("dict[str, Any]", fields) if isinstance(fields, dict) else None


def _is_ours(off: tuple[str, Collection[str]] | None) -> bool:
    """Whether all lens keys are meant for this package."""
    return off is None or set(off[1]) == set(LENS_KEYS)


def _keys_in(fields: Mapping[str, Any], keys: Collection[str] = LENS_KEYS) -> list[str]:
    """Paths of keys at the top of a body, and in the places that may have them."""
    places = {"": fields, **{f"{name}.": fields.get(name) for name in PLACES}}
    return [
        f"{place}{key}"
        for place, inner in places.items()
        for key in keys
        if isinstance(inner, Mapping) and key in inner
    ]


def _refuse_lost(path: str, fields: dict[str, Any]) -> None:
    """Refuse keys that a route knows nothing of, which it would pass over."""
    if found := _keys_in(fields):
        where = (
            "put them into sampling_params.extra_args"
            if path.endswith(TOKENS_PATH)
            else "use /v1/chat/completions, /v1/completions or /inference/v1/generate"
        )
        raise UnsupportedError(f"{path} would pass over {', '.join(found)}; {where}")
    if path.endswith(_GENERATE):
        for key in fields:
            refuse_own_word(key, "the body")


def pattern_budget() -> PatternBudget:
    """That of the body that is served, which may have many prompts; a new one elsewhere."""
    body = SERVED.get()
    return PatternBudget() if body is None else body.patterns


def check_unread(request: Any, keys: Collection[str] = LENS_KEYS) -> None:
    """Refuse what a body of vLLM asks of the lens where `LensBodies` has not read it.

    vLLM passes over fields that it does not know: what is meant for the lens there must not be
    lost in silence, nor what almost is.
    """
    if SERVED.get() is not None:
        return
    found = has_lens_words(request, keys)
    if found:
        require("lens")
    elif is_off("lens") is not None:
        return  # the other keys may be another plug-in's
    unknown: dict[str, Any] = request.model_extra or {}
    xargs: dict[str, Any] = getattr(request, "vllm_xargs", None) or {}
    if unknown or xargs:
        split_body({**unknown, **({"vllm_xargs": xargs} if xargs else {})}, where="the body")
    if found:
        raise UnsupportedError(
            f"{type(request).__name__}: nothing here returns what {found} asks for; send it to "
            "/v1/chat/completions, /v1/completions or /inference/v1/generate of a server"
        )


def has_lens_words(request: Any, keys: Collection[str] = LENS_KEYS) -> str:
    """A key of ours that a body of vLLM has, wherever it stands; empty for none."""
    places = [getattr(request, "vllm_xargs", None), getattr(request, "model_extra", None)]
    found = [place for place in places if isinstance(place, dict)]
    inner = [place[name] for place in found for name in PLACES if isinstance(place.get(name), dict)]
    return next((key for place in (*found, *inner) for key in keys if key in place), "")
