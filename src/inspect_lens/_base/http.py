"""What every client of a server does alike: which failures are tried again, and how they are told.

Inspect's client is of `httpx` or of `httpx2`, by the version of the OpenAI client, and their errors
are not each other's. So errors are known by their names.
"""

from __future__ import annotations

from typing import Final

import httpx

from inspect_lens.errors import CaptureError, SpecError

__all__ = [
    "DELAYS_S",
    "is_broken",
    "is_transport_error",
    "no_answer",
    "server_address",
    "with_advice",
]

DELAYS_S: Final = (0.1, 0.5, 2.0)
"""Before each further attempt over a connection that broke."""
_BROKEN: Final = frozenset(
    {"CloseError", "ConnectError", "ReadError", "RemoteProtocolError", "WriteError"}
)


def is_transport_error(error: BaseException) -> bool:
    """Whether no answer came, for whatever reason."""
    return any(
        base.__name__ == "TransportError" and base.__module__.startswith("httpx")
        for base in type(error).__mro__
    )


def is_broken(error: BaseException) -> bool:
    """Whether a connection broke, as an idle one does that the server closes; another may hold."""
    return is_transport_error(error) and type(error).__name__ in _BROKEN


def no_answer(url: str, error: BaseException, whose: str = "") -> CaptureError:
    """The error of a request that nobody answered."""
    named = type(error).__name__
    if named.startswith("Connect"):
        return CaptureError(
            f"no server answers at {url}{whose}: {error}; start one there, or pass another address "
            "as base_url="
        )
    return CaptureError(
        f"{url}{whose}: the connection broke ({named}: {error}), also when tried again; look into "
        "the server's log"
    )


def with_advice(message: str, url: str) -> str:
    """A server's refusal, with what helps where a prompt is longer than the model's context."""
    if "maximum context length" not in message:
        return message
    return (
        f"{message} Prompt and answer share the context of the server at {server_address(url)}: "
        "shorten the messages, lower max_tokens, or start the server with a larger "
        "--max-model-len (with a model that Inspect serves: -M max_model_len=...)"
    )


def server_address(url: str) -> str:
    """Address of a server without `/v1`; `localhost:8000` is one by HTTP."""
    address = url.strip() if "://" in url else f"http://{url.strip()}"
    try:
        parsed = httpx.URL(address)
        why = "" if parsed.scheme in ("http", "https") and parsed.host else "it names no host"
    except httpx.InvalidURL as error:
        why = str(error)
    if why:
        raise SpecError(
            f"base_url={url!r}: is no address of a server ({why}); allowed is one such as "
            "http://localhost:8000"
        )
    return address.rstrip("/").removesuffix("/v1")
