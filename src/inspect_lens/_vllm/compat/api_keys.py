"""The keys of `--api-key`, on routes where vLLM does not ask for one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["lacks_key"]


def lacks_key(scope: Mapping[str, Any]) -> bool:
    """Whether a server has keys, and a request shows none of them."""
    from starlette.datastructures import Headers

    app = scope.get("app")
    for item in getattr(app, "user_middleware", ()):
        if hasattr(item.cls, "verify_token"):  # vLLM's AuthenticationMiddleware
            asks = item.cls(app, *item.args, **item.kwargs)
            return not asks.verify_token(Headers(raw=scope["headers"]))
    return False
