"""The process beside this one that takes captures in, as an event loop sees it.

Receiving, unpacking, hashing and writing a megabyte is some ten milliseconds, of which an event
loop in the same process pays a part, in any number of threads: each of its system calls lets go of
the interpreter, and it waits for whoever took it. A job costs it a message each way instead.
"""

from __future__ import annotations

import asyncio
import atexit
import json
import logging
import os
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping
from typing import Any

from inspect_lens._settings import Settings
from inspect_lens.errors import CaptureError

from ._jobs import Stored
from ._serve import LAST_WRITES_S, Lines

__all__ = ["BESIDE", "Beside", "Lost"]

STARTS_AFTER = 8
"""Files without one: below that, starting it costs more than it saves."""
STARTS = 3
"""After so many processes that died, threads do it all."""

_CODE = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from inspect_lens._intake._serve import serve; serve(*map(int, sys.argv[2:]))"
)

logger = logging.getLogger(__name__)


class Lost(Exception):
    """The process cannot say what became of a job; whoever wants it done does it himself."""


class Beside:
    """One process, started when there is enough to do for it, and a connection to it.

    It serves one event loop at a time, of asyncio; in another one, before it is ready and after it
    died too often, `send` says None. It ends with this process, however this one ends.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._wanted = 0
        self._started = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._drop()

    def _drop(self) -> None:
        """Forget the connection; what waits for it is lost."""
        self._socket: socket.socket | None = None
        self._lines = Lines()
        self._out = bytearray()
        self._ready = False
        self._loop: weakref.ref[asyncio.AbstractEventLoop] | None = None
        self._waiting: dict[int, asyncio.Future[Stored | None]] = {}
        self._number = 0

    @property
    def pid(self) -> int | None:
        """The process, once it is ready."""
        return self._process.pid if self._process is not None and self._ready else None

    @property
    def is_ready(self) -> bool:
        """Whether it takes jobs."""
        return self._ready

    def prepare(self) -> None:
        """Say that a file is on its way; the process starts when there are enough of them."""
        self._wanted += 1
        if self._socket is None and self._wanted > STARTS_AFTER and self._started <= STARTS:
            with self._lock:
                self._start()
        if not self._ready:
            self._attach()

    def send(self, job: bytes) -> asyncio.Future[Stored | None] | None:
        """Hand a job over."""
        if not self._ready or not self._attach():
            return None
        self._number += 1
        future: asyncio.Future[Stored | None] = asyncio.get_running_loop().create_future()
        self._waiting[self._number] = future
        self._write(b'%s,"id":%d}\n' % (job, self._number))
        return future

    def close(self) -> None:
        """End the process; jobs that are under way are lost."""
        process, self._process = self._process, None
        if self._socket is not None:
            self._lose()
        if process is not None:
            try:
                process.wait(timeout=LAST_WRITES_S + 5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    # -- the process -------------------------------------------------------------

    def _start(self) -> None:
        if self._socket is not None or os.name != "posix" or not sys.executable:
            return
        self._started = self._started + 1 if Settings.load().intake_process else STARTS + 1
        if self._started > STARTS:
            return
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        command = [sys.executable, "-c", _CODE, json.dumps(sys.path)]
        command += [str(theirs.fileno()), str(os.getpid())]
        try:
            self._process = subprocess.Popen(
                command,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        except OSError as error:
            logger.warning("activations are taken in by threads alone: %s", error)
            ours.close()
            self._started = STARTS + 1
            return
        finally:
            theirs.close()
        self._socket = ours

    def _lose(self) -> None:
        """Let go of the connection, and tell those who wait."""
        loop = self._loop() if self._loop is not None else None
        waiting, connection = self._waiting, self._socket
        self._leave()
        self._drop()
        if connection is not None:
            connection.close()
        for future in waiting.values():
            if not future.done() and loop is not None and not loop.is_closed():
                future.set_exception(Lost("the process that takes activations in has ended"))

    def forget(self) -> None:
        """In a process that was forked: the connection is the other one's."""
        if self._socket is not None:
            self._socket.close()
        self._lock = threading.Lock()
        self._process, self._started = None, 0
        self._drop()

    # -- the event loop ------------------------------------------------------------

    def _attach(self) -> bool:
        """Listen in this event loop; False where that is another one's."""
        if self._socket is None:
            return False
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            return False  # trio
        old = self._loop() if self._loop is not None else None
        if old is loop:
            return True
        with self._lock:
            if old is not None and old.is_running():
                return False
            self._leave()
            # What an event loop asked for that has ended, nobody waits for.
            self._waiting.clear()
            try:
                loop.add_reader(self._socket.fileno(), self._read)
            except NotImplementedError:
                return False
            self._loop = weakref.ref(loop)
        if self._out:
            loop.add_writer(self._socket.fileno(), self._flush)
        return True

    def _leave(self) -> None:
        loop = self._loop() if self._loop is not None else None
        if loop is not None and self._socket is not None and not loop.is_closed():
            loop.remove_reader(self._socket.fileno())
            loop.remove_writer(self._socket.fileno())

    def _write(self, data: bytes) -> None:
        assert self._socket is not None
        sent = 0
        if not self._out:
            try:
                sent = self._socket.send(data)
            except BlockingIOError:
                pass
            except OSError:
                self._end()
                return
            if sent == len(data):
                return
            asyncio.get_running_loop().add_writer(self._socket.fileno(), self._flush)
        self._out += data[sent:]

    def _flush(self) -> None:
        assert self._socket is not None
        try:
            del self._out[: self._socket.send(self._out)]
        except BlockingIOError:
            return
        except OSError:
            self._end()
            return
        if not self._out:
            asyncio.get_running_loop().remove_writer(self._socket.fileno())

    def _read(self) -> None:
        assert self._socket is not None
        try:
            data = self._socket.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._end()
            return
        for text in self._lines.feed(data):
            self._take(json.loads(text))

    def _take(self, answer: Mapping[str, Any]) -> None:
        if "ready" in answer:
            self._ready = True
            return
        future = self._waiting.pop(answer["id"], None)
        if future is None or future.done():
            return  # its call was cancelled
        if "stored" in answer:
            stored = answer["stored"]
            future.set_result(None if stored is None else Stored(*stored))
        elif "error" in answer:
            future.set_exception(CaptureError(answer["error"]))
        else:
            future.set_exception(Lost(answer["failed"]))

    def _end(self) -> None:
        """It has died: what it had in hand is lost, and no zombie stays behind."""
        logger.warning("the process that takes activations in has ended; threads do its work")
        self._lose()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


BESIDE = Beside()
atexit.register(BESIDE.close)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=BESIDE.forget)
