"""The process beside this one that takes captures in, and both ends of the socket to it.

Receiving, unpacking, hashing and writing a megabyte is some ten milliseconds, of which an event
loop in the same process pays a part, in any number of threads: each of its system calls lets go of
the interpreter, and it waits for whoever took it. A job costs it a message each way instead: JSON,
one a line. A `ProcessPoolExecutor` will not do: its processes run the script of the user again.
"""

from __future__ import annotations

import asyncio
import base64
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
from contextlib import contextmanager, suppress
from functools import lru_cache
from typing import Any, NamedTuple

from pydantic_core import to_json

from inspect_lens._base.http import fetch_result
from inspect_lens._settings import Settings
from inspect_lens.errors import CaptureError
from inspect_lens.spec import CaptureSpec, LensRequest, LogitLens, QKSpec, Reduce

from ._payload import (
    ChoiceFields,
    Payload,
    encode_file,
    fetch_payload,
    remove_file,
    stamp_of,
    write_file,
)

__all__ = ["BESIDE", "Beside", "Lost", "Source", "Stored", "fetch_from", "file_job", "write_job"]

logger = logging.getLogger(__name__)


class Source(NamedTuple):
    """Where the bytes behind handles are."""

    root: str
    """Address of the server, without `/v1`."""
    headers: Mapping[str, str]
    timeout_s: float


class Stored(NamedTuple):
    """What is known of a payload once its bytes are elsewhere."""

    sha256: str
    tensors: Mapping[str, tuple[tuple[int, ...], str, tuple[int, ...]]]
    """Shape, dtype and layers by name."""
    n_prompt: int
    n_completion: int
    reduce: Reduce
    steered: bool
    stamp: str | None = None
    """Of the file, from `stamp_of`."""

    @classmethod
    def of(cls, payload: Payload, stamp: str | None = None) -> Stored:
        """The facts of a payload."""
        capture = payload.receipt.capture if payload.receipt else None
        return cls(
            sha256=payload.sha256,
            tensors={
                name: (tensor.shape, tensor.dtype, payload.layers[name])
                for name, tensor in payload.tensors.items()
            },
            n_prompt=len(payload.prompt_token_ids),
            n_completion=len(payload.token_ids),
            reduce=capture.reduce if capture else "none",
            steered=payload.receipt is not None and payload.receipt.steer is not None,
            stamp=stamp,
        )


def fetch_from(source: Source, handle: str) -> bytes | memoryview:
    """Bytes behind a handle, in the calling thread."""
    return fetch_result(source.root, source.headers, handle, timeout_s=source.timeout_s)


def store(payload: Payload, path: str) -> Stored:
    write_file(path, encode_file(payload))
    return Stored.of(payload, stamp_of(path))


def write_job(
    choice: ChoiceFields,
    prompt_token_ids: list[int],
    request: LensRequest,
    *,
    source: Source,
    origin: Mapping[str, Any],
    path: str,
) -> bytes:
    """Spell a job, for `fetch_job` in another process."""
    job = {
        "activations": choice.activations,
        "receipt": choice.receipt,
        "token_ids": choice.token_ids,
        "prompt_token_ids": prompt_token_ids,
        "source": source,
        "origin": origin,
        "path": path,
    }
    asked = _asked(request.capture, request.qk, request.lens)
    return b'%s,"asked":%s' % (to_json(job)[:-1], asked)


def file_job(content: bytes, path: str) -> bytes:
    """Spell a job that writes a small file, whose contents are here already."""
    return b'{"content":"%s","path":%s' % (base64.b64encode(content), to_json(path))


def content_of(job: Mapping[str, Any]) -> bytes | None:
    """The contents that a job from `file_job` brings; None for another job."""
    given = job.get("content")
    return None if given is None else base64.b64decode(given)


@lru_cache(maxsize=64)
def _asked(capture: CaptureSpec | None, qk: QKSpec | None, lens: LogitLens | None) -> bytes:
    """The part of a request that a result is checked against; alike for all calls of an eval."""
    asked = LensRequest(capture=capture, qk=qk, lens=lens)
    return asked.model_dump_json(exclude_none=True).encode()


@lru_cache(maxsize=64)
def _request(asked: str) -> LensRequest:
    return LensRequest.model_validate_json(asked)


def fetch_job(job: Mapping[str, Any]) -> Payload:
    """Fetch, decode and check what a job is about."""
    source = Source(*job["source"])
    choice = ChoiceFields(
        activations=job["activations"], token_ids=job["token_ids"], receipt=job["receipt"]
    )
    request = _request(json.dumps(job["asked"]))
    payload = fetch_payload(
        choice, job["prompt_token_ids"], request, lambda handle: fetch_from(source, handle)
    )
    return payload.with_origin(job["origin"])


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


UNWANTED = b"unwanted "
"""Begins a line that is no job: the path of a file behind it has to go."""


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

    def leave_none(self, path: str) -> None:
        """Have a file go that was written, or still will be, for a call that came to nothing."""
        if self._writer is not None and self._is_mine():
            self._writer.write(UNWANTED + json.dumps(path).encode() + b"\n")

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
            # The garbage collector ends it amid whatever this thread does, maybe in a pool's lock.
            if sys.exc_info()[0] is not GeneratorExit:
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
        self._unwanted: set[str] = set()

    def run(self, parent: int) -> None:
        self._send({"ready": os.getpid()})
        for line in self._lines(parent):
            if line.startswith(UNWANTED):
                self._unwanted.add(path := json.loads(line.removeprefix(UNWANTED)))
                remove_file(path)
            else:
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

    @contextmanager
    def _writes(self, path: str) -> Iterator[None]:
        with self._writing:
            yield
            if path in self._unwanted:
                remove_file(path)

    def _answer(self, job: Mapping[str, Any]) -> dict[str, Stored | str | None]:
        try:
            content = content_of(job)
            if content is not None:
                with self._writes(job["path"]):
                    write_file(job["path"], [content])
                return {"stored": None}
            payload = fetch_job(job)
            with self._writes(job["path"]):
                return {"stored": store(payload, job["path"])}
        except CaptureError as error:
            return {"error": str(error)}
        except Exception as error:  # noqa: BLE001 - the parent does the job and sees it again
            return {"failed": f"{type(error).__name__}: {error}"}

    def _send(self, answer: Mapping[str, Any]) -> None:
        # Where nobody listens any more, what is being written is written to its end.
        with self._sending, suppress(OSError):
            self._socket.sendall(json.dumps(answer).encode() + b"\n")
