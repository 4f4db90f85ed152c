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
import shutil
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import zmq
from numpy.typing import NDArray

from inspect_lens import errors
from inspect_lens.errors import CaptureError
from inspect_lens.spec import EnginePath, TensorData

from ._arena import BOARD_SIZE, ArenaReader
from ._envelope import EVERY, CaptureEnvelope, Envelope
from ._message import PATHS, Block, Failure, Opened, Opening, decode, unpacked
from ._slabs import Slab, SlabPool

__all__ = ["STORAGE", "Collected", "Collector"]

logger = logging.getLogger("vllm.inspect_lens")

STORAGE: dict[str, str] = {"float32": "<f4", "float16": "<f2", "bfloat16": "<u2"}

_SHARE_BYTES = 4 << 20
"""Rows of more bytes are placed by several threads."""
_THREADS = max(1, min(8, (os.cpu_count() or 1) // 2))
_STREAMS = 2
"""Results of one request at most."""


class _Stream:
    """One result of a request: rows at some taps, for some positions."""

    def __init__(self, capture: CaptureEnvelope) -> None:
        self.taps, self.width = capture.shape
        self.dtype, self.lo = capture.dtype, capture.lo
        self.listed = None
        self.most = capture.hi - capture.lo
        """Positions at most."""
        if capture.positions is not None:
            self.listed = np.asarray(capture.positions, dtype=np.int64)
            self.most = len(self.listed)
        self.slab: Slab | None = None

    @property
    def row_bytes(self) -> int:
        return self.width * np.dtype(STORAGE[self.dtype]).itemsize

    def arrived(self, count: int) -> NDArray[np.bool_]:
        """(taps, count); which of the first positions have come."""
        if self.slab is None:
            return np.zeros((self.taps, count), dtype=np.bool_)
        flags = self.slab.arrived[: self.taps * self.most]
        return flags.reshape(self.taps, self.most)[:, :count]

    def has(self, count: int) -> bool:
        """Whether the first positions have come at all taps."""
        return not count or bool(self.arrived(count).all())

    def take(self, count: int, threads: ThreadPoolExecutor) -> TensorData:
        """The first positions as one contiguous array."""
        storage = np.dtype(STORAGE[self.dtype])
        if self.slab is None:
            rows = np.zeros((self.taps, count, self.width), dtype=storage)
        else:
            whole = self.slab.array(storage)[: self.taps * self.most * self.width]
            rows = whole.reshape(self.taps, self.most, self.width)[:, :count]
            if not rows.flags.c_contiguous:
                # It ended before it was long: a copy of what is there frees the rest.
                rows = _copied(rows, threads)
        return TensorData(rows, self.dtype)


def _copied(rows: NDArray[Any], threads: ThreadPoolExecutor) -> NDArray[Any]:
    out = np.empty(rows.shape, dtype=rows.dtype)

    def copy(tap: int) -> None:
        out[tap] = rows[tap]

    if out.nbytes > _SHARE_BYTES:
        list(threads.map(copy, range(len(rows))))
    else:
        out[...] = rows
    return out


class _Worker:
    """A worker's shared memory, and where the rows of its requests belong, by board record."""

    def __init__(self, name: str) -> None:
        self.reader = ArenaReader(name)
        self.number: NDArray[np.int64] = np.zeros(BOARD_SIZE, dtype=np.int64)
        self.paths: NDArray[np.int64] = np.zeros(BOARD_SIZE, dtype=np.int64)
        shape = (_STREAMS, BOARD_SIZE)
        self.base: NDArray[np.int64] = np.full(shape, -1, dtype=np.int64)
        """Row of the slab pool of the worker's first tap at the first position."""
        self.lo: NDArray[np.int64] = np.zeros(shape, dtype=np.int64)
        self.most: NDArray[np.int64] = np.zeros(shape, dtype=np.int64)
        self.listed: dict[tuple[int, int], NDArray[np.int64]] = {}
        """Explicit positions, by stream and record."""

    def enter(self, opening: Opening, streams: list[_Stream]) -> None:
        """Note where the rows of a request belong."""
        record = opening.number % BOARD_SIZE
        self.number[record], self.paths[record] = opening.number, 0
        self.base[:, record] = -1
        for i, stream in enumerate(streams):
            if stream.slab is not None:
                self.base[i, record] = stream.slab.start + opening.first_tap * stream.most
                self.lo[i, record], self.most[i, record] = stream.lo, stream.most
                if stream.listed is not None:
                    self.listed[i, record] = stream.listed

    def leave(self, opening: Opening) -> None:
        """Drop what still comes for a request."""
        record = opening.number % BOARD_SIZE
        if self.number[record] == opening.number:
            self.number[record] = 0
            for stream in range(_STREAMS):
                self.listed.pop((stream, record), None)


class _Pending:
    """A request whose results are on their way."""

    def __init__(self, envelope: Envelope) -> None:
        capture = envelope.capture
        self.steer_until = envelope.steer_until
        self.named: NDArray[np.int64] | None = None
        if self.steer_until < EVERY:
            named = {p for s in envelope.steer for p in s.positions or ()}
            self.named = np.asarray(sorted(named), dtype=np.int64)
        self.n_taps = 0 if capture is None else len(capture.taps)
        self.n_steered = len({t for s in envelope.steer for t in s.taps})
        self.streams = [] if capture is None else [_Stream(capture)]
        self.shares: list[tuple[Opening, _Worker]] = []
        self.failure: Failure | None = None

    def fed(self) -> tuple[int, int]:
        """First and one past the last position that all workers report to have steered."""
        if sum(opening.n_steered for opening, _ in self.shares) < self.n_steered:
            return 0, 0
        first, last = 0, EVERY
        for opening, worker in self.shares:
            if opening.n_steered:
                record = worker.reader.view.board[opening.number % BOARD_SIZE].tolist()
                if record[0] != opening.number:
                    return 0, 0
                first, last = max(first, record[1]), min(last, record[2])
        return first, last

    def is_ready(self, n_positions: int, n_fed: int) -> bool:
        """Whether everything has arrived, or the request has failed."""
        if self.failure is not None:
            return True
        if sum(opening.n_taps for opening, _ in self.shares) < self.n_taps:
            return False
        if self.n_steered and self.fed()[1] < min(n_fed, self.steer_until):
            return False
        return all(stream.has(n_positions) for stream in self.streams)

    def steered_tokens(self, n_fed: int) -> int:
        """Tokens that were steered, counted once each."""
        if not self.n_steered:
            return 0
        first, last = self.fed()
        last = min(last, n_fed)
        if self.named is None:
            return max(0, last - first)
        a, b = self.named.searchsorted((first, last))
        return int(b - a)

    def all_paths(self) -> tuple[str, ...]:
        """Ways in which the steps of the request ran, sorted."""
        bits = 0
        for opening, worker in self.shares:
            record = opening.number % BOARD_SIZE
            if worker.number[record] == opening.number:
                bits |= int(worker.paths[record])
            noted = worker.reader.view.board[record].tolist()
            if noted[0] == opening.number:
                bits |= noted[3]
        return tuple(sorted(path for i, path in enumerate(PATHS) if bits >> i & 1))


@dataclass(frozen=True)
class Collected:
    """What arrived for one request."""

    tensor: TensorData | None
    """(taps, positions, hidden), or None when nothing was captured."""
    rows: int
    """Rows delivered for these positions, taps times tokens."""
    n_steered: int
    """Tokens that the worker steered; a token that was computed twice counts once."""
    paths: tuple[str, ...]


class Collector:
    """Receives from all workers of this process's engines."""

    def __init__(self, keep_bytes: int = 1 << 30) -> None:
        """Open the socket and start the thread.

        Args:
            keep_bytes: bytes of memory of dropped results that is kept for the next ones.
        """
        self._keep_bytes = keep_bytes
        self._pools: dict[int, SlabPool] = {}
        self._folder = tempfile.mkdtemp(prefix="inspect-lens-")
        self.address = f"ipc://{os.path.join(self._folder, 'rows')}"
        self._pid = os.getpid()
        self._pending: dict[str, _Pending] = {}
        self._workers: dict[str, _Worker] = {}
        self._changed = threading.Condition()
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="inspect-lens-place")
        self._context = zmq.Context()
        self._socket: Any = self._context.socket(zmq.PULL)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(self.address)
        self._is_closing = False
        self._thread = threading.Thread(target=self._receive, name="inspect-lens", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def open(self, key: str, envelope: Envelope) -> None:
        """Expect the results of a request.

        Args:
            key: the request.
            envelope: what it asks for.
        """
        pending = _Pending(envelope)
        with self._changed:
            self._pending[key] = pending

    def discard(self, key: str) -> None:
        """Forget a request; rows that still come for it are dropped."""
        with self._changed:
            self._pop(key)

    @property
    def n_open(self) -> int:
        """Requests whose results are expected."""
        return len(self._pending)

    def take(self, key: str, *, n_positions: int, n_fed: int, timeout_s: float) -> Collected:
        """Wait for the last rows of a finished request and put them together.

        Args:
            key: the request.
            n_positions: positions that were fed, of those asked for; they are the first ones.
            n_fed: tokens that were fed to the model.
            timeout_s: seconds to wait for rows that are on their way.

        Returns:
            What arrived, whole.

        Raises:
            CaptureError: rows are missing after the time-out.
            LensError: the worker reported that it could not serve the request; the class is
                the worker's.
        """
        with self._changed:
            pending = self._pending.get(key)
            if pending is not None:
                self._wait(pending, n_positions, n_fed, timeout_s)
            paths = pending.all_paths() if pending is not None else ()
            pending = self._pop(key)
        if pending is None:
            raise CaptureError(f"request {key}: results were already taken, or it was aborted")
        if pending.failure is not None:
            raise _as_error(pending.failure)
        if pending.n_steered and (fed := pending.fed()[1]) < min(n_fed, pending.steer_until):
            raise CaptureError(
                f"request {key}: the engine fed {n_fed} tokens and the worker reported steering "
                f"up to token {fed} within {timeout_s:g} s; the output must not be used"
            )
        for stream in pending.streams:
            if not stream.has(n_positions):
                raise CaptureError(
                    f"request {key}: {int((~stream.arrived(n_positions)).sum())} of "
                    f"{stream.taps * n_positions} captured rows did not arrive within "
                    f"{timeout_s:g} s; the request has failed and nothing partial is returned"
                )
        tensor = pending.streams[0].take(n_positions, self._threads) if pending.streams else None
        return Collected(
            tensor=tensor,
            rows=pending.n_taps * n_positions,
            n_steered=pending.steered_tokens(n_fed),
            paths=paths,
        )

    def close(self) -> None:
        """Stop the threads and remove the socket's file; safe to call twice."""
        # A forked child inherits the object but neither the threads nor the right to clean up.
        if self._is_closing or os.getpid() != self._pid:
            return
        self._is_closing = True
        self._thread.join(timeout=2)
        self._threads.shutdown(wait=False)
        self._socket.close(linger=0)
        self._context.term()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _wait(self, pending: _Pending, n_positions: int, n_fed: int, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not pending.is_ready(n_positions, n_fed):
            left = deadline - time.monotonic()
            if left <= 0:
                return
            # Rows are told of; the board is not, and is looked at again.
            self._changed.wait(min(left, 0.002 if pending.n_steered else 0.1))

    def _pop(self, key: str) -> _Pending | None:
        pending = self._pending.pop(key, None)
        if pending is not None:
            for opening, worker in pending.shares:
                worker.leave(opening)
        return pending

    def _receive(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        while not self._is_closing:
            if not poller.poll(200):
                continue
            with contextlib.suppress(zmq.Again):
                data = self._socket.recv(flags=zmq.NOBLOCK)
                try:
                    self._accept(data)
                except Exception:
                    # The thread must outlive a bad message; its requests time out loudly.
                    logger.exception("inspect_lens: a message from a worker was not understood")

    def _accept(self, data: bytes) -> None:
        message = decode(data)
        if isinstance(message, Block):
            self._accept_block(message)
        with self._changed:
            if isinstance(message, Opened):
                self._accept_openings(message)
            elif isinstance(message, Failure) and message.key in self._pending:
                self._pending[message.key].failure = message
            self._changed.notify_all()

    def _accept_openings(self, message: Opened) -> None:
        worker = self._workers.get(message.worker)
        if worker is None:
            # Memory of engines that are gone is given back when another one begins.
            self._workers = {k: w for k, w in self._workers.items() if w.reader.is_alive}
            worker = self._workers[message.worker] = _Worker(message.worker)
        for opening in message.openings:
            pending = self._pending.get(opening.key)
            # A pre-empted request may be taken up again, under its number.
            if pending is None or (opening, worker) in pending.shares:
                continue
            for stream in pending.streams:
                if stream.slab is None and stream.most:
                    stream.slab = self._pool(stream.row_bytes).take(stream.taps * stream.most)
            pending.shares = [(o, w) for o, w in pending.shares if w is not worker]
            pending.shares.append((opening, worker))
            worker.enter(opening, pending.streams)

    def _pool(self, row_bytes: int) -> SlabPool:
        if row_bytes not in self._pools:
            self._pools[row_bytes] = SlabPool(row_bytes, self._keep_bytes)
        return self._pools[row_bytes]

    def _accept_block(self, block: Block) -> None:
        worker = self._workers[block.worker]
        try:
            if not worker.reader.wait(block.seq, stop=lambda: self._is_closing):
                logger.error("inspect_lens: rows were announced and did not come")
                return
            self._place(block, worker)
        finally:
            # Also where it went wrong: the worker must not wait for this block for ever.
            worker.reader.done(block.reader, block.seq)

    def _place(self, block: Block, worker: _Worker) -> None:
        taps, tokens, width = block.shape
        numbers, counts, first = (unpacked(v) for v in (block.numbers, block.counts, block.first))
        stream, record = block.stream, numbers % BOARD_SIZE
        base, most = worker.base[stream, record], worker.most[stream, record]
        is_open = (worker.number[record] == numbers) & (base >= 0)
        ends = np.cumsum(counts)
        # Of each token: the row of the pool for the worker's first tap.
        start = base + first - worker.lo[stream, record]
        target = np.repeat(start - (ends - counts), counts) + np.arange(tokens)
        for i, listed in block.listed.items():
            wanted = worker.listed.get((stream, int(record[i])))
            if is_open[i] and wanted is not None:
                at = wanted.searchsorted(unpacked(listed))
                target[ends[i] - counts[i] : ends[i]] = base[i] + at
        step = np.repeat(most, counts)
        targets = target + (np.arange(taps)[:, None] + block.tap) * step
        row_bytes = width * np.dtype(STORAGE[block.dtype]).itemsize
        pool = self._pool(row_bytes)
        nbytes = taps * tokens * row_bytes
        rows = worker.reader.view.data[block.offset : block.offset + nbytes].view(pool.rows.dtype)
        where = targets.reshape(-1)
        if not is_open.all():
            kept = np.flatnonzero(np.tile(np.repeat(is_open, counts), taps))
            rows, where = rows[kept], where[kept]
        self._copy(rows, pool, where)
        pool.arrived[where] = True
        worker.paths[record] |= 1 << PATHS.index(cast("EnginePath", block.path))

    def _copy(self, rows: NDArray[Any], pool: SlabPool, where: NDArray[np.int64]) -> None:
        n = len(where)
        parts = min(_THREADS, n) if n * pool.row_bytes > _SHARE_BYTES else 1
        cuts = [n * k // parts for k in range(parts + 1)]

        def copy(a: int, b: int) -> None:
            pool.rows[where[a:b]] = rows[a:b]

        if parts == 1:
            copy(0, n)
        else:
            list(self._threads.map(copy, cuts[:-1], cuts[1:]))


def _as_error(failure: Failure) -> errors.LensError:
    kind = getattr(errors, failure.kind, None)
    if not (isinstance(kind, type) and issubclass(kind, errors.LensError)):
        return CaptureError(f"the worker failed this request: {failure.kind}: {failure.message}")
    return kind(failure.message)
