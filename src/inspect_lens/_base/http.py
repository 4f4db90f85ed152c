"""What every client of a server does alike: failures that are tried again, bytes, and receipts.

Inspect's client is of `httpx` or of `httpx2`, by the version of the OpenAI client, and their errors
are not each other's. So errors are known by their names.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from ssl import SSLContext
from typing import Any, Final
from urllib.parse import quote, urlsplit
from urllib.request import getproxies, proxy_bypass

import urllib3
from pydantic_core import from_json, to_json
from urllib3.exceptions import HTTPError

from inspect_lens.errors import CaptureError, SpecError
from inspect_lens.spec import NATIVE_KEY, LensRequest, to_extra_args

from .same_host import NotHere, fetch_here

__all__ = [
    "DELAYS_S",
    "NO_PLUGIN",
    "HTTPError",
    "event_of",
    "fetch_bytes",
    "fetch_result",
    "fetched",
    "gives_no_receipts",
    "is_broken",
    "is_transport_error",
    "json_bytes",
    "needs_receipt",
    "no_answer",
    "not_done",
    "path_of",
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
    # Imported in functions: the intake process fetches bytes and needs no httpx, rich or click.
    import httpx

    address = url.strip() if "://" in url else f"http://{url.strip()}"
    try:
        parsed = httpx.URL(address)
        why = "" if parsed.scheme in ("http", "https") and parsed.host else "it names no host"
    except (httpx.InvalidURL, UnicodeError) as error:
        why = str(error)
    if why:
        raise SpecError(
            f"base_url={url!r} is not the address of a server ({why}); allowed is one such as "
            "http://localhost:8000"
        )
    return address.rstrip("/").removesuffix("/v1")


CONNECTIONS = 64


def fetch_bytes(
    url: str, headers: Mapping[str, str], *, timeout_s: float | None
) -> tuple[int, bytes]:
    """Get a URL: the status, and what came."""
    pool = _pool(urlsplit(url).scheme, urlsplit(url).hostname or "")
    response = pool.request("GET", url, headers=headers, timeout=timeout_s)
    return response.status, response.data


_INLINE = 'have tensors in the answer, with "transport": "inline" in the capture'


def path_of(handle: str) -> str:
    """Where a server has what a handle stands for."""
    return f"/v1/activations/{quote(handle, safe='')}"


def fetch_result(
    root: str, headers: Mapping[str, str], handle: str, *, timeout_s: float | None
) -> bytes | memoryview:
    """Take what a handle stands for, in the calling thread: by HTTP from another host or user."""
    try:
        found = fetch_here(handle, timeout_s=timeout_s)
    except NotHere:
        status, data = fetch_bytes(root + path_of(handle), headers, timeout_s=timeout_s)
        return fetched(handle, status, data)
    if found is None:
        raise CaptureError(
            f"activations: handle {handle!r}: the server on this host no longer has its result; "
            f"it expired, or was fetched before; fetch results sooner, or {_INLINE}"
        )
    return found


def fetched(handle: str, status: int, data: bytes | memoryview) -> bytes | memoryview:
    """The bytes of an answer."""
    if status != 200:
        raise CaptureError(
            f"activations: handle {handle!r} answered HTTP {status}; it expired, was fetched "
            f"before, or is out of reach behind a gateway; {_INLINE}"
        )
    return data


def json_bytes(value: object) -> bytes:
    """JSON that everybody can parse: infinity and NaN, as scores may be, are texts in it."""
    return to_json(value, inf_nan_mode="strings")


def event_of(text: str) -> dict[str, Any]:
    """An event of a streamed answer, a JSON object; what else comes is the server's error."""
    try:
        event = from_json(text)
    except ValueError as why:
        raise CaptureError(f"the server sent an event that is not JSON ({why})") from None
    if not isinstance(event, dict):
        raise CaptureError(
            f"the server sent an event that is not a JSON object: {text[:80]!r}; ask again"
        )
    return event


@lru_cache(maxsize=32)
def _pool(scheme: str, host: str) -> urllib3.PoolManager:
    """Connections to a host, by the proxy and the certificates that httpx would use."""
    proxies = getproxies()
    proxy = None if proxy_bypass(host) else proxies.get(scheme) or proxies.get("all")
    context = _tls() if scheme == "https" else None
    if proxy is not None:
        return urllib3.ProxyManager(proxy, maxsize=CONNECTIONS, ssl_context=context)
    return urllib3.PoolManager(maxsize=CONNECTIONS, ssl_context=context)


def _tls() -> SSLContext:
    import httpx

    return httpx.create_ssl_context()


NO_PLUGIN: Final = (
    "the server runs without the inspect-lens plug-in (install inspect-lens in the server's "
    "environment, and see that VLLM_PLUGINS and INSPECT_LENS_DISABLE allow it)"
)
"""Why a server does nothing of what was asked, and what helps."""


def not_done(request: LensRequest | None, receipt: Mapping[str, Any] | None) -> str | None:
    """Say which steering, probes, lens and sink of a request a receipt lacks."""
    if request is None:
        return None
    done = receipt or {}
    parts = []
    if not done.get("steer"):
        keys = ["edits (steering vectors among them)"] if request.edits else []
        if request.edits_named:
            keys.append(f"edits_named {[use.name for use in request.edits_named]}")
        if keys:
            parts.append(f"{', '.join(keys)}: the server answered without steering")
    acted = {tier.get("name") for tier in done.get("tiers") or ()}
    if missing := [name for name in request.configs if name not in acted]:
        parts.append(f"configs {missing}: the server answered without them")
    ran = {probe.get("name") for probe in done.get("probes") or ()}
    if missing := [use.name for use in request.probes if use.name not in ran]:
        parts.append(f"probes {missing}: the server answered without running them")
    if request.lens is not None and not done.get("lens"):
        parts.append("lens: the server answered without reading the stream")
    if request.sink is not None and not done.get("sink"):
        parts.append(f"sink {request.sink.name!r}: the server answered without recording")
    if not parts:
        return None
    return f"{'; '.join(parts)}; {NO_PLUGIN}"


def needs_receipt(request: LensRequest) -> bool:
    """Whether a request says something that vllm-lens, which gives no receipts, does not know."""
    return NATIVE_KEY in to_extra_args(request)


def gives_no_receipts(status: int, openapi: str) -> bool:
    """Tell vllm-lens from plain vLLM, which ignores what it is asked for, by its routes."""
    return status != 200 or "/v1/hooks/" in openapi
