"""Whose HTTP request is served: what one client has is counted, and kept from other tenants.

A tenant is whoever shows one API key. Where a server asks for none, `cache_salt` of a request tells
tenants apart, as it does in vLLM's prefix cache.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any

CLIENT: ContextVar[str] = ContextVar("inspect_lens_client", default="")
"""An address and the key that it shows."""

TENANT: ContextVar[str] = ContextVar("inspect_lens_tenant", default="")
"""The hash of the key; empty without one, and in an engine of one's own process."""


TRACE: ContextVar[Mapping[str, str] | None] = ContextVar("inspect_lens_trace", default=None)
"""Trace headers of a request, as W3C Trace Context has them."""
_TRACE = (b"traceparent", b"tracestate")


class NotesClient:
    """ASGI middleware that notes whose request is served, and of which trace it is a part."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            key = next((v for k, v in scope["headers"] if k == b"authorization"), b"")
            tenant = hashlib.sha256(key).hexdigest()[:16] if key else ""
            TENANT.set(tenant)
            CLIENT.set(f"{(scope.get('client') or ('',))[0]} {tenant}")
            found = {k.decode(): v.decode("latin-1") for k, v in scope["headers"] if k in _TRACE}
            TRACE.set(found or None)
        await self._app(scope, receive, send)
