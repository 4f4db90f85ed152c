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
from inspect_lens.spec import DType, TensorData

from ._arena import BOARD_SIZE, ArenaReader
from ._envelope import EVERY, Envelope
from ._message import PATHS, Block, Failure, Opened, Opening, decode, unpacked

__all__ = ["STORAGE", "Collected", "Collector"]

logger = logging.getLogger("vllm.inspect_lens")

STORAGE: dict[str, str] = {"float32": "<f4", "float16": "<f2", "bfloat16": "<u2"}

_SHARE_BYTES = 4 << 20
"""Rows of more bytes are placed by several threads."""
_THREADS = max(1, min(8, (os.cpu_count() or 1) // 2))
_RESERVE_BYTES = 64 << 20
"""A result of fewer bytes gets all its memory at once; the system provides it when written."""


class _Stream:
    """One result of a request: rows at some taps, for some positions."""

    def __init__(
        self,
        taps: int,
        width: int,
        dtype: str,
        lo: int,
        hi: int,
        positions: tuple[int, ...] | None,
    ) -> None:
        self.dtype, self.lo = dtype, lo
        self.width, self.storage = width, np.dtype(STORAGE[dtype])
        self.listed = None if positions is None else np.asarray(positions, dtype=np.int64)
        self.most = hi - lo if self.listed is None else len(self.listed)
        # Memory is taken when the first row comes, by the thread that receives it.
        self.rows: NDArray[Any] = np.empty((taps, 0, width), dtype=self.storage)
        self.arrived: NDArray[np.bool_] = np.zeros((taps, 0), dtype=np.bool_)

    def place(self, tap: int, rows: NDArray[Any], first: int, listed: bytes | None) -> None:
        """Copy (taps, tokens, width) rows to where their positions lie."""
        n = rows.shape[1]
        at: Any
        if self.listed is None:
            start = first - self.lo
            at, stop = slice(start, start + n), start + n
        else:
            wanted = np.arange(first, first + n) if listed is None else unpacked(listed)
            at = self.listed.searchsorted(wanted)
            stop = int(at[-1]) + 1
        if stop > self.rows.shape[1]:
            self._grow(stop)
        self.rows[tap : tap + len(rows), at] = rows
        self.arrived[tap : tap + len(rows), at] = True

    def has(self, count: int) -> bool:
        """Whether the first positions have come at all taps."""
        return self.arrived.shape[1] >= count and bool(self.arrived[:, :count].all())

    def missing(self, count: int) -> int:
        """Rows of the first positions that have not come."""
        return len(self.rows) * count - int(np.count_nonzero(self.arrived[:, :count]))

    def take(self, count: int) -> TensorData:
        """The first positions, in memory of their own size."""
        rows = self.rows if self.rows.shape[1] == count else self.rows[:, :count].copy()
        return TensorData(rows, cast("DType", self.dtype))

    def _grow(self, needed: int) -> None:
        have, taps = self.rows.shape[1], len(self.rows)
        row = max(1, taps * self.width * self.storage.itemsize)
        size = self.most
        if size * row > _RESERVE_BYTES:
            size = min(size, max(needed, 2 * have))
        rows = np.empty((taps, size, self.width), dtype=self.storage)
        arrived = np.zeros((taps, size), dtype=np.bool_)
        rows[:, :have], arrived[:, :have] = self.rows, self.arrived
        self.rows, self.arrived = rows, arrived


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
        self.streams: list[_Stream] = []
        if capture is not None:
            taps, width = capture.shape
            self.streams.append(
                _Stream(taps, width, capture.dtype, capture.lo, capture.hi, capture.positions)
            )
        self.shares: list[tuple[Opening, ArenaReader]] = []
        self.paths: set[str] = set()
        self.failure: Failure | None = None

    def fed(self) -> tuple[int, int]:
        """First and one past the last position that all workers report to have steered."""
        if sum(opening.n_steered for opening, _ in self.shares) < self.n_steered:
            return 0, 0
        first, last = 0, EVERY
        for opening, reader in self.shares:
            if opening.n_steered:
                record = reader.view.board[opening.number % BOARD_SIZE].tolist()
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
        for opening, reader in self.shares:
            record = reader.view.board[opening.number % BOARD_SIZE].tolist()
            if record[0] == opening.number:
                bits |= record[3]
        noted = {path for i, path in enumerate(PATHS) if bits >> i & 1}
        return tuple(sorted(self.paths | noted))


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

    def __init__(self) -> None:
        self._folder = tempfile.mkdtemp(prefix="inspect-lens-")
        self.address = f"ipc://{os.path.join(self._folder, 'rows')}"
        self._pid = os.getpid()
        self._pending: dict[str, _Pending] = {}
        self._workers: dict[str, ArenaReader] = {}
        self._numbered: dict[tuple[str, int], tuple[_Pending, Opening]] = {}
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
                    f"request {key}: {stream.missing(n_positions)} of "
                    f"{len(stream.rows) * n_positions} captured rows did not arrive within "
                    f"{timeout_s:g} s; the request has failed and nothing partial is returned"
                )
        tensor = pending.streams[0].take(n_positions) if pending.streams else None
        return Collected(
            tensor=tensor,
            rows=pending.n_taps * n_positions,
            n_steered=pending.steered_tokens(n_fed),
            paths=pending.all_paths(),
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
            for opening, reader in pending.shares:
                self._numbered.pop((reader.name, opening.number), None)
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
        reader = self._workers.get(message.worker)
        if reader is None:
            # Memory of engines that are gone is given back when another one begins.
            self._workers = {k: r for k, r in self._workers.items() if r.is_alive}
            reader = self._workers[message.worker] = ArenaReader(message.worker)
        for opening in message.openings:
            pending = self._pending.get(opening.key)
            # A pre-empted request may be taken up again; its number is the same.
            if pending is not None and (message.worker, opening.number) not in self._numbered:
                pending.shares = [(o, r) for o, r in pending.shares if r is not reader]
                pending.shares.append((opening, reader))
                self._numbered[message.worker, opening.number] = (pending, opening)

    def _accept_block(self, block: Block) -> None:
        reader = self._workers[block.worker]
        try:
            if not reader.wait(block.seq, stop=lambda: self._is_closing):
                logger.error("inspect_lens: rows were announced and did not come")
                return
            self._place(block, reader)
        finally:
            # Also where it went wrong: the worker must not wait for this block for ever.
            reader.done(block.reader, block.seq)

    def _place(self, block: Block, reader: ArenaReader) -> None:
        taps, tokens, width = block.shape
        storage = np.dtype(STORAGE[block.dtype])
        nbytes = taps * tokens * width * storage.itemsize
        rows = reader.view.data[block.offset : block.offset + nbytes].view(storage)
        rows = rows.reshape(taps, tokens, width)
        with self._changed:
            found = [self._numbered.get((block.worker, n)) for n in unpacked(block.numbers)]
        counts = unpacked(block.counts).tolist()
        first = unpacked(block.first).tolist()
        starts = np.cumsum([0, *counts]).tolist()

        def place(begin: int, end: int) -> None:
            for i in range(begin, end):
                if (mine := found[i]) is not None:
                    pending, opening = mine
                    pending.streams[block.stream].place(
                        opening.first_tap + block.tap,
                        rows[:, starts[i] : starts[i + 1]],
                        first[i],
                        block.listed.get(i),
                    )
                    pending.paths.add(block.path)

        n = len(found)
        shares = min(_THREADS, n) if nbytes > _SHARE_BYTES else 1
        if shares == 1:
            place(0, n)
        else:
            cuts = [n * k // shares for k in range(shares + 1)]
            list(self._threads.map(place, cuts[:-1], cuts[1:]))


def _as_error(failure: Failure) -> errors.LensError:
    kind = getattr(errors, failure.kind, None)
    if not (isinstance(kind, type) and issubclass(kind, errors.LensError)):
        return CaptureError(f"the worker failed this request: {failure.kind}: {failure.message}")
    return kind(failure.message)
