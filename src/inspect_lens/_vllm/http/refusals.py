"""Bodies of our own routes, read beside the loop, and the one form of an answer that refuses."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import suppress
from typing import Any, Final

from inspect_lens._vllm.compat.api_server import status_of
from inspect_lens._vllm.telemetry import refused, refused_as
from inspect_lens.errors import LensError, SpecError
from inspect_lens.spec import check_counts, check_size

Message = MutableMapping[str, Any]
Send = Callable[[Message], Awaitable[None]]

MOST_BYTES: Final = 2 << 30
"""Of a body of our routes: a lens of the largest size, in base64."""
_MOST_MESSAGE: Final = 4000
"""Characters; errors of vLLM may have the prompt in them."""


def refusal(error: BaseException, *, status: int | None = None) -> dict[str, Any]:
    """The body of an answer that refuses, in the form of vLLM's own; it is counted."""
    code = status_of(error) if status is None else status
    if isinstance(error, LensError) and code == error.status:
        refused(error)
    else:
        refused_as(code, type(error).__name__)
    # No response can hold half of a surrogate pair.
    message = str(error).encode("utf-8", "backslashreplace").decode()
    if len(message) > _MOST_MESSAGE:
        half = _MOST_MESSAGE // 2
        message = f"{message[:half]} … {message[-half:]}"
    about = {"message": message, "type": type(error).__name__, "param": None, "code": code}
    return {"error": about}


async def refuse(error: LensError, send: Send, *, status: int | None = None) -> None:
    """Answer with an error; `status` in the place of the error's."""
    status = status or error.status
    body = json.dumps(refusal(error, status=status)).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def as_utf8(body: bytes) -> bytes:
    """A body of JSON in any of its encodings, all of which vLLM reads, in the one that we read."""
    if body[:1] == b"{" and b"\0" not in body[:4]:
        return body  # which `json` sees in as many steps as all else takes
    encoding = json.detect_encoding(body[:4])
    if encoding == "utf-8":
        return body
    with suppress(UnicodeDecodeError):
        return body.decode(encoding, "surrogatepass").encode("utf-8", "surrogatepass")
    return body


def parse_json(body: bytes) -> Any:
    from pydantic_core import from_json  # three times as fast as `json`; neither lets go of the GIL

    check_size(body := as_utf8(body))
    try:
        return from_json(body)
    except ValueError as error:
        raise SpecError(f"the body cannot be read: {error}") from None


async def json_body(request: Any) -> dict[str, Any]:
    """The JSON object that a request to one of our routes has; {} where it has no body."""
    parts: list[bytes] = []
    n = 0
    async for part in request.stream():
        n += len(part)
        if n > MOST_BYTES:
            raise SpecError(f"the body has more than {MOST_BYTES} bytes, which is the most")
        parts.append(part)
    if not n:
        return {}
    body = await asyncio.to_thread(_object, b"".join(parts))
    return body


def _object(body: bytes) -> dict[str, Any]:
    found = parse_json(body)
    if not isinstance(found, dict):
        raise SpecError(
            f"the body cannot be read: a JSON object is wanted, not {type(found).__name__}"
        )
    check_counts(found, field="the body")
    return found
