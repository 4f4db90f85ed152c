"""Requests with lens keys on routes that would pass over them: refused before any handler runs.

Several of vLLM's routes have bodies of their own, unknown fields of which are dropped in silence:
somebody who asks for activations there would get an answer without them, and without a word.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any, cast

from inspect_lens.spec import LENS_KEYS, PLACES

__all__ = ["RefuseLostKeys", "lost_keys"]

_Message = MutableMapping[str, Any]
_Receive = Callable[[], Awaitable[_Message]]
_Send = Callable[[_Message], Awaitable[None]]

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
_TOKENS = "/inference/v1/generate"
_MARKS = tuple(key.encode() for key in LENS_KEYS)


class RefuseLostKeys:
    """ASGI middleware: HTTP 400 for a JSON body with lens keys that its route would drop."""

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        """Wrap an application."""
        self._app = app

    async def __call__(self, scope: Mapping[str, Any], receive: _Receive, send: _Send) -> None:
        """Handle a connection."""
        if scope["type"] != "http" or not _is_suspect(scope):
            await self._app(scope, receive, send)
            return
        messages = [await receive()]
        while messages[-1]["type"] == "http.request" and messages[-1].get("more_body"):
            messages.append(await receive())
        body = b"".join(message.get("body", b"") for message in messages)
        if (problem := lost_keys(scope["path"], body)) is not None:
            await _refuse(problem, send)
            return
        waiting = iter(messages)

        async def again() -> _Message:
            return next(waiting, None) or await receive()

        await self._app(scope, again, send)


def lost_keys(path: str, body: bytes) -> str | None:
    """Why a body must not be handled by a route that knows nothing of the lens, or None."""
    if not any(mark in body for mark in _MARKS):
        return None
    try:
        fields = json.loads(body)
    except ValueError:
        return None  # vLLM has words for it
    if not isinstance(fields, dict):
        return None
    asked = cast("dict[str, Any]", fields)
    found = [key for key in LENS_KEYS if key in asked]
    for place in PLACES:
        inner = asked.get(place)
        found += [f"{place}.{key}" for key in LENS_KEYS if isinstance(inner, dict) and key in inner]
    if not found:
        return None
    where = (
        "put them into sampling_params.extra_args"
        if path.endswith(_TOKENS)
        else "use /v1/chat/completions, /v1/completions or /inference/v1/generate"
    )
    return f"{path} would pass over {', '.join(found)}; {where}"


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


async def _refuse(problem: str, send: _Send) -> None:
    error = {"message": problem, "type": "UnsupportedError", "param": None, "code": 400}
    body = json.dumps({"error": error}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": 400, "headers": headers})
    await send({"type": "http.response.body", "body": body})
