"""The key that routes ask for which change what other clients rely on."""

from __future__ import annotations

import hashlib
import secrets
from typing import Any

from inspect_lens import _settings
from inspect_lens._vllm.metrics import refused_as

__all__ = ["UNAUTHORIZED", "may_write"]

UNAUTHORIZED: dict[str, dict[str, Any]] = {
    "error": {
        "message": "this server asks for a key to change what is registered; send "
        "'Authorization: Bearer KEY' with the value of its INSPECT_LENS_REGISTRY_KEY",
        "type": "Unauthorized",
        "code": 401,
    }
}


def may_write(request: Any) -> bool:
    """Whether a request brings the key, where one is set.

    Args:
        request: with `headers`.
    """
    wanted = _settings.text("registry_key")
    if not wanted:
        return True
    scheme, _, given = (request.headers.get("authorization") or "").partition(" ")
    # Hashes have one length, so that the time says nothing of the key.
    hashes = [hashlib.sha256(text.encode()).digest() for text in (given.strip(), wanted)]
    has_key = secrets.compare_digest(*hashes) and scheme.lower() == "bearer"
    if not has_key:
        refused_as(401, UNAUTHORIZED["error"]["type"])
    return has_key
