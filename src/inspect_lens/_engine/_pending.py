"""What the front-end keeps of a running request, and of each worker that sends rows of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from inspect_lens.spec import TensorData

from ._arena import BOARD_SIZE, ArenaReader
from ._capture import CaptureEnvelope
from ._envelope import EVERY, Envelope, SteerEnvelope
from ._merge import merge_of
from ._message import PATHS, ROWS, SCORES, Failure, Opening
from ._probes import ProbesEnvelope
from ._slabs import Slab, SlabPool

__all__ = ["ROWS", "SCORES", "SHARE_BYTES", "STORAGE", "Pending", "Stream", "Worker"]

STORAGE: dict[str, str] = {"float32": "<f4", "float16": "<f2", "bfloat16": "<u2"}
_DTYPES: dict[str, np.dtype[Any]] = {name: np.dtype(code) for name, code in STORAGE.items()}

SHARE_BYTES = 4 << 20
"""Rows of more bytes are copied by several threads."""

_STREAMS = 2
_NONE: NDArray[np.int64] = np.zeros(0, dtype=np.int64)


class Stream:
    """One result of a request: rows at some taps, for some positions."""

    def __init__(self, asked: CaptureEnvelope | ProbesEnvelope, n_prompt: int) -> None:
        self.taps, self.width = asked.shape
        self.dtype, self.lo = asked.wire, asked.lo
        self.listed = None
        self.most = asked.hi - asked.lo
        """Positions at most."""
        if asked.positions is not None:
            self.listed = np.asarray(asked.positions, dtype=np.int64)
            self.most = len(self.listed)
        self.slab: Slab | None = None
        self._parts: list[int] | None = [] if isinstance(asked, ProbesEnvelope) else None
        """First tap of each worker's share, where that is sent as one sum; None where all are."""
        self.merge = merge_of(asked) if isinstance(asked, CaptureEnvelope) else None
        """What is made of the rows that came; None where they are the result."""
        # Positions of the prompt.
        n_known = min(max(n_prompt - asked.lo, 0), self.most)
        if self.listed is not None:
            n_known = int(self.listed.searchsorted(n_prompt))
        self._is_full = self.merge is None and 2 * n_known >= self.most
        """Whether most of the rows come in any case."""
        self.n_head = 0
        """Positions at the front of which rows may come that stand for several."""
        if isinstance(asked, CaptureEnvelope) and asked.is_folded:
            self.n_head = self.most
        elif self.merge is not None and self.merge.is_partial:
            self.n_head = n_known

    @property
    def row_bytes(self) -> int:
        return self.width * _DTYPES[self.dtype].itemsize

    def arrived(self, count: int) -> NDArray[np.bool_]:
        """(taps, count); which of the first positions have come."""
        if self.slab is None:
            return np.zeros((self.taps, count), dtype=np.bool_)
        flags = self.slab.arrived[: self.taps * self.most]
        return flags.reshape(self.taps, self.most)[:, :count]

    def end(self, count: int) -> int:
        """One past the last of the first positions."""
        if not count:
            return 0
        return (self.lo + count - 1 if self.listed is None else int(self.listed[count - 1])) + 1

    def further(self, since: int) -> NDArray[Any]:
        """Rows that have come without a gap behind the first `since` positions."""
        if self.slab is None:
            return np.zeros((self.taps, 0, self.width), dtype=_DTYPES[self.dtype])
        come: NDArray[np.bool_] = np.logical_and.reduce(self.arrived(self.most)[:, since:], axis=0)
        n = len(come) if come.all() else int(come.argmin())
        return self._come(self._whole(self.slab)[:, since : since + n]).copy()

    def _whole(self, slab: Slab) -> NDArray[Any]:
        """(taps, positions at most, width); what has come, and what has not."""
        return slab.array(_DTYPES[self.dtype], (self.taps, self.most, self.width))

    def _come(self, rows: NDArray[Any]) -> NDArray[Any]:
        """Of all taps those whose rows come."""
        if self._parts is None:
            return rows
        return rows[: len(self._parts)] if self._parts in ([], [0]) else rows[self._parts]

    def has(self, count: int) -> bool:
        """Whether the first positions have come at all taps."""
        if not count:
            return True
        if self.slab is not None and count == self.most:
            return self.slab.has_arrived(self.taps * count)
        return bool(self.arrived(count).all())

    def open(self, pool: SlabPool) -> None:
        """Take memory for the rows."""
        self.slab = pool.take(self.taps * self.most, is_full=self._is_full)
        if self.n_head:
            self.slab.covered[...] = False

    def restart(self, first_tap: int, n_taps: int) -> None:
        """Expect the share of a worker.

        What it has reduced is forgotten: it will reduce that again, from the start.
        """
        if self._parts is not None and n_taps and self.slab is not None:
            # One row stands for those of all its taps.
            self._parts = sorted({*self._parts, first_tap})
            flags = self.slab.arrived[first_tap * self.most : (first_tap + n_taps) * self.most]
            flags[self.most :] = True
        if self.slab is not None and self.n_head > 1:
            flags = self.slab.arrived[: self.taps * self.most].reshape(self.taps, self.most)
            flags[first_tap : first_tap + n_taps, : self.n_head] = False
            covered = self.slab.covered[: self.taps * self.most].reshape(self.taps, self.most)
            covered[first_tap : first_tap + n_taps] = False

    def is_cut(self, count: int) -> bool:
        """Whether a row that stands for some of the first positions stands for others, too."""
        if self.slab is None or not self.n_head or not count:
            return False
        flags = self.slab.covered[: self.taps * self.most].reshape(self.taps, self.most)
        return bool(flags[:, count - 1].any())

    def take(self, count: int, threads: ThreadPoolExecutor) -> TensorData:
        """The first positions as one contiguous array, or what is to be made of them.

        Of probe scores there is a share of each worker in the place of taps.
        """
        if self.merge is not None:
            whole = covered = None
            if self.slab is not None and count:
                whole = self._whole(self.slab)[:, :count]
            if self.slab is not None and self.n_head:
                flags = self.slab.covered[: self.taps * self.most]
                covered = flags.reshape(self.taps, self.most)[:, :count]
            return self.merge(whole, covered, (self.taps, self.width), threads)
        if self.slab is None:
            rows = np.zeros((self.taps, count, self.width), dtype=_DTYPES[self.dtype])
        else:
            rows = self._come(self._whole(self.slab)[:, :count])
            if not rows.flags.c_contiguous:
                # It ended before it was long: a copy of what is there frees the rest.
                rows = _copied(rows, threads)
        return TensorData(rows, self.dtype)


def _copied(rows: NDArray[Any], threads: ThreadPoolExecutor) -> NDArray[Any]:
    out = np.empty(rows.shape, dtype=rows.dtype)

    def copy(tap: int) -> None:
        out[tap] = rows[tap]

    if out.nbytes > SHARE_BYTES:
        list(threads.map(copy, range(len(rows))))
    else:
        out[...] = rows
    return out


class Worker:
    """A worker's shared memory, and where the rows of its requests belong, by board record."""

    def __init__(self, name: str) -> None:
        self.reader = ArenaReader(name)
        self.number: NDArray[np.int64] = np.zeros(BOARD_SIZE, dtype=np.int64)
        self.paths: NDArray[np.int64] = np.zeros(BOARD_SIZE, dtype=np.int64)
        self.settled: NDArray[np.int64] = np.zeros(BOARD_SIZE, dtype=np.int64)
        """One past the last position whose row no later step writes again."""
        shape = (_STREAMS, BOARD_SIZE)
        self.base: NDArray[np.int64] = np.full(shape, -1, dtype=np.int64)
        """Row of the slab pool of the worker's first tap at the first position."""
        self.lo: NDArray[np.int64] = np.zeros(shape, dtype=np.int64)
        self.most: NDArray[np.int64] = np.zeros(shape, dtype=np.int64)
        self.listed: dict[tuple[int, int], NDArray[np.int64]] = {}
        """Explicit positions, by stream and record."""

    def enter(self, opening: Opening, streams: dict[int, Stream]) -> None:
        """Note where the rows of a request belong."""
        record = opening.number % BOARD_SIZE
        for i, stream in streams.items():
            stream.restart(*opening.shares[i])
        self.number[record], self.paths[record] = opening.number, 0
        self.settled[record] = 0
        self.base[:, record] = -1
        for i, stream in streams.items():
            if stream.slab is not None:
                first_tap, _ = opening.shares[i]
                self.base[i, record] = stream.slab.start + first_tap * stream.most
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


class Pending:
    """A request whose results are on their way."""

    def __init__(self, envelope: Envelope) -> None:
        self.steer_until = self.n_steered = 0
        self.spans: set[tuple[int, int]] = set()
        self.named = _NONE
        if envelope.steer:
            self._expect_steering(envelope.steer)
            self.steer_until = envelope.steer_until
        self._envelope = envelope
        self.shares: list[tuple[Opening, Worker]] = []
        self.failure: Failure | None = None

    @cached_property
    def streams(self) -> dict[int, Stream]:
        """What comes, by kind; asked for under the collector's lock.

        Made when it is first asked for, which is no more in the way of the next request.
        """
        made: dict[int, Stream] = {}
        envelope = self._envelope
        if envelope.capture is not None:
            made[ROWS] = Stream(envelope.capture, envelope.n_prompt)
        if envelope.probes is not None:
            made[SCORES] = Stream(envelope.probes, envelope.n_prompt)
        return made

    def _expect_steering(self, steer: Sequence[SteerEnvelope]) -> None:
        spans = {(s.lo, s.hi) for s in steer if s.positions is None}
        # Phases do not overlap, so without the whole they are disjoint.
        self.spans = {(0, EVERY)} if (0, EVERY) in spans else spans
        named = {p for s in steer for p in s.positions or () if s.lo <= p < s.hi}
        named = {p for p in named if not any(a <= p < b for a, b in self.spans)}
        self.named = np.asarray(sorted(named), dtype=np.int64)
        self.n_steered = len({t for s in steer for t in s.taps})

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

    def is_settled(self, counts: Mapping[int, int], settled: int | None) -> bool:
        """Whether no row, and no steering, can come a second time.

        Args:
            counts: positions asked for that were fed, by stream.
            settled: where drafts may be rejected, one past the first position of the last step.
        """
        if settled is None:
            return True
        for opening, worker in self.shares:
            record = opening.number % BOARD_SIZE
            needed = self.steer_until if opening.n_steered else 0
            for i, stream in self.streams.items():
                if opening.shares[i][1]:
                    needed = max(needed, stream.end(counts[i]))
            if worker.number[record] != opening.number:
                return False
            if worker.settled[record] < min(settled, needed):
                return False
        return True

    def is_ready(self, counts: Mapping[int, int], n_fed: int, settled: int | None) -> bool:
        """Whether everything has arrived, or the request has failed."""
        if self.failure is not None:
            return True
        if self.n_steered and self.fed()[1] < min(n_fed, self.steer_until):
            return False
        if not self.is_settled(counts, settled):
            return False
        return all(stream.has(counts[i]) for i, stream in self.streams.items())

    def lack(self, counts: Mapping[int, int], n_fed: int, settled: int | None) -> str:
        """What has not come of a request that is not ready, in words."""
        if self.n_steered and (fed := self.fed()[1]) < min(n_fed, self.steer_until):
            return (
                f"the engine fed {n_fed} tokens and the worker reported steering up to token "
                f"{fed}, so that the output must not be used,"
            )
        if not self.is_settled(counts, settled):
            return (
                "the last step was not reported, so that rows of rejected drafts may be among "
                "those that arrived and steering is not confirmed,"
            )
        for i, stream in self.streams.items():
            if missing := int((~stream.arrived(counts[i])).sum()):
                return f"{missing} of {stream.taps * counts[i]} captured rows did not arrive"
        return "its results did not arrive"

    def steered_tokens(self, n_fed: int) -> int:
        """Tokens that were steered, counted once each."""
        if not self.n_steered:
            return 0
        first, last = self.fed()
        last = min(last, n_fed)
        a, b = self.named.searchsorted((first, last))
        in_spans = sum(max(0, min(last, hi) - max(first, lo)) for lo, hi in self.spans)
        return int(b - a) + in_spans

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
        return _paths_of(bits)


@lru_cache
def _paths_of(bits: int) -> tuple[str, ...]:
    return tuple(sorted(path for i, path in enumerate(PATHS) if bits >> i & 1))
