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
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import zmq
from numpy.typing import NDArray

from inspect_lens import errors
from inspect_lens.errors import CaptureError
from inspect_lens.spec import DType, TapPoint, TensorData

from ._message import BlockHeader, FailureHeader, StepHeader, decode_header

__all__ = ["STORAGE", "Collected", "Collector"]

logger = logging.getLogger("vllm.inspect_lens")

STORAGE: dict[str, str] = {"float32": "<f4", "float16": "<f2", "bfloat16": "<u2"}


@dataclass(frozen=True)
class Chunk:
    """Rows of one request from one step."""

    taps: tuple[TapPoint, ...]
    positions: NDArray[np.int64]
    rows: NDArray[Any]
    """(taps, tokens, hidden) storage."""
    dtype: str


@dataclass
class _Pending:
    taps: tuple[TapPoint, ...]
    steer_until: int
    chunks: list[Chunk] = field(default_factory=list)
    seen: dict[TapPoint, set[int]] = field(default_factory=dict)
    """Positions that have arrived, by tap."""
    steered: set[int] = field(default_factory=set)
    fed: int = 0
    settled: int = 0
    paths: set[str] = field(default_factory=set)
    failure: FailureHeader | None = None

    def is_settled(self, positions: NDArray[np.int64], settled: int | None) -> bool:
        """Whether no row can still be written again."""
        if settled is None or not len(positions):
            return True
        return self.settled >= min(settled, int(positions[-1]) + 1)


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
        self._changed = threading.Condition()
        self._context = zmq.Context()
        self._socket: Any = self._context.socket(zmq.PULL)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(self.address)
        self._is_closing = False
        self._thread = threading.Thread(target=self._receive, name="inspect-lens", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def open(self, key: str, *, taps: tuple[TapPoint, ...], steer_until: int) -> None:
        """Expect results for a request.

        Args:
            key: the request.
            taps: whose rows will come, in this order; empty for none.
            steer_until: one past the last position to be steered; 0 for none.
        """
        with self._changed:
            self._pending[key] = _Pending(taps, steer_until)

    def discard(self, key: str) -> None:
        """Forget a request; rows that still come for it are dropped."""
        with self._changed:
            self._pending.pop(key, None)

    def is_open(self, key: str) -> bool:
        """Whether results for the request are expected."""
        return key in self._pending

    @property
    def n_open(self) -> int:
        """Requests whose results are expected."""
        return len(self._pending)

    def is_ready(self, key: str, positions: NDArray[np.int64], n_fed: int) -> bool:
        """Whether everything for a finished request has arrived, or it has failed."""
        with self._changed:
            return self._is_ready(key, positions, n_fed)

    def take(
        self,
        key: str,
        *,
        positions: NDArray[np.int64],
        n_fed: int,
        timeout_s: float,
        settled: int | None = None,
    ) -> Collected:
        """Wait for the last rows of a finished request and put them together.

        Args:
            key: the request.
            positions: positions asked for, ascending; empty when nothing was captured.
            n_fed: tokens that were fed to the model.
            timeout_s: seconds to wait for rows that are on their way.
            settled: where drafts may be rejected, one past the first position of the last step:
                rows up to there may have been written before by a draft, so the step that wrote
                them last must have reported.

        Returns:
            What arrived, whole.

        Raises:
            CaptureError: rows are missing after the time-out.
            LensError: the worker reported that it could not serve the request; the class is
                the worker's.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: self._is_ready(key, positions, n_fed, settled), timeout_s
            )
            pending = self._pending.pop(key, None)
        if pending is None:
            raise CaptureError(f"request {key}: results were already taken, or it was aborted")
        if pending.failure is not None:
            raise _as_error(pending.failure)
        if not pending.is_settled(positions, settled):
            raise CaptureError(
                f"request {key}: the last step was not reported within {timeout_s:g} s; rows of "
                "rejected drafts may be among those that arrived, so none are returned"
            )
        if pending.fed < min(n_fed if settled is None else settled, pending.steer_until):
            raise CaptureError(
                f"request {key}: the engine fed {n_fed} tokens and the worker reported steering "
                f"up to token {pending.fed} within {timeout_s:g} s; the output must not be used"
            )
        taps = pending.taps
        tensor = _assemble(key, pending.chunks, taps, positions) if len(positions) else None
        return Collected(
            tensor=tensor,
            rows=len(taps) * len(positions),
            n_steered=sum(p < n_fed for p in pending.steered),
            paths=tuple(sorted(pending.paths)),
        )

    def close(self) -> None:
        """Stop the thread and remove the socket's file; safe to call twice."""
        # A forked child inherits the object but neither the thread nor the right to clean up.
        if self._is_closing or os.getpid() != self._pid:
            return
        self._is_closing = True
        self._thread.join(timeout=2)
        self._socket.close(linger=0)
        self._context.term()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _is_ready(
        self, key: str, positions: NDArray[np.int64], n_fed: int, settled: int | None = None
    ) -> bool:
        pending = self._pending.get(key)
        if pending is None or pending.failure is not None:
            return True
        if pending.fed < min(n_fed if settled is None else settled, pending.steer_until):
            return False
        if not pending.is_settled(positions, settled):
            return False
        wanted = positions.tolist()
        none: set[int] = set()
        return all(pending.seen.get(i, none).issuperset(wanted) for i in pending.taps)

    def _receive(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        while not self._is_closing:
            if not poller.poll(200):
                continue
            with contextlib.suppress(zmq.Again):
                frames = self._socket.recv_multipart(flags=zmq.NOBLOCK, copy=False)
                try:
                    self._accept([f.buffer for f in frames])
                except Exception:
                    # The thread must outlive a bad message; its requests time out loudly.
                    logger.exception("inspect_lens: a message from a worker was not understood")

    def _accept(self, frames: list[Any]) -> None:
        header = decode_header(bytes(frames[0]))
        with self._changed:
            if isinstance(header, FailureHeader):
                if (pending := self._pending.get(header.key)) is not None:
                    pending.failure = header
            else:
                self._accept_step(header, frames[1:])
            self._changed.notify_all()

    def _accept_step(self, header: StepHeader, frames: list[Any]) -> None:
        for key, (fed, span) in header.steered.items():
            if (pending := self._pending.get(key)) is not None:
                if span is not None:
                    pending.steered.update(span.positions().tolist())
                pending.fed = max(pending.fed, fed)
                pending.paths.add(header.path)
        for key, settled in header.settled.items():
            if (pending := self._pending.get(key)) is not None:
                pending.settled = max(pending.settled, settled)
                pending.fed = max(pending.fed, settled)
        for block, frame in zip(header.blocks, frames, strict=True):
            self._accept_block(block, frame, header.path)

    def _accept_block(self, block: BlockHeader, frame: Any, path: str) -> None:
        rows = np.frombuffer(frame, dtype=STORAGE[block.dtype]).reshape(
            len(block.taps), block.n_tokens, block.hidden
        )
        start = 0
        for key, span in block.requests:
            stop = start + span.count
            if (pending := self._pending.get(key)) is not None:
                positions = span.positions()
                # A copy, so that one long-lived request does not keep the whole message alive.
                mine = rows[:, start:stop].copy()
                pending.chunks.append(Chunk(block.taps, positions, mine, block.dtype))
                listed = positions.tolist()
                for tap in block.taps:
                    pending.seen.setdefault(tap, set()).update(listed)
                pending.paths.add(path)
            start = stop


def _assemble(
    key: str, chunks: list[Chunk], taps: tuple[TapPoint, ...], positions: NDArray[np.int64]
) -> TensorData:
    if not chunks:
        raise CaptureError(f"request {key}: no captured row arrived; the request has failed")
    first = chunks[0]
    rank_of = {tap: i for i, tap in enumerate(taps)}
    out = np.empty((len(taps), len(positions), first.rows.shape[-1]), dtype=first.rows.dtype)
    arrived = np.zeros((len(taps), len(positions)), dtype=bool)
    for chunk in chunks:
        at = np.searchsorted(positions, chunk.positions)
        # Surplus rows: the scheduler may run a step past the stop.
        inside = (at < len(positions)) & (
            positions[np.minimum(at, len(positions) - 1)] == chunk.positions
        )
        ranks = [rank_of[tap] for tap in chunk.taps]
        out[np.ix_(ranks, at[inside])] = chunk.rows[:, inside]
        arrived[np.ix_(ranks, at[inside])] = True
    if not arrived.all():
        missing = int((~arrived).sum())
        raise CaptureError(
            f"request {key}: {missing} of {arrived.size} captured rows did not arrive; "
            "the request has failed and nothing partial is returned"
        )
    return TensorData(out, cast("DType", first.dtype))


def _as_error(failure: FailureHeader) -> errors.LensError:
    kind = getattr(errors, failure.kind, None)
    if not (isinstance(kind, type) and issubclass(kind, errors.LensError)):
        return CaptureError(f"the worker failed this request: {failure.kind}: {failure.message}")
    return kind(failure.message)
