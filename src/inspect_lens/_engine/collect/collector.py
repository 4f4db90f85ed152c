"""The front-end's side of the lens: puts the rows of each request together again.

Runs in the process that owns the requests (API server, or the user's script with offline
`LLM`). One thread receives; waiting for the last rows of a request happens in the caller's.
Rows carry their absolute position and are placed by it, and the last write wins, so chunked
prefill, pre-emption and recomputation need no special cases.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import zmq

from inspect_lens import errors
from inspect_lens._base.temp_dirs import let_go, new_folder
from inspect_lens._engine.export.transport import overflow
from inspect_lens._engine.hooks.results import Gathered, gather
from inspect_lens._engine.protocol.messages import (
    BOARD_SIZE,
    ArenaReader,
    Block,
    Envelope,
    Failure,
    Message,
    Opened,
    Settled,
    unpacked,
)
from inspect_lens._engine.protocol.messages import decode as decoded
from inspect_lens._engine.protocol.processes import Address, Links
from inspect_lens.errors import CaptureError
from inspect_lens.spec import TensorData

from .listener import Listener
from .placement import Collected, Further, Pending, Placing, Worker, paths_of_all, told_of_edits
from .result_memory import ResultMemory, memory_bytes

logger = logging.getLogger("vllm.inspect_lens")

_WAIT_S = 60.0
_POLL_LEAST_S, _POLL_MOST_S = 0.001, 0.004
_POLL_SHARE = 0.125
"""Of the time that has been waited: the pause before the next look."""
_LOOKS = 256
"""After which it is looked whether a worker is still there."""


@dataclass(slots=True)
class _Queue:
    messages: deque[Message] = field(default_factory=deque)
    """The first of them tells of rows that have not come."""
    since: float = 0.0
    """When these were first waited for."""
    looks: int = 0


@dataclass
class Inbox:
    """Hands messages on, when their turn has come."""

    handle: Callable[[Message], None]
    has_landed: Callable[[Block], bool]
    is_alive: Callable[[str], bool]
    _queues: dict[str, _Queue] = field(default_factory=dict)

    def __bool__(self) -> bool:
        """Whether any message waits."""
        return bool(self._queues)

    def put(self, message: Message) -> None:
        """Hand a message on, or keep it until the rows before it have come."""
        worker = getattr(message, "worker", None)
        queue = self._queues.get(worker) if worker is not None else None
        if queue is not None:
            queue.messages.append(message)
        elif isinstance(message, Block) and not self.has_landed(message):
            self._queues[message.worker] = _Queue(deque((message,)), time.monotonic())
        else:
            self.handle(message)

    def turn(self) -> bool:
        """Hand on what has come of each worker; whether that was anything."""
        any_came = False
        for worker, queue in list(self._queues.items()):
            # A few at a time: others' turn comes between.
            first = queue.messages[0]
            if isinstance(first, Block) and not self._is_due(first, queue):
                continue
            any_came = True
            queue.messages.popleft()
            if queue.messages:
                queue.since, queue.looks = time.monotonic(), 0
            else:
                del self._queues[worker]
            self.handle(first)
        return any_came

    def pause(self, hurry: threading.Event) -> None:
        """Wait a little for rows.

        Messages come while the step still runs: most of the waiting is for the device. The longer
        it has lasted, the longer is the pause before the next look, since every look takes
        Python's lock from a thread that hands requests over or takes their tokens.
        """
        since = max((queue.since for queue in self._queues.values()), default=0.0)
        waited = time.monotonic() - since
        pause = min(max(waited * _POLL_SHARE, _POLL_LEAST_S), _POLL_MOST_S)
        if hurry.is_set():
            time.sleep(_POLL_LEAST_S)
        else:
            hurry.wait(pause)

    def _is_due(self, block: Block, queue: _Queue) -> bool:
        if self.has_landed(block):
            return True
        queue.looks += 1
        is_gone = not queue.looks % _LOOKS and not self.is_alive(block.worker)
        return is_gone or time.monotonic() - queue.since > _WAIT_S


def blamed(
    message: Message,
    pending: Mapping[str, Pending],
    workers: Mapping[str, Worker],
    error: BaseException,
) -> list[Failure]:
    """Requests of a message that something went wrong with."""
    if isinstance(message, Opened):
        keys = {opening.key for opening in message.openings}
    elif isinstance(message, Block | Settled):
        worker, numbers = workers.get(message.worker), set(unpacked(message.numbers).tolist())
        keys = {
            key
            for key, one in pending.items()
            for opening, its in one.shares
            if its is worker and opening.number in numbers
        }
    else:
        keys = {message.key}
    kind, text = type(error).__name__, f"its results could not be taken in: {error}"
    return [Failure(key, kind, text) for key in pending if key in keys]


def as_error(failure: Failure) -> errors.LensError:
    """The error of a request that has failed, as its worker named it."""
    kind = getattr(errors, failure.kind, None)
    if not (isinstance(kind, type) and issubclass(kind, errors.LensError)):
        return CaptureError(f"the worker failed this request: {failure.kind}: {failure.message}")
    return kind(failure.message)


class Notifier:
    """Threads wait on it, and others are called; while anybody does, rows are hurried."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        """Held by whoever reads or changes what requests have."""
        self.hurry = threading.Event()
        """Set while somebody waits for rows, or reads scores as they come."""
        self.n_waiting = 0
        """Who waits or watches."""
        self._watchers: list[Callable[[], None]] = []

    def wait_for(self, is_ready: Callable[[], bool], timeout_s: float, every_s: float) -> bool:
        """Wait until something is so; the lock is held, and let go of meanwhile."""
        if is_ready():
            self.calm()
            return True
        deadline = time.monotonic() + timeout_s
        self.n_waiting += 1
        self.hurry.set()
        try:
            while (now := time.monotonic()) < deadline:
                self.changed.wait(min(deadline - now, every_s))
                if is_ready():
                    return True
            return False
        finally:
            self.n_waiting -= 1
            self.calm()

    def watch(self, call: Callable[[], None]) -> None:
        """Have something called whenever anything has come, until `unwatch`."""
        with self.changed:
            self._watchers.append(call)
            self.n_waiting += 1
            self.hurry.set()

    def unwatch(self, call: Callable[[], None]) -> None:
        """Undo `watch`."""
        with self.changed:
            self._watchers.remove(call)
            self.n_waiting -= 1
            self.calm()

    def tell(self) -> None:
        """Something has come; the lock is held."""
        self.changed.notify_all()
        for call in tuple(self._watchers):
            try:
                call()
            except BaseException:
                # All results come by this thread. Who watches looks again by itself, too.
                logger.exception("inspect_lens: somebody could not be told of results")

    def calm(self) -> None:
        """Let rows take their time if nobody waits any more."""
        # A batch that ends at once is taken request by request: clearing takes longer than a look.
        if not self.n_waiting and self.hurry.is_set():
            self.hurry.clear()


_SWEEP_S = 0.05
"""Seconds between two looks at memory that nothing uses."""
_THREADS = max(1, min(8, (os.cpu_count() or 1) // 2))


class Collector:
    """Receives from all workers of this process's engines."""

    def __init__(self, n_processes: int = 1, links: Links | None = None) -> None:
        self.memory = ResultMemory(memory_bytes() // (4 * n_processes))
        self.folder, self._lock = new_folder()
        self.address = f"ipc://{self.folder / 'rows'}"
        self._pid = os.getpid()
        self._pending: dict[str, Pending] = {}
        self._workers: dict[str, Worker] = {}
        self.notifier = Notifier()
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="inspect-lens-place")
        changed, threads = self.notifier.changed, self._threads
        self._placing = Placing(self.memory, self._pending, changed, threads, _THREADS)
        self._context = zmq.Context()
        self._socket: Any = self._context.socket(zmq.PULL)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(self.address)
        self._is_closing = False
        self._inbox = Inbox(self._handle, has_landed=self._has_landed, is_alive=self._is_alive)
        self._thread = threading.Thread(target=self._receive, name="inspect-lens", daemon=True)
        self._thread.start()
        self.ends: Callable[[Mapping[str, CaptureError]], None] = lambda failed: None
        """Called for running requests that have failed with their worker on another host."""
        self.came: Callable[[], None] = lambda: None
        """Called when such a worker has begun, or begun anew."""
        self.listener: Listener | None = None
        """Of workers on other hosts, where there may be any."""
        if links is not None:
            self.listener = Listener(
                links, self.address, lost=self._lose, told=self._tell, came=lambda: self.came()
            )
            self.address = Address(self.address, links.own_host, self.listener.address).pack()
        atexit.register(self.close)

    def open(self, key: str, envelope: Envelope, n_hook_layers: int = 0) -> None:
        """Expect the results of a request."""
        # Without the lock, which the thread that takes openings up may hold: nobody looks for a
        # request before it is opened.
        self._pending[key] = Pending(envelope, n_hook_layers)

    def discard(self, key: str) -> None:
        """Forget a request; rows that still come for it are dropped."""
        with self.notifier.changed:
            self._pop(key)

    @property
    def n_open(self) -> int:
        return len(self._pending)

    def further(
        self, key: str, since: Mapping[int, int], *, n_fed: int, settled: int | None
    ) -> Further | None:
        """What has come without a gap of results of a running request that fed so many tokens.

        Rows are where they lie, do not change any more, and keep alive all of the request's.
        """
        with self.notifier.changed:
            # Who reads them as they come does so again: until somebody waits who does not.
            self.notifier.hurry.set()
            pending = self._pending.get(key)
            if pending is None or pending.failure is not None:
                return None
            return pending.further(since, n_fed, settled)

    def has_further(
        self, key: str, since: Mapping[int, int], *, n_fed: int, settled: int | None
    ) -> bool:
        """Whether `further` has all of the tokens that were fed, or will have no more."""
        with self.notifier.changed:
            self.notifier.hurry.set()
            pending = self._pending.get(key)
            return pending is None or pending.has_further(since, n_fed, settled)

    def take(
        self,
        key: str,
        *,
        counts: Mapping[int, int],
        n_fed: int,
        timeout_s: float,
        settled: int | None = None,
        may_wait: bool = True,
    ) -> Collected:
        """Wait for the last rows of a finished request and put them together."""
        with self.notifier.changed:
            pending = self._pending.get(key)
            is_ready = pending is None or self.notifier.wait_for(
                partial(pending.is_ready, counts, n_fed, settled),
                timeout_s if may_wait else 0.0,
                # Rows are told of; the board is not, and is looked at again.
                0.002 if pending.n_steered else 0.1,
            )
            paths = paths_of_all([pending])[0] if pending is not None else ()
            pending = self._pop(key)
        if pending is None:
            raise CaptureError(f"request {key}: results were already taken, or it was aborted")
        if pending.failure is not None:
            raise as_error(pending.failure)
        if pending.has_overflown:
            raise overflow()
        if not is_ready:
            raise CaptureError(
                f"request {key}: {pending.lack(counts, n_fed, settled)} within {timeout_s:g} s; "
                "the request has failed and nothing partial is returned"
            )
        tensors: dict[int, TensorData] = {}
        for i, stream in pending.streams.items():
            if stream.is_cut(counts[i]):
                raise CaptureError(
                    f"request {key}: the engine fed tokens behind its end, which are part of what "
                    "was reduced; nothing wrong is returned"
                )
            tensors[i] = stream.take(counts[i], self._threads)
        n_steered, fired = pending.steered_tokens(n_fed), pending.fired(n_fed)
        return Collected(tensors, n_steered, paths, fired, pending.attention, pending.open_at())

    def take_saved(self, key: str, *, n_fed: int, timeout_s: float) -> Gathered | None:
        """Wait for what hooks of a finished request saved; None where it failed in a worker."""
        with self.notifier.changed:
            if (pending := self._pending.get(key)) is None:
                raise CaptureError(f"request {key}: hook results were already taken")
            self.notifier.wait_for(partial(pending.has_saved, n_fed), timeout_s, 0.1)
            if pending.failure is not None:
                return None
            come = pending.saved(n_fed)
            if not pending.has_saved(n_fed):
                raise CaptureError(
                    f"request {key}: {sum(one.n_layers for one in come)} of "
                    f"{pending.n_hook_layers} layers with hooks reported within {timeout_s:g} s"
                )
        return gather(come)

    def is_ready(
        self, key: str, *, counts: Mapping[int, int], n_fed: int, settled: int | None
    ) -> bool:
        """Whether `take` would not wait."""
        with self.notifier.changed:
            pending = self._pending.get(key)
            return pending is None or pending.is_ready(counts, n_fed, settled)

    def waits(self, key: str) -> bool:
        """Whether no worker has begun a request; without the lock, for who asks again."""
        pending = self._pending.get(key)
        return pending is not None and not pending.shares and pending.failure is None

    def preview(self, key: str, counts: Mapping[int, int]) -> dict[int, TensorData] | None:
        """Arrays in which the results of a request that has begun lie if it runs to its end."""
        with self.notifier.changed:
            pending = self._pending.get(key)
            if pending is None or pending.failure is not None:
                return None
            return pending.preview(counts, self._threads)

    def take_whole(self, keys: Iterable[str]) -> dict[str, tuple[str, ...]]:
        """Take requests that ran to their end, and all of whose rows have come; wait for none."""
        with self.notifier.changed:
            found = {key: self._pending.get(key) for key in keys}
            whole = {k: p for k, p in found.items() if p is not None and p.is_whole}
            paths = dict(zip(whole, paths_of_all(list(whole.values())), strict=True))
            for key in whole:
                self._pop(key)
            if whole:
                self.notifier.calm()
        return paths

    def take_edited(self, n_fed: Mapping[str, int]) -> dict[str, Collected]:
        """Take requests with edits alone of which all has been told; see `told_of_edits`."""
        with self.notifier.changed:
            found = told_of_edits(self._pending, n_fed)
            for key in found:
                self._pop(key)
        return found

    def close(self) -> None:
        """Stop the threads and remove the socket's file; safe to call twice."""
        if self._is_closing or os.getpid() != self._pid:
            return  # a forked child has neither the threads nor the right to clean up
        self._is_closing = True
        atexit.unregister(self.close)
        if self.listener is not None:
            self.listener.close()
        self._thread.join(timeout=2)
        self._threads.shutdown(wait=False)
        self._context.destroy(linger=0)
        let_go(self.folder, self._lock)

    def _pop(self, key: str) -> Pending | None:
        pending = self._pending.pop(key, None)
        if pending is not None:
            for opening, worker in pending.shares:
                worker.leave(opening)
        return pending

    def _receive(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        sweeps = time.monotonic() + _SWEEP_S
        while not self._is_closing:
            try:
                came = bool(self._inbox) and self._inbox.turn()
                is_idle = not poller.poll(0 if self._inbox else 200)
                if not is_idle:
                    with contextlib.suppress(zmq.Again):
                        self._accept(self._socket.recv(flags=zmq.NOBLOCK))
                elif self._inbox and not came:
                    self._inbox.pause(self.notifier.hurry)
                if (now := time.monotonic()) >= sweeps:
                    sweeps = now + _SWEEP_S
                    self.memory.sweep(now)
            except BaseException:  # the thread must outlive it: all results come by this one
                logger.exception("inspect_lens: results could not be taken in")

    def _accept(self, data: bytes) -> None:
        self._inbox.put(decoded(data))

    def _handle(self, message: Message) -> None:
        try:
            self._take_in(message)
        except BaseException as error:
            logger.exception("inspect_lens: a message from a worker could not be taken in")
            self._blame(message, error)

    def _take_in(self, message: Message) -> None:
        if isinstance(message, Block):
            self._accept_block(message)
        with self.notifier.changed:
            if isinstance(message, Opened):
                self._accept_openings(message)
            elif isinstance(message, Settled):
                self._accept_settled(message)
            elif not isinstance(message, Block) and (pending := self._pending.get(message.key)):
                pending.accept(message)
            self.notifier.tell()

    def _blame(self, message: Message, error: BaseException) -> None:
        with contextlib.suppress(Exception), self.notifier.changed:
            for failure in blamed(message, self._pending, self._workers, error):
                self._pending[failure.key].failure = failure
            self.notifier.tell()

    def _has_landed(self, block: Block) -> bool:
        # Of a worker that is not known nobody waits for anything.
        worker = self._workers.get(block.worker)
        return worker is None or worker.reader.has_landed(block.seq)

    def _is_alive(self, name: str) -> bool:
        worker = self._workers.get(name)
        return worker is not None and worker.reader.is_alive

    def _accept_openings(self, message: Opened) -> None:
        worker = self._workers.get(message.worker)
        if worker is None or worker.reader.is_lost:
            # Memory of engines that are gone is given back when another one begins.
            self._workers = {k: w for k, w in self._workers.items() if w.reader.is_alive}
            try:
                worker = self._workers[message.worker] = Worker(self._reader(message.worker))
            except OSError as error:
                # Of an engine that has ended, mostly, when nobody waits for it. Else its requests
                # time out.
                logger.error("inspect_lens: the memory of a worker cannot be read: %s", error)
                return
        worker.learn(message.attention)
        for opening in message.openings:
            pending = self._pending.get(opening.key)
            # A pre-empted request may be taken up again, under its number.
            if pending is None or (opening, worker) in pending.shares:
                continue
            self._placing.enter(pending, opening, worker)

    def _reader(self, name: str) -> ArenaReader:
        """The memory of a worker of this host or another one."""
        mirror = None if self.listener is None else self.listener.mirror(name)
        return mirror or ArenaReader(name)

    def _tell(self) -> None:
        with self.notifier.changed:
            self.notifier.tell()

    def _lose(self, reader: ArenaReader, why: str) -> None:
        error = CaptureError(
            f"a worker on another host has gone: {why}; nothing partial is returned"
        )
        failed: dict[str, CaptureError] = {}
        with self.notifier.changed:
            for key, pending in list(self._pending.items()):
                if any(worker.reader is reader for _, worker in pending.shares):
                    pending.fail(key, error)
                    failed[key] = error
            self.notifier.tell()
        self.ends(failed)

    def _accept_settled(self, message: Settled) -> None:
        if (worker := self._workers.get(message.worker)) is None:
            return
        numbers = unpacked(message.numbers)
        record = numbers % BOARD_SIZE
        is_open = worker.number[record] == numbers
        record, settled = record[is_open], unpacked(message.settled)[is_open]
        worker.settled[record] = np.maximum(worker.settled[record], settled)

    def _accept_block(self, block: Block) -> None:
        if (worker := self._workers.get(block.worker)) is None:
            return
        reader = worker.reader
        try:
            if not reader.has_landed(block.seq):
                logger.error("inspect_lens: rows were announced and did not come")
            elif reader.is_revoked(block.reader, block.seq) or not self._placing.place(
                block, worker
            ):
                why = "this process took no rows for a while, and others needed the room; try again"
                self._placing.fail(block, worker, errors.CapacityError(why))
        finally:
            # Also where it went wrong: the worker must not wait for this block for ever.
            reader.done(block.reader, block.seq)
