"""The local web server of the chat page; it answers only the page that it gave out."""

from __future__ import annotations

import contextlib
import json
import secrets
import threading
from collections.abc import Generator
from dataclasses import asdict
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final, Literal, Self
from urllib.parse import parse_qs, urlsplit

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from inspect_lens.errors import LensError, SpecError
from inspect_lens.spec import explain

from ._chat_talk import ChatTalk
from ._page import page_json, render

__all__ = ["ChatPage"]

HOST: Final = "127.0.0.1"
MOST_BYTES: Final = 4 << 20
"""Of a request: a chat of a million words."""
_HEADERS: Final = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; script-src "
    "'unsafe-inline'; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors "
    "'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class ChatPage:
    """A chat page on this machine, served until it is closed.

    Other web pages of the same browser cannot use it: the address has a key that only its reader
    gets, requests have to name this host and come from this page, and nothing is given to frames.

    Args:
        talk: with the server; closed with the page.
        port: 0 takes a free one.

    Example:
        <!-- test: server -->
        ```python
        from inspect_lens.view import ChatPage, open_talk

        talk = open_talk("http://localhost:8000", probe="organism/deception-lr", layers=[2, 4])
        with ChatPage(talk) as page:
            assert page.url.startswith("http://127.0.0.1:")  # open it in a browser
        ```
    """

    def __init__(self, talk: ChatTalk, *, port: int = 0) -> None:
        self._talk = talk
        self._key = secrets.token_urlsafe(24)
        try:
            self._server = _Server((HOST, port), _Handler)
        except OSError as error:
            raise SpecError(
                f"port={port}: cannot be used ({error}); choose another, or 0"
            ) from None
        self._server.page = self
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self._server.server_address[1])

    @property
    def url(self) -> str:
        """Address for a browser, key included."""
        return f"http://{HOST}:{self.port}/?key={self._key}"

    def close(self) -> None:
        """Stop serving, and end what runs."""
        self._server.shutdown()
        self._server.server_close()
        self._talk.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def wait(self) -> None:
        """Serve until this thread is interrupted."""
        while self._thread.is_alive():
            self._thread.join(1.0)

    def has_key(self, key: str | None) -> bool:
        """Whether a key is that of this page."""
        return key is not None and secrets.compare_digest(key.encode(), self._key.encode())

    def html(self, template: str = "chat.html") -> str:
        """The chat page as HTML, or that of patch sweeps, `patch.html`."""
        setup = self._talk.setup
        facts = {**asdict(setup), "key": self._key, "server": self._talk.server}
        return render(template, title=setup.model, facts=facts)

    def answer(self, body: Any) -> Generator[dict[str, Any]]:
        """Events of an answer; an error of the server is the last of them."""
        return _until_error(self._talk.answer(**_asked(body)))

    def sweep(self, body: Any) -> Generator[dict[str, Any]]:
        """Events of a patch sweep, which the server judges; its error is the last of them."""
        if not isinstance(body, dict):
            raise SpecError(f"the body: a JSON object is wanted, not {type(body).__name__}")
        return _until_error(self._talk.sweep(body))


def _until_error(events: Generator[dict[str, Any]]) -> Generator[dict[str, Any]]:
    try:
        with contextlib.closing(events):
            yield from events
    except (LensError, OSError, ValueError) as error:
        yield {"event": "error", "message": str(error) or type(error).__name__}


_LABELS: Final = {
    "max_tokens": "Tokens at most", "temperature": "Temperature", "scale": "Steering",
}  # fmt: skip
"""What the page calls its fields."""


class _Message(BaseModel):
    role: Literal["system", "user", "assistant"]
    content: str


class _Asked(BaseModel):
    """What the page asks for."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)

    messages: list[_Message] = Field(min_length=1)
    max_tokens: int = Field(ge=1)
    temperature: float = Field(ge=0, le=2)
    scale: float = 0.0


def _asked(body: Any) -> dict[str, Any]:
    try:
        return _Asked.model_validate(body).model_dump()
    except ValidationError as error:
        raise SpecError(explain(error, root="the body", labels=_LABELS)) from None


_PAGES: Final = {"/": "chat.html", "/patch": "patch.html"}
"""Templates by path."""


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    page: ChatPage


class _Handler(BaseHTTPRequestHandler):
    """One request; HTTP/1.0, so that the end of a stream is that of its connection."""

    server: _Server

    def do_GET(self) -> None:
        """Give out the page."""
        asked = urlsplit(self.path)
        if not self._is_ours():
            return
        if asked.path not in _PAGES:
            self._refuse(HTTPStatus.NOT_FOUND, "there are two pages here, at / and /patch")
        elif not self.server.page.has_key(next(iter(parse_qs(asked.query).get("key", [])), None)):
            self._refuse(
                HTTPStatus.FORBIDDEN, "open the whole address that the program printed, with ?key="
            )
        else:
            page = self.server.page.html(_PAGES[asked.path])
            self._send(HTTPStatus.OK, "text/html; charset=utf-8", page)

    def do_POST(self) -> None:
        """Stream an answer."""
        if not self._is_ours():
            return
        origin = self.headers.get("Origin")
        if not self.server.page.has_key(self.headers.get("X-Inspect-Lens-Key")) or (
            origin is not None and origin not in self._origins()
        ):
            self._refuse(HTTPStatus.FORBIDDEN, "only the chat page itself may ask; reload it")
        elif self.path not in ("/answer", "/sweep"):
            self._refuse(HTTPStatus.NOT_FOUND, "answers are at /answer, and sweeps at /sweep")
        elif (body := self._body()) is not None:
            self._stream(body)

    def _stream(self, body: bytes) -> None:
        page = self.server.page
        try:
            events = (page.sweep if self.path == "/sweep" else page.answer)(json.loads(body))
        except (ValueError, RecursionError) as error:
            self._refuse(HTTPStatus.BAD_REQUEST, str(error))
            return
        self._begin(HTTPStatus.OK, "application/x-ndjson")
        with contextlib.suppress(OSError), contextlib.closing(events):
            for event in events:
                self.wfile.write(page_json(event) + b"\n")

    def _body(self) -> bytes | None:
        try:
            n = int(self.headers.get("Content-Length", ""))
        except ValueError:
            n = -1
        if not 0 <= n <= MOST_BYTES:
            self._refuse(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "the chat is too long for this page")
            return None
        return self.rfile.read(n)

    def _origins(self) -> tuple[str, str]:
        port = self.server.page.port
        return f"http://{HOST}:{port}", f"http://localhost:{port}"

    def _is_ours(self) -> bool:
        """Whether the request names this host: a name that somebody points here is refused."""
        if f"http://{self.headers.get('Host')}" in self._origins():
            return True
        self._refuse(HTTPStatus.FORBIDDEN, f"open http://{HOST}:{self.server.page.port}/ instead")
        return False

    def _refuse(self, status: HTTPStatus, message: str) -> None:
        self._send(status, "application/json", json.dumps({"error": {"message": message}}))

    def _send(self, status: HTTPStatus, kind: str, text: str) -> None:
        with contextlib.suppress(OSError):
            self._begin(status, kind)
            self.wfile.write(text.encode())

    def _begin(self, status: HTTPStatus, kind: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": kind, **_HEADERS}.items():
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing: the key stands in the address."""
