"""One result of a running request: where its rows lie, and which of them have come."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from inspect_lens.spec import TensorData

from ._capture import CaptureEnvelope
from ._merge import merge_of
from ._probes import ProbesEnvelope
from ._slabs import SHARE_BYTES, Slab, SlabPool

__all__ = ["STORAGE", "Stream"]

STORAGE: dict[str, str] = {"float32": "<f4", "float16": "<f2", "bfloat16": "<u2"}
_DTYPES: dict[str, np.dtype[Any]] = {name: np.dtype(code) for name, code in STORAGE.items()}


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

    @property
    def is_plain(self) -> bool:
        """Whether the rows that come are the result."""
        return self.merge is None and not self.n_head

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

        All positions of a plain result lie where their rows do, whether or not these have come.
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
