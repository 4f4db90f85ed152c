"""One result of a running request: where its rows lie, and which of them have come."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from inspect_lens._engine.protocol.readouts import Readout
from inspect_lens.spec import TensorData

from .result_memory import ARRIVED, COVERED, ResultMemory, Slab

SHARE_BYTES = 4 << 20
"""Rows of more bytes are copied, or merged, by several threads."""


STORAGE: dict[str, str] = {"float32": "<f4", "float16": "<f2", "bfloat16": "<u2"}
_DTYPES: dict[str, np.dtype[Any]] = {name: np.dtype(code) for name, code in STORAGE.items()}


class Stream:
    """One result of a request: rows at some taps, for some positions."""

    def __init__(self, asked: Readout, n_prompt: int) -> None:
        self.taps, self.width = asked.shape
        self._asked = asked
        self.dtype, self.lo = asked.wire, asked.lo
        self.listed = None
        self.most = asked.hi - asked.lo
        """Positions at most."""
        if asked.positions is not None:
            self.listed = np.asarray(asked.positions, dtype=np.int64)
            self.most = len(self.listed)
        self.room = self.most
        """Positions for which there is room. Most requests end long before they have to: there is
        room for all positions only where that does not take too many addresses."""
        self.slab: Slab | None = None
        self._parts: list[int] | None = [] if asked.is_summed else None
        """First tap of each worker's share, where that is sent as one sum; None where all are."""
        # Positions of the prompt.
        n_known = min(max(n_prompt - asked.lo, 0), self.most)
        if self.listed is not None:
            n_known = int(self.listed.searchsorted(n_prompt))
        self._is_full = not asked.is_merged and 2 * n_known >= self.most
        """Whether most of the rows come in any case."""
        self.n_head = asked.n_partial(n_known, self.most)

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return self.width * _DTYPES[self.dtype].itemsize

    def arrived(self, count: int) -> NDArray[np.bool_]:
        """(taps, count); which of the first positions have come."""
        if self.slab is None:
            return np.zeros((self.taps, count), dtype=np.bool_)
        come: NDArray[np.bool_] = self._flags(self.slab, self.room)[:, :count] != 0
        return come

    def _flags(self, slab: Slab, room: int) -> NDArray[np.uint8]:
        """(taps, positions for which there is room)."""
        return slab.flags.reshape(self.taps, room)

    @property
    def reach(self) -> int:
        """One past the last position for which there is room."""
        return self.lo + self.room if self.listed is None else np.iinfo(np.int64).max

    def end(self, count: int) -> int:
        """One past the last of the first positions."""
        if not count:
            return 0
        return (self.lo + count - 1 if self.listed is None else int(self.listed[count - 1])) + 1

    def further(self, since: int) -> NDArray[Any]:
        """Rows that have come without a gap behind the first `since` positions."""
        if self.slab is None:
            return np.zeros((self.taps, 0, self.width), dtype=_DTYPES[self.dtype])
        come: NDArray[np.bool_] = np.logical_and.reduce(self.arrived(self.room)[:, since:], axis=0)
        n = len(come) if come.all() else int(come.argmin())
        return self._come(self._whole(self.slab)[:, since : since + n]).copy()

    def _whole(self, slab: Slab) -> NDArray[Any]:
        """(taps, positions with room, width); what has come, and what has not."""
        return slab.array(_DTYPES[self.dtype], (self.taps, self.room, self.width))

    def _come(self, rows: NDArray[Any]) -> NDArray[Any]:
        """Of all taps those whose rows come."""
        if self._parts is None:
            return rows
        return rows[: len(self._parts)] if self._parts in ([], [0]) else rows[self._parts]

    def has(self, count: int) -> bool:
        """Whether the first positions have come at all taps."""
        if not count:
            return True
        if count > self.room:
            return False
        if self.slab is not None and count == self.room:
            return self.slab.has_arrived(self.taps * count)
        return bool(self.arrived(count).all())

    def open(self, memory: ResultMemory) -> None:
        """Take memory for the rows."""
        if self.listed is None:
            self.room = max(1, min(self.most, memory.most_rows(self.row_bytes) // self.taps))
        self.slab = memory.take(self.taps * self.room, self.row_bytes, is_full=self._is_full)

    def larger(self, until: int) -> tuple[Slab, int]:
        """Memory for more positions, with what has come; and for how many."""
        assert self.slab is not None
        room = min(self.most, max(2 * self.room, until - self.lo))
        slab = self.slab.memory.take(self.taps * room, self.row_bytes)
        come = self._flags(self.slab, self.room)
        rows = slab.array(_DTYPES[self.dtype], (self.taps, room, self.width))
        flags = self._flags(slab, room)
        for tap in range(self.taps):
            if self._parts is not None and tap not in self._parts:
                # Another tap's row stands for it, or nobody has it.
                flags[tap] = ARRIVED * come[tap].all()
                continue
            # What has not come is not read: that would take memory for it.
            n = int(come[tap].nonzero()[0].max(initial=-1)) + 1
            rows[tap, :n] = self._whole(self.slab)[tap, :n]
            flags[tap, :n] = come[tap, :n]
        return slab, room

    @property
    def is_plain(self) -> bool:
        """Whether the rows that come are the result."""
        return not (self._asked.is_merged or self.n_head)

    def restart(self, first_tap: int, n_taps: int) -> None:
        """Expect the share of a worker, which will reduce again what it has reduced before."""
        if self.slab is None:
            return
        flags = self._flags(self.slab, self.room)
        if self._parts is not None and n_taps:
            # One row stands for those of all its taps.
            self._parts = sorted({*self._parts, first_tap})
            flags[first_tap + 1 : first_tap + n_taps] = ARRIVED
        if self.n_head > 1:
            flags[first_tap : first_tap + n_taps, : self.n_head] = 0

    def is_cut(self, count: int) -> bool:
        """Whether a row that stands for some of the first positions stands for others, too."""
        if self.slab is None or not self.n_head or not count:
            return False
        return bool((self._flags(self.slab, self.room)[:, count - 1] == COVERED).any())

    def take(self, count: int, threads: ThreadPoolExecutor) -> TensorData:
        """The first positions as one contiguous array, or what is to be made of them.

        All positions of a plain result lie where their rows do, whether or not these have come.
        Of probe scores there is a share of each worker in the place of taps.
        """
        if self._asked.is_merged:
            whole = covered = None
            if self.slab is not None and count:
                whole = self._whole(self.slab)[:, :count]
            if self.slab is not None and self.n_head:
                covered = self._flags(self.slab, self.room)[:, :count] == COVERED
            is_large = whole is not None and whole.nbytes > SHARE_BYTES
            return self._asked.merge(whole, covered, threads.map if is_large else map)
        if self.slab is None:
            rows = np.zeros((self.taps, count, self.width), dtype=_DTYPES[self.dtype])
        else:
            rows = self._come(self._whole(self.slab)[:, :count])
            if not rows.flags.c_contiguous:
                # It ended before it was long: a copy of what is there frees the rest.
                rows = self._copied(self.slab, rows, threads)
        return TensorData(rows, self.dtype)

    def _copied(self, slab: Slab, rows: NDArray[Any], threads: ThreadPoolExecutor) -> NDArray[Any]:
        taps, count, _ = rows.shape
        made = slab.memory.take(taps * count, self.row_bytes, is_full=True)
        out = made.array(rows.dtype, rows.shape)

        def copy(tap: int) -> None:
            out[tap] = rows[tap]

        run: Callable[..., Any] = threads.map if out.nbytes > SHARE_BYTES else map
        list(run(copy, range(taps)))
        return out
