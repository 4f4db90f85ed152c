"""The HTTP route that gives out what waits in the store of the binary transport."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from inspect_lens._vllm import traces
from inspect_lens._vllm.clients import NotesClient
from inspect_lens._vllm.metrics import refused_as

from .payloads import TTL_S, PayloadStore
from .shared_payloads import fetch_payload

__all__ = ["add_fetch_route", "takes_any_buffer"]

_PASSING = {"fastapi", "inspect_lens", "prometheus_fastapi_instrumentator", "starlette", "vllm"}
"""Packages whose middleware passes bodies on as they are, but for what is made of a function."""


def add_fetch_route(app: Any, payloads: PayloadStore, siblings: Callable[[], Path | None]) -> None:
    """Add `GET /v1/activations/{handle}` to a server.

    Args:
        app: the FastAPI application.
        payloads: of this process.
        siblings: gives the folder that several API servers share, or None.
    """
    from fastapi import Request, Response

    async def fetch_activations(handle: str, request: Any) -> Any:
        began = time.time_ns()
        try:
            data = await fetch_payload(handle, payloads, siblings())
        except LookupError:
            refused_as(404, "UnknownHandle")
            traces.fetched(handle, began, 404, 0)
            return Response(
                status_code=404,
                content=f"handle {handle!r} is of another server process; ask again over a "
                "new connection",
            )
        if data is None:
            refused_as(410, "ExpiredHandle")
            traces.fetched(handle, began, 410, 0)
            return Response(
                status_code=410,
                content=f"handle {handle!r} has expired {TTL_S:g} s after its result came, or was "
                "fetched before",
            )
        traces.fetched(handle, began, 200, len(data))
        if not takes_any_buffer(request.app):
            data = bytes(data)
        return Response(content=data, media_type="application/octet-stream")

    # FastAPI reads annotations at run time, and those of this module are text; so would a return
    # type be, of which it cannot make a schema.
    fetch_activations.__annotations__["request"] = Request
    app.get("/v1/activations/{handle}", response_class=Response)(fetch_activations)
    app.add_middleware(NotesClient)


def takes_any_buffer(app: Any) -> bool:
    """Whether a body may be a view of memory: the middleware of others may want bytes.

    vLLM's own that logs responses (`VLLM_DEBUG_LOG_API_SERVER_RESPONSE`) does, and is a function.
    """
    from starlette.middleware.base import BaseHTTPMiddleware

    kinds = [item.cls for item in app.user_middleware]
    return all(
        getattr(kind, "__module__", "").partition(".")[0] in _PASSING
        and not (isinstance(kind, type) and issubclass(kind, BaseHTTPMiddleware))
        for kind in kinds
    )
