"""Which rows of the capture ring a step may fill, while those of earlier steps are copied out.

The ring is cut into equal parts. A step, or a round of some that repeat, takes as many as it needs,
in turn, so that a small step behind a large one does not wait for the large one's copies: it goes
on in parts that were copied out long ago. A step's parts lie in one half of the ring, so what a
step takes is never what the step before it took, whatever their sizes: one can be copied out while
the next one runs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .device_copy import Copier


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive parts of the ring that a step or a few fill; none where no rows are kept."""

    first_row: int = 0
    parts: range = range(0)


_NONE = Span()


class Ring:
    """Hands out spans in turn, and has the device wait for the copies out of them."""

    def __init__(
        self, parts: int, part_rows: int, copier: Copier, drain: Callable[[], None] = lambda: None
    ) -> None:
        self._parts = parts
        self._part_rows = part_rows
        self._half = max(1, parts // 2)
        self._copier = copier
        self._drain = drain
        self._taken: set[int] = set()
        """Parts that were not given back."""
        self._next = 0
        self._released = [0] * parts
        """By part: the number of the span that gave it back last, or 0."""
        self._spans = 0

    @property
    def most_rows(self) -> int:
        """Rows of the largest span."""
        return self._half * self._part_rows

    def take(self, rows: int) -> Span:
        """A span for a step or a few, from the next part on, or the next half where it has to."""
        if not rows:
            return _NONE
        n = -(-rows // self._part_rows)
        if n > self._half:
            raise OverflowError(f"a step fills {rows} ring rows and may fill {self.most_rows}")
        first = self._next
        if first % self._half + n > self._half:
            first = (first // self._half + 1) * self._half % self._parts
        self._next = (first + n) % self._parts
        parts = range(first, first + n)
        if not self._taken.isdisjoint(parts):
            self._drain()
        self._taken.update(parts)
        # Copies are made in order: behind those of the part that was given back last there are
        # none out of the others. Of one that never was, there are none at all.
        last = max(parts, key=self._released.__getitem__)
        if self._released[last]:
            self._copier.wait_for(last)
        return Span(first * self._part_rows, parts)

    def release(self, span: Span) -> None:
        """Take a span back when all copies out of it have been asked for."""
        self._spans += 1
        self._taken.difference_update(span.parts)
        for part in span.parts:
            self._copier.release(part)
            self._released[part] = self._spans
