"""A webhook of this process, which fails as often as it is told to."""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import yaml


@dataclass
class Webhook:
    """What came, and what to answer next."""

    url: str
    dead_letter: Path
    received: list[dict[str, Any]] = field(default_factory=list)
    """Alerts that were answered with 200."""
    statuses: list[int] = field(default_factory=list)
    """Of all answers, also those that refused."""
    keys: list[str | None] = field(default_factory=list)
    """Header `Authorization` of all that came."""
    answers: deque[int] = field(default_factory=deque)
    """Statuses of the next answers; 200 behind them."""
    goes_on: threading.Event = field(default_factory=threading.Event)
    """Set; answers wait for it for a minute."""

    def clear(self) -> None:
        """Forget what came, and answer well again."""
        self.received.clear()
        self.statuses.clear()
        self.keys.clear()
        self.answers.clear()
        self.goes_on.set()
        self.dead_letter.write_text("")

    def dead(self) -> list[dict[str, Any]]:
        """The dead letters."""
        return [json.loads(line) for line in self.dead_letter.read_text().splitlines()]

    def config(self, **options: Any) -> dict[str, Any]:
        """The `alerts` of a server's file."""
        return {"url": self.url, "dead_letter": str(self.dead_letter), "pause_s": 0.05} | options

    def file(self, folder: Path, **options: Any) -> Path:
        """A server's file that has alerts alone."""
        path = folder / "server.yaml"
        path.write_text(yaml.safe_dump({"alerts": self.config(**options)}))
        return path


@contextmanager
def webhook(dead_letter: Path) -> Iterator[Webhook]:
    """Serve a webhook on a free port of this host."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            made.keys.append(self.headers["authorization"])
            made.goes_on.wait(60)
            status = made.answers.popleft() if made.answers else 200
            made.statuses.append(status)
            if status == 200:
                made.received.append(body)
            self.send_response(status)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    made = Webhook(f"http://127.0.0.1:{server.server_port}/secret-path", dead_letter)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    made.goes_on.set()
    try:
        yield made
    finally:
        made.goes_on.set()
        server.shutdown()
        server.server_close()
