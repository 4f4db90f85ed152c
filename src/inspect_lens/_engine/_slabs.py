"""Memory for results: rows of all requests in one address range, so that one call places a step.

A step of a thousand requests brings a thousand rows that belong into a thousand results. Copied
one by one they would cost more Python than the step has time for. So results are slabs of one
large anonymous mapping, indexed by row: a step's rows are placed by a single fancy assignment,
which numpy carries out without holding the interpreter's lock.

The mapping reserves addresses only; memory is taken when a row is written. A slab is given back
when the last array that looks at it is gone. Its memory stays for the next slabs for a minute: to
fault gigabytes of pages in again, which the system fills with zeros first, takes longer than to
copy rows into them. Until then the system may have it whenever it runs short (`MADV_FREE`).

Half of the addresses are for large slabs: there the system is asked for huge pages, since
gigabytes of rows are a million faults in pages of 4 KiB. A result that may become long, and does
not, is a few rows at each tap, far from one another, and each of them would take 2 MiB. So such
slabs lie there only while all of them, were they full, would not take more than a share of the
memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import threading
import time
import weakref
from collections import deque
from functools import cached_property
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from inspect_lens.errors import CapacityError

__all__ = ["Slab", "SlabPool"]

_RESERVE = 1 << 41
"""Bytes of addresses, 2 TiB of the 128 that a process has."""
_LEAST = 1 << 32
_ROWS = 1 << 34
"""Rows of a pool at most: each has flags, and narrow rows would need more of them than room."""
_PAGE = mmap.PAGESIZE
_HUGE_PAGE = 1 << 21
_LARGE = 4 * _HUGE_PAGE
"""Bytes of a slab that is worth huge pages; those at its ends it shares with its neighbours."""
_KEPT_S = 60.0
"""Seconds after which memory of dropped slabs goes back to the system."""
_SWEPT = 256 << 20
"""Bytes that go back in one go: the thread that does it also places rows."""


class Slab:
    """Consecutive rows of a pool."""

    def __init__(self, pool: SlabPool, start: int, size: int) -> None:
        self.start, self.size = start, size
        self._pool = pool
        nbytes = size * pool.row_bytes
        # The buffer is held by every array made of it, however many views lie between.
        self._buffer = (ctypes.c_char * nbytes).from_buffer(pool.memory, start * pool.row_bytes)
        weakref.finalize(self._buffer, pool.give_back, start, size).atexit = False

    @property
    def arrived(self) -> NDArray[np.bool_]:
        """(rows,); whether each row has been written."""
        return self._pool.arrived[self.start : self.start + self.size]

    @property
    def covered(self) -> NDArray[np.bool_]:
        """(rows,); whether a later row stands for each; not cleared for a new slab."""
        return self._pool.covered[self.start : self.start + self.size]

    def array(self, dtype: np.dtype[Any]) -> NDArray[Any]:
        """The rows, flat; keeps the slab alive."""
        return np.frombuffer(cast("Any", self._buffer), dtype=dtype)


class SlabPool:
    """Slabs of rows of one width. One thread allocates; any thread may drop a slab."""

    def __init__(self, row_bytes: int, keep_bytes: int, spare_bytes: int = 0) -> None:
        """Reserve addresses.

        Args:
            row_bytes: bytes of a row.
            keep_bytes: bytes of unused slabs whose memory is kept for the next ones in any case.
            spare_bytes: of slabs with huge pages, in use at once, up to which slabs get some that
                may stay mostly empty; and of slabs in use and unused ones together, up to which
                the memory of these is kept.
        """
        self.row_bytes = row_bytes
        self._spare = spare_bytes
        self._used = 0
        """Bytes of the slabs in use, were they full."""
        self._huge = 0
        """Bytes of the slabs in use that have huge pages, were they full."""
        self.memory = _reserve(row_bytes)
        most = len(self.memory) // row_bytes
        middle = len(self.memory) // (2 * _HUGE_PAGE) * _HUGE_PAGE
        with contextlib.suppress(AttributeError, OSError):  # not every system has them
            self.memory.madvise(mmap.MADV_HUGEPAGE, middle, len(self.memory) - middle)
        self._middle = -(-middle // row_bytes)
        # Rows are opaque: only their place matters here.
        row = np.dtype((np.void, row_bytes))
        self.rows: NDArray[np.void] = np.frombuffer(self.memory, dtype=row)
        self.arrived: NDArray[np.bool_] = np.frombuffer(_mapped(most), dtype=np.bool_)
        self.returned: deque[tuple[int, int, bool, bool]] = deque()
        """(start, rows, whether their memory was kept and they were counted) of dropped slabs."""
        self._keep = keep_bytes
        self._kept = 0
        self._counting = threading.Lock()
        self._halves = (_Half(0, self._middle), _Half(self._middle, most))
        """Without, and with huge pages."""

    @cached_property
    def covered(self) -> NDArray[np.bool_]:
        """(rows,); only results that are reduced on their way need it."""
        return np.frombuffer(_mapped(len(self.arrived)), dtype=np.bool_)

    def take(self, rows: int, *, is_full: bool = False) -> Slab:
        """A slab of at least this many rows, none of which has arrived.

        Args:
            rows: how many.
            is_full: whether most of them are going to be written in any case.

        Raises:
            CapacityError: all addresses are in use.
        """
        self._take_back()
        size = _rounded(rows)
        nbytes = size * self.row_bytes
        is_huge = nbytes >= _LARGE and (is_full or self._huge + nbytes <= self._spare)
        for half in self._halves[::-1] if is_huge else self._halves:
            if (found := half.take(size)) is not None:
                break
        else:
            raise CapacityError(
                f"results of {len(self.memory) >> 30} GiB are open or held; drop some of them"
            )
        start, was_kept = found
        with self._counting:
            self._kept -= nbytes * was_kept
            self._used += nbytes
        while self._kept > self._keep and self._used + self._kept > self._spare:
            # What is kept is of other sizes than what is asked for.
            if not self._let_go(self._halves[0].oldest() or self._halves[1].oldest()):
                break
        self._huge += nbytes * (start >= self._middle)
        self.arrived[start : start + size] = False
        return Slab(self, start, size)

    def give_back(self, start: int, rows: int) -> None:
        """Drop a slab, in whichever thread let go of its last array.

        That thread also gives the memory to the system: it is the one that would do so with an
        ordinary array, and the one that places rows must not wait for it.
        """
        nbytes = rows * self.row_bytes
        is_kept = is_counted = False
        # Called by the garbage collector, perhaps in a thread that holds the lock: then not.
        if self._counting.acquire(blocking=False):
            is_counted = True
            self._used -= nbytes
            kept = self._kept + nbytes
            is_kept = kept <= max(self._keep, self._spare - self._used)
            self._kept += nbytes * is_kept
            self._counting.release()
        if not is_kept:
            self._advise(mmap.MADV_DONTNEED, start, rows)
        elif kept > self._keep and hasattr(mmap, "MADV_FREE"):
            # A system that does not know this keeps the pages, and has them back a minute later.
            with contextlib.suppress(OSError):
                self._advise(mmap.MADV_FREE, start, rows)
        self.returned.append((start, rows, is_kept, is_counted))

    def sweep(self, now: float) -> bool:
        """Give memory to the system that nothing has used for a minute, or a part of it.

        Called by the thread that allocates.

        Args:
            now: seconds of the monotonic clock.

        Returns:
            Whether there is more of it.
        """
        self._take_back()
        swept = 0
        while swept < _SWEPT:
            for half in self._halves:
                kept = half.oldest()
                if kept is not None and kept[2] <= now - _KEPT_S:
                    self._let_go(kept)
                    swept += kept[1] * self.row_bytes
                    break
            else:
                return False
        return True

    def _let_go(self, kept: _Kept | None) -> bool:
        """Give the memory of a kept slab to the system; whether there was one."""
        if kept is None:
            return False
        start, rows, _ = kept
        half = self._halves[start >= self._middle]
        half.warm[rows].popleft()
        self._advise(mmap.MADV_DONTNEED, start, rows)
        half.cold.setdefault(rows, []).append(start)
        with self._counting:
            self._kept -= rows * self.row_bytes
        return True

    def _advise(self, advice: int, start: int, rows: int) -> None:
        """Advise the system on the pages that belong to nothing but these rows."""
        page = _PAGE
        if advice == getattr(mmap, "MADV_FREE", None) and start >= self._middle:
            # A part of a huge page would be cut off it.
            page = _HUGE_PAGE
        first = -(-start * self.row_bytes // page) * page
        last = (start + rows) * self.row_bytes // page * page
        if last > first:
            self.memory.madvise(advice, first, last - first)

    def _take_back(self) -> None:
        now = time.monotonic()
        while self.returned:
            start, rows, is_kept, is_counted = self.returned.popleft()
            is_huge = start >= self._middle
            self._huge -= rows * self.row_bytes * is_huge
            if not is_counted:
                with self._counting:
                    self._used -= rows * self.row_bytes
            half = self._halves[is_huge]
            if is_kept:
                half.warm.setdefault(rows, deque()).append((start, rows, now))
            else:
                half.cold.setdefault(rows, []).append(start)


_Kept = tuple[int, int, float]
"""First row of a dropped slab whose memory was kept, its rows, and when it was taken note of."""


class _Half:
    """Rows [start, stop) of a pool: what was never used of them, and what was dropped."""

    def __init__(self, start: int, stop: int) -> None:
        self._end, self._stop = start, stop
        self.warm: dict[int, deque[_Kept]] = {}
        """By rows: dropped slabs whose memory was kept, the oldest first."""
        self.cold: dict[int, list[int]] = {}
        """By rows: first rows of those whose memory was not."""

    def take(self, size: int) -> tuple[int, bool] | None:
        """First row of so many, and whether their memory was kept; None where there are none."""
        if self.warm.get(size):
            return self.warm[size].pop()[0], True
        if self.cold.get(size):
            return self.cold[size].pop(), False
        if self._end + size > self._stop:
            return None
        self._end += size
        return self._end - size, False

    def oldest(self) -> _Kept | None:
        """Of the slabs whose memory was kept, the one that was dropped first."""
        return min((kept[0] for kept in self.warm.values() if kept), key=_when, default=None)


def _when(kept: _Kept) -> float:
    return kept[2]


def _reserve(row_bytes: int) -> mmap.mmap:
    """As many addresses as the process may have, in whole rows."""
    nbytes = min(_RESERVE, _ROWS * row_bytes)
    while True:
        try:
            return _mapped(nbytes // row_bytes * row_bytes)
        except OSError:
            # A limit on addresses (`ulimit -v`), or a kernel that does not overcommit.
            nbytes //= 4
            if nbytes < _LEAST:
                raise


def _mapped(nbytes: int) -> mmap.mmap:
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
    return mmap.mmap(-1, nbytes, flags=flags)


def _rounded(rows: int) -> int:
    """Up to a size with three leading bits, so that freed slabs fit the next request."""
    step = 1 << max(0, rows.bit_length() - 3)
    return -(-rows // step) * step
