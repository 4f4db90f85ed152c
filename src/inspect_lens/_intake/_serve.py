"""The process beside: takes jobs from a socket until the other end is gone."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from inspect_lens.errors import CaptureError

from ._files import write_file
from ._jobs import Stored, content_of, fetch_job, store

__all__ = ["LAST_WRITES_S", "THREADS", "Lines", "serve"]

THREADS = 8
"""Jobs at once; each holds a call's activations as they came and decoded."""

PARENT_CHECK_S = 2.0
LAST_WRITES_S = 10.0


class Lines:
    """Messages on a stream of bytes: JSON, which has no line feeds, one a line."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """Add bytes; gives the messages that are whole now."""
        *whole, self._rest = (self._rest + data).split(b"\n")
        return whole


def serve(descriptor: int, parent: int) -> None:
    """Do jobs until the socket ends or the parent is gone; never returns."""
    # Inspect ends an eval in order on the interrupt that the terminal sends to both.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    server = _Server(socket.socket(fileno=descriptor))
    server.run(parent)
    server.finish()
    # Fetches may wait for a server for minutes, and nobody for them.
    os._exit(0)


class _Server:
    """One socket and the threads behind it."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._threads = ThreadPoolExecutor(THREADS)
        self._sending = threading.Lock()
        self._writing = threading.Semaphore(THREADS)

    def run(self, parent: int) -> None:
        self._send({"ready": os.getpid()})
        lines = Lines()
        # A process that was forked from the parent may hold the other end open.
        while os.getppid() == parent:
            if not select.select([self._socket], [], [], PARENT_CHECK_S)[0]:
                continue
            try:
                data = self._socket.recv(1 << 20)
            except ConnectionError:
                return
            if not data:
                return
            for text in lines.feed(data):
                self._threads.submit(self._do, text)

    def finish(self) -> None:
        """Wait for the files that are being written, and let nobody begin another."""
        until = time.monotonic() + LAST_WRITES_S
        for _ in range(THREADS):
            self._writing.acquire(timeout=max(0.0, until - time.monotonic()))

    def _do(self, text: bytes) -> None:
        job = json.loads(text)
        self._send({"id": job["id"], **self._answer(job)})

    def _answer(self, job: Mapping[str, Any]) -> dict[str, Stored | str | None]:
        try:
            content = content_of(job)
            if content is not None:
                with self._writing:
                    write_file(job["path"], [content])
                return {"stored": None}
            payload = fetch_job(job)
            with self._writing:
                return {"stored": store(payload, job["path"])}
        except CaptureError as error:
            return {"error": str(error)}
        except Exception as error:  # noqa: BLE001 - the parent does the job and sees it again
            return {"failed": f"{type(error).__name__}: {error}"}

    def _send(self, answer: Mapping[str, Any]) -> None:
        with self._sending:
            try:
                self._socket.sendall(json.dumps(answer).encode() + b"\n")
            except OSError:
                os._exit(0)  # the parent is gone
