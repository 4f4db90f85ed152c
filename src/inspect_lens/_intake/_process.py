"""The process beside this one that takes captures in, and both ends of the socket to it.

Receiving, unpacking, hashing and writing a megabyte is some ten milliseconds, of which an event
loop in the same process pays a part, in any number of threads: each of its system calls lets go of
the interpreter, and it waits for whoever took it. A job costs it a message each way instead: JSON,
one a line. A `ProcessPoolExecutor` will not do: its processes run the script of the user again.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from inspect_lens._settings import Settings
from inspect_lens.errors import CaptureError

from ._files import write_file
from ._jobs import Stored, content_of, fetch_job, store

STARTS_AFTER = 8
"""Files without one: below that, starting it costs more than it saves."""
STARTS = 3
"""After so many processes that died, threads do it all."""
THREADS = 8
"""Jobs at once; each holds a call's activations as they came and decoded."""
PARENT_CHECK_S = 2.0
LAST_WRITES_S = 10.0
_ANSWER_BYTES = 1 << 24
"""Of a line that comes back, at most."""

_CODE = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from inspect_lens._intake._process import serve; serve(*map(int, sys.argv[2:]))"
)

logger = logging.getLogger(__name__)


class Lost(Exception):
    """The process cannot say what became of a job; whoever wants it done does it himself."""


class Beside:
    """One process, started by an asyncio event loop when there is enough to do for it.

    It ends with that loop, or with this process, however this one ends. In another loop meanwhile,
    before it is ready and after it died too often, `send` says None.
    """

    def __init__(self) -> None:
        self._n_files = self._n_died = 0
        self._task: asyncio.Task[None] | None = None
        self._writer: asyncio.StreamWriter | None = None
        """Once the process is ready."""
        self._waiting: dict[int, asyncio.Future[Stored | None]] = {}
        self._number = 0
        self.pid: int | None = None
        """The process, once it is ready."""

    @property
    def is_ready(self) -> bool:
        """Whether it takes jobs."""
        return self._writer is not None

    def prepare(self) -> None:
        """Say that a file is on its way; the process starts when there are enough of them."""
        self._n_files += 1
        if self._n_files <= STARTS_AFTER or self._n_died >= STARTS or self._is_running():
            return
        if os.name != "posix" or not sys.executable or not Settings.load().intake_process:
            self._n_died = STARTS
            return
        try:
            task = asyncio.get_running_loop().create_task(self._run())
        except RuntimeError:
            return  # trio
        # A loop that was closed without an end to its tasks leaves its own behind.
        self._task, self._writer, self.pid, self._waiting = task, None, None, {}

    def send(self, job: bytes) -> asyncio.Future[Stored | None] | None:
        """Hand a job over."""
        if self._writer is None or not self._is_mine():
            return None
        self._number += 1
        self._waiting[self._number] = asyncio.get_running_loop().create_future()
        self._writer.write(b'%s,"id":%d}\n' % (job, self._number))
        return self._waiting[self._number]

    def forget(self) -> None:
        """In a process that was forked: it is the other one's, whose objects are left alone."""
        self.__dict__ = {**vars(Beside()), "_inherited": dict(vars(self))}

    def _is_running(self) -> bool:
        task = self._task
        return task is not None and not task.done() and not task.get_loop().is_closed()

    def _is_mine(self) -> bool:
        try:
            return self._task is not None and self._task.get_loop() is asyncio.get_running_loop()
        except RuntimeError:
            return False

    async def _run(self) -> None:
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-c", _CODE, json.dumps(sys.path)]
        command += [str(theirs.fileno()), str(os.getpid())]
        none = subprocess.DEVNULL
        with theirs:
            try:
                process = subprocess.Popen(
                    command, pass_fds=[theirs.fileno()], stdin=none, stdout=none, stderr=none
                )
            except OSError as error:
                logger.warning("activations are taken in by threads alone: %s", error)
                self._n_died = STARTS
                ours.close()
                return
        waiting = self._waiting
        reader, writer = await asyncio.open_connection(sock=ours, limit=_ANSWER_BYTES)
        try:
            async for line in reader:
                self._take(json.loads(line), writer, waiting)
        except OSError:
            pass
        finally:
            with suppress(OSError, RuntimeError):
                # A child that was forked may hold our end open, too.
                writer.write_eof()
                writer.close()
            if self._waiting is waiting:
                self._writer = self.pid = None
                self._waiting = {}
            for future in waiting.values():
                if not future.done():
                    future.set_exception(Lost("the process that takes activations in has ended"))
            await asyncio.to_thread(_bury, process)
        self._n_died += 1
        logger.warning("the process that takes activations in has ended; threads do its work")

    def _take(
        self,
        answer: Mapping[str, Any],
        writer: asyncio.StreamWriter,
        waiting: dict[int, asyncio.Future[Stored | None]],
    ) -> None:
        if "ready" in answer:
            self._writer, self.pid = writer, answer["ready"]
            return
        future = waiting.pop(answer["id"], None)
        if future is None or future.done():
            return  # its call was cancelled
        if "stored" in answer:
            stored = answer["stored"]
            future.set_result(None if stored is None else Stored(*stored))
        elif "error" in answer:
            future.set_exception(CaptureError(answer["error"]))
        else:
            future.set_exception(Lost(answer["failed"]))


def _bury(process: subprocess.Popen[bytes]) -> None:
    """Let it write what it has in hand, and leave no zombie behind."""
    try:
        process.wait(timeout=LAST_WRITES_S + 5)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


BESIDE = Beside()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=BESIDE.forget)


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
        for line in self._lines(parent):
            self._threads.submit(self._do, line)

    def _lines(self, parent: int) -> Iterator[bytes]:
        rest = b""
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
            *whole, rest = (rest + data).split(b"\n")
            yield from whole

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
        # Where nobody listens any more, what is being written is written to its end.
        with self._sending, suppress(OSError):
            self._socket.sendall(json.dumps(answer).encode() + b"\n")
