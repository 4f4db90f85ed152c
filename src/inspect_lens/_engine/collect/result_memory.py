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
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from inspect_lens.errors import CapacityError

__all__ = [
    "SHARE_BYTES",
    "Budget",
    "FreeRows",
    "Kept",
    "Slab",
    "SlabPool",
    "memory_bytes",
    "rounded",
    "when",
]

Kept = tuple[int, int, float]
"""First row of a dropped slab whose memory was kept, its rows, and when it was taken note of."""


class FreeRows:
    """Rows [start, stop) of a pool: what was never used of them, and what was dropped."""

    def __init__(self, start: int, stop: int) -> None:
        self._end, self._stop = start, stop
        self.warm: dict[int, deque[Kept]] = {}
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

    def oldest(self) -> Kept | None:
        """Of the slabs whose memory was kept, the one that was dropped first."""
        return min((kept[0] for kept in self.warm.values() if kept), key=when, default=None)


def when(kept: Kept) -> float:
    """Second from which on rows were kept."""
    return kept[2]


def rounded(rows: int) -> int:
    """Up to a size with three leading bits, so that freed slabs fit the next request."""
    step = 1 << max(0, rows.bit_length() - 3)
    return -(-rows // step) * step


SHARE_BYTES = 4 << 20
"""Rows of more bytes are copied by several threads."""

_RESERVE = 1 << 45
"""Bytes of addresses, 32 TiB of the 128 that a process has."""
_SLABS = 1 << 10
"""Of which each slab, at most, takes as many addresses as leave room for so many of them."""
_LEAST = 1 << 32
_ROWS = 1 << 34
"""Rows of a pool at most: each has flags, and narrow rows would need more of them than room."""
_PAGE = mmap.PAGESIZE
_HUGE_PAGE = 1 << 21
_LARGE = 4 * _HUGE_PAGE
"""Bytes of a slab that is worth huge pages; those at its ends it shares with its neighbours."""
_FEW_FLAGS = 1 << 16
_KEPT_S = 60.0
"""Seconds after which memory of dropped slabs begins to go back to the system."""
_SWEPT = 64 << 20
"""Bytes that go back in one go, or one slab: the thread that does it also places rows."""
_FREE: int | None = getattr(mmap, "MADV_FREE", None)


class Budget:
    """How much memory the pools of one process use, and keep of what was dropped."""

    def __init__(self, keep_bytes: int, spare_bytes: int = 0) -> None:
        """Begin with nothing."""
        self.keep, self.spare = keep_bytes, spare_bytes
        self.used = 0
        """Bytes of the slabs in use, were they full."""
        self.huge = 0
        """Of these, bytes of slabs that have huge pages."""
        self.kept = 0
        """Bytes of dropped slabs whose memory was kept."""
        self.lock = threading.Lock()
        """Of `used` and `kept`, which any thread changes that drops a slab."""
        self.pools: list[SlabPool] = []
        self._pid = os.getpid()

    @property
    def is_here(self) -> bool:
        """Whether this is the process that allocates, and gives kept memory back: no fork of it."""
        return os.getpid() == self._pid

    def dropped(self, nbytes: int) -> tuple[bool, bool]:
        """Note that a slab was dropped; called in any thread."""
        self.used -= nbytes
        kept = self.kept + nbytes
        is_kept = self.is_here and kept <= max(self.keep, self.spare - self.used)
        self.kept += nbytes * is_kept
        return is_kept, is_kept and kept > self.keep

    def trim(self) -> None:
        """Give memory of dropped slabs back until what is in use leaves room for the rest."""
        while self.kept > self.keep and self.used + self.kept > self.spare:
            self._take_back()
            if (oldest := self._oldest()) is None:
                return
            oldest[0].let_go(oldest[1])

    def sweep(self, now: float) -> bool:
        """Give memory to the system that nothing has used for a minute, or a part of it.

        Called by the thread that allocates.
        """
        self._take_back()
        swept = 0
        while swept < _SWEPT:
            oldest = self._oldest()
            if oldest is None or oldest[1][2] > now - _KEPT_S:
                return False
            swept += oldest[0].let_go(oldest[1])
        return True

    def _take_back(self) -> None:
        for pool in self.pools:
            pool.take_back()

    def _oldest(self) -> tuple[SlabPool, Kept] | None:
        """Of the slabs whose memory was kept, the one that was dropped first."""
        found = [(pool, kept) for pool in self.pools if (kept := pool.oldest()) is not None]
        return min(found, key=lambda pair: pair[1][2], default=None)


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

    def has_arrived(self, rows: int) -> bool:
        """Whether the first rows have all been written."""
        # A tenth of what slices of `arrived` take.
        return self._pool.flags.find(b"\0", self.start, self.start + rows) < 0

    @property
    def covered(self) -> NDArray[np.bool_]:
        """(rows,); whether a later row stands for each; not cleared for a new slab."""
        return self._pool.covered[self.start : self.start + self.size]

    def clear_covered(self) -> None:
        """Take no later row to stand for any."""
        _clear(self._pool.covered, self.start, self.size)

    def array(self, dtype: np.dtype[Any], shape: tuple[int, ...] | None = None) -> NDArray[Any]:
        """The rows, flat or in a shape of which they are the first part; keeps the slab alive."""
        buffer = cast("Any", self._buffer)
        if shape is None:
            return np.frombuffer(buffer, dtype=dtype)
        return np.ndarray(shape, dtype, buffer)


class SlabPool:
    """Slabs of rows of one width. One thread allocates; any thread may drop a slab."""

    def __init__(self, row_bytes: int, budget: Budget) -> None:
        """Reserve addresses."""
        self.row_bytes = row_bytes
        self._budget = budget
        self.memory = _reserve(row_bytes)
        most = len(self.memory) // row_bytes
        middle = len(self.memory) // (2 * _HUGE_PAGE) * _HUGE_PAGE
        with contextlib.suppress(AttributeError, OSError):  # not every system has them
            self.memory.madvise(mmap.MADV_HUGEPAGE, middle, len(self.memory) - middle)
        self._middle = -(-middle // row_bytes)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        # Rows are opaque: only their place matters here.
        row = np.dtype((np.void, row_bytes))
        self.rows: NDArray[np.void] = np.frombuffer(self.memory, dtype=row)
        self.flags = _mapped(most)
        self.arrived: NDArray[np.bool_] = np.frombuffer(self.flags, dtype=np.bool_)
        self.returned: deque[tuple[int, int, bool, bool]] = deque()
        """(start, rows, whether their memory was kept and they were counted) of dropped slabs."""
        self._halves = (FreeRows(0, self._middle), FreeRows(self._middle, most))
        """Without, and with huge pages."""
        budget.pools.append(self)

    @cached_property
    def covered(self) -> NDArray[np.bool_]:
        """(rows,); only results that are reduced on their way need it."""
        return np.frombuffer(_mapped(len(self.arrived)), dtype=np.bool_)

    @property
    def most_rows(self) -> int:
        """Rows of a slab that leaves others their room."""
        return len(self.rows) // _SLABS

    def take(self, rows: int, *, is_full: bool = False) -> Slab:
        """A slab of at least this many rows, none of which has arrived."""
        self.take_back()
        budget, size = self._budget, rounded(rows)
        nbytes = size * self.row_bytes
        is_huge = nbytes >= _LARGE and (is_full or budget.huge + nbytes <= budget.spare)
        for half in self._halves[::-1] if is_huge else self._halves:
            if (found := half.take(size)) is not None:
                break
        else:
            raise CapacityError(
                f"results of {len(self.memory) >> 30} GiB are open or held; drop some of them"
            )
        start, was_kept = found
        with budget.lock:
            budget.kept -= nbytes * was_kept
            budget.used += nbytes
        budget.huge += nbytes * (start >= self._middle)
        _clear(self.arrived, start, size)
        slab = Slab(self, start, size)
        # What is kept may be of other sizes than what is asked for.
        budget.trim()
        return slab

    def write(
        self,
        rows: NDArray[Any],
        where: NDArray[np.int64],
        threads: ThreadPoolExecutor,
        n_threads: int,
    ) -> None:
        """Put rows where they belong; who calls this notes that they have come."""
        n = len(where)
        parts = min(n_threads, n) if n * self.row_bytes > SHARE_BYTES else 1
        cuts = [n * k // parts for k in range(parts + 1)]

        def copy(a: int, b: int) -> None:
            self.rows[where[a:b]] = rows[a:b]

        if parts == 1:
            copy(0, n)
        else:
            list(threads.map(copy, cuts[:-1], cuts[1:]))

    def give_back(self, start: int, rows: int) -> None:
        """Drop a slab, in whichever thread let go of its last array.

        That thread also gives the memory to the system: it is the one that would do so with an
        ordinary array, and the one that places rows must not wait for it.
        """
        budget = self._budget
        is_kept = is_lent = is_counted = False
        # Called by the garbage collector, perhaps in a thread that holds the lock: then not.
        if budget.lock.acquire(blocking=False):
            is_counted = True
            is_kept, is_lent = budget.dropped(rows * self.row_bytes)
            budget.lock.release()
        if not is_kept:
            self._advise(mmap.MADV_DONTNEED, start, rows)
        elif is_lent and _FREE is not None:
            self._advise(_FREE, start, rows)
        # Only now may the slab be used again: what is written afterwards must not go.
        self.returned.append((start, rows, is_kept, is_counted))

    def let_go(self, kept: Kept) -> int:
        """Give the memory of a kept slab, the oldest, to the system; returns its bytes."""
        start, rows, _ = kept
        half, nbytes = self._halves[start >= self._middle], rows * self.row_bytes
        half.warm[rows].popleft()
        half.cold.setdefault(rows, []).append(start)
        with self._budget.lock:
            self._budget.kept -= nbytes
        self._advise(mmap.MADV_DONTNEED, start, rows)
        return nbytes

    def oldest(self) -> Kept | None:
        """Of the slabs whose memory was kept, the one that was dropped first."""
        found = [kept for half in self._halves if (kept := half.oldest()) is not None]
        return min(found, key=when, default=None)

    def _advise(self, advice: int, start: int, rows: int) -> None:
        """Advise the system on the pages that belong to nothing but these rows.

        A system that refuses, as it does with pages that are locked, keeps them: what is in them
        is never read before it is written.
        """
        page = _PAGE
        if advice == _FREE and start >= self._middle:
            # A part of a huge page would be cut off it.
            page = _HUGE_PAGE
        first = -(-(self._address + start * self.row_bytes) // page) * page
        last = (self._address + (start + rows) * self.row_bytes) // page * page
        if last > first:
            # Without the interpreter's lock, unlike `mmap.madvise`: gigabytes take a while.
            _madvise(first, last - first, advice)

    def take_back(self) -> None:
        """Take note of the slabs that were dropped; called by the thread that allocates."""
        now, budget = time.monotonic(), self._budget
        while self.returned:
            start, rows, is_kept, is_counted = self.returned.popleft()
            nbytes, is_huge = rows * self.row_bytes, start >= self._middle
            budget.huge -= nbytes * is_huge
            if not is_counted:
                with budget.lock:
                    budget.used -= nbytes
            half = self._halves[is_huge]
            if is_kept:
                half.warm.setdefault(rows, deque()).append((start, rows, now))
            else:
                half.cold.setdefault(rows, []).append(start)


def _madvise(address: int, nbytes: int, advice: int) -> bool:
    """Whether the system took the advice."""
    code: int = _LIBC.madvise(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), advice)
    return code == 0


_LIBC = ctypes.CDLL(None)


def _clear(flags: NDArray[np.bool_], start: int, size: int) -> None:
    """Clear flags of which most may never have been set: those take no memory."""
    stop = start + size
    if size < _FEW_FLAGS:
        flags[start:stop] = False
        return
    address = flags.ctypes.data
    first = -(-(address + start) // _PAGE) * _PAGE - address
    last = (address + stop) // _PAGE * _PAGE - address
    flags[start:first] = flags[last:stop] = False
    if not _madvise(address + first, last - first, mmap.MADV_DONTNEED):
        flags[first:last] = False  # pages that are locked stay as they are


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
                raise CapacityError(
                    f"this process has no addresses left for rows of {row_bytes} bytes: results of "
                    "too many widths have been asked for since it started; restart it, or raise "
                    "its limit on addresses (ulimit -v)"
                ) from None


def _mapped(nbytes: int) -> mmap.mmap:
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
    return mmap.mmap(-1, nbytes, flags=flags)


def memory_bytes(root: Path = Path("/")) -> int:
    """Memory of this machine, or of the container or batch job that the process is in."""
    found = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for path in _limits(root):
        with contextlib.suppress(OSError, ValueError):  # "max" where there is no limit
            found = min(found, int(path.read_text()))
    return found


def _limits(root: Path) -> Iterator[Path]:
    """Files that may hold a limit: of the process's group and of those that it lies in."""
    groups = root / "sys/fs/cgroup"
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, kinds, path = line.split(":", 2)
        if not kinds:
            base, name = groups, "memory.max"
        elif "memory" in kinds.split(","):
            base, name = groups / "memory", "memory.limit_in_bytes"
        else:
            continue
        own = base / path.lstrip("/")
        # Within a container the path is often that of the host, and the limit lies at the base.
        for folder in (own, *own.parents):
            yield folder / name
            if folder == base:
                break
