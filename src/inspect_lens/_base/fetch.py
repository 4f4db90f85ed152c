"""Bytes of the binary transport, fetched in a worker thread.

In the event loop a megabyte costs more than Inspect's own work on a sample: httpx reads and joins
it in Python, in pieces. urllib3 leaves that to the socket, which lets go of the interpreter.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from ssl import SSLContext
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import urllib3
from urllib3.exceptions import HTTPError

__all__ = ["HTTPError", "fetch_bytes"]

CONNECTIONS = 64


def fetch_bytes(
    url: str, headers: Mapping[str, str], *, timeout_s: float | None
) -> tuple[int, bytes]:
    """Get a URL: the status, and what came."""
    pool = _pool(urlsplit(url).scheme, urlsplit(url).hostname or "")
    response = pool.request("GET", url, headers=headers, timeout=timeout_s)
    return response.status, response.data


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
    # Half a second for a process that does nothing else with it.
    import httpx

    return httpx.create_ssl_context()
