"""Bytes by urllib3: the ways of httpx, and servers of several processes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from inspect_lens._base.http import HTTPError, _pool, fetch_bytes


class Answers(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    seen: list[tuple[str, str | None, int]]
    refusals: int

    def do_GET(self) -> None:
        cls = type(self)
        cls.seen.append((self.path, self.headers.get("Authorization"), self.client_address[1]))
        status, body = (404, b"no") if len(cls.seen) <= cls.refusals else (200, b"x" * 100_000)
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def handler() -> type[Answers]:
    return type("Handler", (Answers,), {"seen": [], "refusals": 0})


@pytest.fixture
def url(handler: type[Answers]) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


def test_connections_are_kept_and_headers_sent(url: str, handler: type[Answers]) -> None:
    for _ in range(3):
        status, data = fetch_bytes(f"{url}/a", {"Authorization": "Bearer k"}, timeout_s=5)
        assert (status, data) == (200, b"x" * 100_000)
    assert {(path, key) for path, key, _ in handler.seen} == {("/a", "Bearer k")}
    assert len({port for _, _, port in handler.seen}) == 1


def test_what_a_server_does_not_have_is_asked_for_once(url: str, handler: type[Answers]) -> None:
    """The servers of one engine fetch from one another."""
    handler.refusals = 10**9
    assert fetch_bytes(f"{url}/a", {}, timeout_s=5) == (404, b"no")
    assert len(handler.seen) == 1


def test_out_of_reach_is_an_error() -> None:
    with pytest.raises(HTTPError):
        fetch_bytes("http://127.0.0.1:9/a", {}, timeout_s=1)


def test_a_proxy_is_used_as_httpx_would(
    url: str, handler: type[Answers], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", url)
    monkeypatch.setenv("no_proxy", "near.example")
    _pool.cache_clear()
    try:
        assert fetch_bytes("http://far.example/a", {}, timeout_s=5)[0] == 200
        assert handler.seen[0][0] == "http://far.example/a"
        with pytest.raises(HTTPError):
            fetch_bytes("http://near.example/a", {}, timeout_s=1)
    finally:
        _pool.cache_clear()
