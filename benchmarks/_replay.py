"""A server that answers from memory: the fake lens server's answers, made once and repeated.

What a benchmark of the client must not measure is the making of the answers. Here the first
request of a kind is answered by `FakeLensServer`; every later one gets the same bytes again, after
the time that a completion takes. One thread, no copy of the captured bytes.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from functools import partial
from http import HTTPStatus
from typing import Any, cast

from typing_extensions import override

from tests.kit.fake_server import FakeLensServer

__all__ = ["serve"]

STATISTICS = "/statistics"


class _Answers:
    """Ready responses by what was asked, and how the server does."""

    def __init__(self, fake: FakeLensServer, delay_s: float) -> None:
        self.fake = fake
        self.delay_s = delay_s
        self.ready: dict[str, bytes] = {}
        self.used_s = time.process_time()
        self.late_s: list[float] = []
        """Of each completion, how much later than due it was sent."""

    def get(self, path: str) -> bytes:
        if path == STATISTICS:
            return _response(200, self._statistics())
        if path not in self.ready:
            self.ready[path] = _response(*self.fake.get(path))
        return self.ready[path]

    def post(self, path: str, data: bytes) -> bytes:
        body = json.loads(data)
        # Prompts of one eval differ in a number, so an answer to one fits all.
        kind = json.dumps([path, body.get("vllm_xargs"), body.get("max_tokens")])
        if kind not in self.ready:
            self.ready[kind] = _response(*self.fake.post(path, body))
        return self.ready[kind]

    def _statistics(self) -> dict[str, float]:
        """Since the last time."""
        late, self.late_s = sorted(self.late_s) or [0.0], []
        before, self.used_s = self.used_s, time.process_time()
        return {
            "server_cpu_s": self.used_s - before,
            "server_late_ms": 1000 * late[len(late) // 2],
            "server_latest_ms": 1000 * late[-1],
        }


class _Connection(asyncio.Protocol):
    """HTTP/1.1 as far as the client speaks it: kept open, bodies of a known length."""

    def __init__(self, answers: _Answers) -> None:
        self.answers = answers
        self.buffer = bytearray()

    @override
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)

    @override
    def data_received(self, data: bytes) -> None:
        self.buffer += data
        while (end := self.buffer.find(b"\r\n\r\n")) >= 0:
            request, *lines = self.buffer[:end].decode("latin-1").split("\r\n")
            headers = {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in lines)}
            start = end + 4
            stop = start + int(headers.get("content-length", 0))
            if len(self.buffer) < stop:
                return
            body = bytes(self.buffer[start:stop])
            del self.buffer[:stop]
            method, path, _ = request.split(" ")
            if method == "GET":
                self.transport.write(self.answers.get(path))
                continue
            delay = self.answers.delay_s
            due = time.perf_counter() + delay
            answer = partial(self._answer, path, body, due)
            asyncio.get_running_loop().call_later(delay, answer)

    def _answer(self, path: str, body: bytes, due: float) -> None:
        try:
            self.transport.write(self.answers.post(path, body))
        except BaseException:
            self.transport.close()  # the client is not to wait for it
            raise
        self.answers.late_s.append(time.perf_counter() - due)


def _response(status: int, content: Any) -> bytes:
    is_bytes = isinstance(content, bytes)
    data = content if is_bytes else json.dumps(content).encode()
    kind = "application/octet-stream" if is_bytes else "application/json"
    head = (
        f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\n"
        f"Content-Type: {kind}\r\nContent-Length: {len(data)}\r\n\r\n"
    )
    return head.encode() + data


def serve(*, model: str, hidden: int, delay_s: float) -> None:
    """Answer on a free port, which is printed as a URL, until the end of standard input.

    Args:
        model: name that the server lists.
        hidden: width of the residual stream, of random numbers.
        delay_s: time that a completion takes.
    """
    asyncio.run(_serve(_Answers(_fake(model, hidden), delay_s)))


def _fake(model: str, hidden: int) -> FakeLensServer:
    return FakeLensServer(model=model, hidden=hidden, n_layers=32, noise=True)


async def _serve(answers: _Answers) -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: _Connection(answers), "127.0.0.1", 0, backlog=1024)
    port = server.sockets[0].getsockname()[1]
    print(f"http://127.0.0.1:{port}", flush=True)  # noqa: T201 - read by the driver
    await loop.run_in_executor(None, sys.stdin.read)
    server.close()
