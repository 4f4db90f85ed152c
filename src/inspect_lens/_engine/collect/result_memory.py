"""Memory for results of all widths: one range of addresses, so that one call places a step's rows.

A step of a thousand requests brings a thousand rows that belong into a thousand results. Copied
one by one they would cost more Python than the step has time for. So a result is a slab of one
large anonymous mapping, and rows are placed by a fancy assignment to an array of rows over all of
it, which numpy carries out without holding the interpreter's lock.

The mapping reserves addresses only; memory is taken when a row is written. A slab is given back
when the last array that looks at it is gone. Its memory stays for the next slabs for a minute, as
far as a bound for all of them allows: to fault gigabytes of pages in again, which the system fills
with zeros first, takes longer than to copy rows into them.

The second half of the addresses has huge pages, since gigabytes of rows are a million faults in
pages of 4 KiB. A result that may become long, and does not, is a few rows at each layer, far from
one another, and each of them would take 2 MiB. So such slabs lie there only while all that is in
use, were it full, would not take more than the bound.
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
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from inspect_lens._engine.protocol.readouts import Readout
from inspect_lens.errors import CapacityError
from inspect_lens.spec import TensorData

ARRIVED, COVERED = 1, 3
"""Flags of a row: it has come; and a later row stands for it."""

_RESERVE = 1 << 43
"""Bytes of addresses, 8 TiB of the 128 that a process has; less where that many are refused."""
_LEAST_RESERVE = 1 << 28
_SLABS = 1 << 9
"""A slab takes as many addresses, at most, as leave room for so many of them."""
_LEAST_SLAB = 1 << 8
_PAGE, _HUGE_PAGE = mmap.PAGESIZE, 1 << 21
_LARGE = 4 * _HUGE_PAGE
"""Bytes of a slab that is worth huge pages; those at its ends it shares with its neighbours."""
_FEW_FLAGS = 1 << 16
_KEPT_LEAST = 1 << 30
"""Bytes of dropped slabs whose memory is kept, however much is in use."""
_KEPT_S = 60.0
"""Seconds after which it begins to go back to the system."""
_SWEPT = 128 << 20
"""Bytes that go back in one go, or one slab: the thread that does it also places rows."""


class Slab:
    """Consecutive rows, and a flag for each."""

    def __init__(
        self, memory: ResultMemory, start: int, nbytes: int, rows: int, row_bytes: int
    ) -> None:
        self.memory, self.row_bytes = memory, row_bytes
        self.first_row = -(-start // row_bytes)
        """Index of its first row in `ResultMemory.rows` of its width."""
        self.first_flag = (self.first_row + rows) * row_bytes
        """Index of its first flag in `ResultMemory.content`."""
        self._rows = rows
        # The buffer is held by every array made of it, however many views lie between.
        at = self.first_row * row_bytes
        self._buffer = (ctypes.c_char * (rows * row_bytes)).from_buffer(memory.mapped, at)
        weakref.finalize(self._buffer, memory.give_back, start, nbytes).atexit = False

    @property
    def flags(self) -> NDArray[np.uint8]:
        """(rows,); 0, `ARRIVED` or `COVERED`."""
        return self.memory.content[self.first_flag : self.first_flag + self._rows]

    def has_arrived(self, rows: int) -> bool:
        """Whether the first rows have all been written."""
        # A tenth of what slices of `flags` take.
        return self.memory.mapped.find(b"\0", self.first_flag, self.first_flag + rows) < 0

    def array(self, dtype: np.dtype[Any], shape: tuple[int, ...]) -> NDArray[Any]:
        """The rows in a shape of which they are the first part; keeps the slab alive."""
        return np.ndarray(shape, dtype, cast("Any", self._buffer))


class ResultMemory:
    """Slabs of rows of any width. Any thread may take or drop one."""

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self.used = 0
        """Bytes of the slabs in use, were they full."""
        self.kept = 0
        """Bytes of dropped slabs whose memory was kept."""
        self.mapped = _reserve()
        self.content: NDArray[np.uint8] = np.frombuffer(self.mapped, dtype=np.uint8)
        middle = len(self.mapped) // (2 * _HUGE_PAGE) * _HUGE_PAGE
        with contextlib.suppress(AttributeError, OSError):  # not every system has them
            self.mapped.madvise(mmap.MADV_HUGEPAGE, middle, len(self.mapped) - middle)
        self._middle = middle
        self._fresh = [0, middle]
        """Of each half, the first byte that no slab has had."""
        self._free: dict[tuple[bool, int], deque[int]] = {}
        """By half and bytes: where dropped slabs begin; those whose memory was kept at the end, the
        latest last."""
        self._warm: dict[int, tuple[int, float]] = {}
        """Bytes of these, and when they were dropped; the oldest first."""
        self._returned: deque[tuple[int, int, bool, bool]] = deque()
        """Where dropped slabs begin, their bytes, and whether they were kept and counted."""
        self._lock = threading.Lock()

    def rows(self, row_bytes: int) -> NDArray[np.void]:
        """All rows of a width; opaque, as only their place matters."""
        return np.frombuffer(
            self.mapped, np.dtype((np.void, row_bytes)), len(self.mapped) // row_bytes
        )

    def most_rows(self, row_bytes: int) -> int:
        """Rows of a slab that leaves others their room."""
        return len(self.mapped) // _SLABS // (row_bytes + 1)

    def take(self, rows: int, row_bytes: int, *, is_full: bool = False) -> Slab:
        """A slab of so many rows, none of which has arrived."""
        # Rows begin at a multiple of their width.
        nbytes = _rounded(max(rows * (row_bytes + 1) + row_bytes, _LEAST_SLAB))
        with self._lock:
            is_huge = nbytes >= _LARGE and (is_full or self.used + nbytes <= self.most_bytes)
            found = self._find(is_huge, nbytes) or self._find(not is_huge, nbytes)
            if found is None:
                raise CapacityError(
                    f"results of {len(self.mapped) >> 30} GiB are open or held; drop some of them"
                )
            start, nbytes = found
            self.used += nbytes
            self._let_go_of_most()
        slab = Slab(self, start, nbytes, rows, row_bytes)
        _clear(slab.flags)
        return slab

    def take_back(self) -> None:
        """Let slabs that were dropped be taken again.

        Only the thread that places rows may call it: what it is placing may belong to a request
        that has just ended, and must not come to lie in another one's result.
        """
        with self._lock:
            now = time.monotonic()
            while self._returned:
                start, nbytes, is_kept, is_counted = self._returned.popleft()
                self.used -= 0 if is_counted else nbytes
                free = self._free.setdefault((start >= self._middle, nbytes), deque())
                if is_kept:
                    free.append(start)
                    self._warm[start] = nbytes, now
                else:
                    free.appendleft(start)
            self._let_go_of_most()

    def give_back(self, start: int, nbytes: int) -> None:
        """Drop a slab, in whichever thread let go of its last array.

        That thread also gives the memory to the system: it is the one that would do so with an
        ordinary array, and the one that places rows must not wait for it.
        """
        is_kept = False
        # Called by the garbage collector, perhaps in a thread that holds the lock: then not.
        if is_counted := self._lock.acquire(blocking=False):
            self.used -= nbytes
            is_kept = self.kept + nbytes <= self._most_kept
            self.kept += nbytes * is_kept
            self._lock.release()
        if not is_kept:
            _discard(self.content[start : start + nbytes])
        # Only now may the slab be used again: what is written afterwards must not go.
        self._returned.append((start, nbytes, is_kept, is_counted))

    def sweep(self, now: float) -> None:
        """Give back memory unused for a minute, or a part; for the thread that places rows."""
        self.take_back()
        with self._lock:
            least = self.kept - _SWEPT
            while self.kept > least and self._warm:
                if next(iter(self._warm.values()))[1] > now - _KEPT_S:
                    return
                self._let_go()

    @property
    def _most_kept(self) -> int:
        return max(_KEPT_LEAST, self.most_bytes - self.used)

    def _find(self, is_huge: bool, nbytes: int) -> tuple[int, int] | None:
        """Where a slab may begin, and its bytes; the lock is held."""
        first, end = self._fresh[is_huge], len(self.mapped) if is_huge else self._middle
        if not self._free.get((is_huge, nbytes)):
            if first + nbytes <= end:
                self._fresh[is_huge] += nbytes
                return first, nbytes
            larger = [n for (half, n), free in self._free.items() if half == is_huge and free]
            nbytes = min((n for n in larger if n > nbytes), default=0)
            if not nbytes:
                return None
        start = self._free[is_huge, nbytes].pop()
        self.kept -= self._warm.pop(start, (0, 0.0))[0]
        return start, nbytes

    def _let_go_of_most(self) -> None:
        """Keep no more than may be kept, of what `take_back` has seen; the lock is held."""
        while self._warm and self.kept > self._most_kept:
            self._let_go()

    def _let_go(self) -> None:
        """Give the memory of the slab to the system that was kept longest; the lock is held."""
        start = next(iter(self._warm))
        nbytes, _ = self._warm.pop(start)
        self.kept -= nbytes
        _discard(self.content[start : start + nbytes])


def _rounded(nbytes: int) -> int:
    """Up to a size with four leading bits, so that freed slabs fit the next request."""
    step = 1 << max(0, nbytes.bit_length() - 4)
    return -(-nbytes // step) * step


_LIBC = ctypes.CDLL(None)


def _discard(content: NDArray[np.uint8]) -> tuple[int, int]:
    """Give whole pages to the system, which then read as zero; returns which bytes these are."""
    address = content.ctypes.data
    first = -(-address // _PAGE) * _PAGE - address
    last = (address + len(content)) // _PAGE * _PAGE - address
    if last <= first:
        return 0, 0
    # Without the interpreter's lock, unlike `mmap.madvise`: gigabytes take a while.
    where, size = ctypes.c_void_p(address + first), ctypes.c_size_t(last - first)
    refused: int = _LIBC.madvise(where, size, mmap.MADV_DONTNEED)
    return (0, 0) if refused else (first, last)


def _clear(flags: NDArray[np.uint8]) -> None:
    """Clear flags of which most may never have been set: those take no memory."""
    first, last = (0, 0) if len(flags) < _FEW_FLAGS else _discard(flags)
    flags[:first] = flags[last:] = 0


def _reserve() -> mmap.mmap:
    """As many addresses as the process may have."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
    nbytes = _RESERVE
    while nbytes >= _LEAST_RESERVE:
        with contextlib.suppress(OSError):
            return mmap.mmap(-1, nbytes, flags=flags)
        # A limit on addresses (`ulimit -v`), or a kernel that does not overcommit.
        nbytes //= 4
    raise CapacityError(
        f"this process cannot have {_LEAST_RESERVE >> 20} MiB of addresses for results; raise its "
        "limit on addresses (ulimit -v)"
    )


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

    def further(self, since: int, count: int) -> NDArray[Any]:
        """Of the first positions the rows that have come without a gap behind the first `since`.

        They are where they lie, and keep the slab alive.
        """
        if self.slab is None:
            return np.zeros((self.taps, 0, self.width), dtype=_DTYPES[self.dtype])
        flags = self._flags(self.slab, self.room)[:, since:count]
        n = flags.shape[1]
        if not flags.all():
            n = int(flags.all(axis=0).argmin())
        return self._come(self._whole(self.slab)[:, since : since + n])

    def has_further(self, since: int, count: int) -> bool:
        """Whether the first positions have come at all taps, of which the first `since` have."""
        if self.slab is None or count > self.room:
            return count <= since
        return bool(self._flags(self.slab, self.room)[:, since:count].all())

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
