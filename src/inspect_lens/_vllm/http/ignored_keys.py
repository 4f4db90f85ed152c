"""Requests with lens keys on routes that would pass over them: refused before any handler runs.

Several of vLLM's routes have bodies of their own, unknown fields of which are dropped in silence:
somebody who asks for activations there would get an answer without them, and without a word.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, cast

from inspect_lens._vllm.compat.guard import pass_over
from inspect_lens.errors import SpecError, UnsupportedError
from inspect_lens.spec import ENVELOPE_KEY, LENS_KEYS, OWN_WORDS, PLACES, refuse_own_word

from .bodies import TOKENS_PATH, Receive, Send, refuse, whole_body

__all__ = ["RefuseLostKeys", "lost_keys"]

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
_MARKS = tuple(key.encode() for key in LENS_KEYS)


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
