"""Which rows of a pool are free: those that were never used, and those of dropped slabs."""

from __future__ import annotations

from collections import deque

__all__ = ["FreeRows", "Kept", "rounded", "when"]

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
