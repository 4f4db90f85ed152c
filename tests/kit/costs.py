"""What work costs in processor time, and whether that is too much for this machine as it is."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["Cost", "cost"]

_YARDSTICK_S = 0.007
"""Of `_yardstick`, on an idle core."""


class Cost:
    """Processor time of a block, once that has ended."""

    seconds = float("nan")

    def is_at_most(self, seconds: float) -> bool:
        """Whether it stays below some seconds of an idle core, or as much of this one as it is now.

        Args:
            seconds: allowed; give five times of what is usual, or more.
        """
        return self.seconds < seconds or self.seconds < seconds * _slowness()


@contextmanager
def cost() -> Iterator[Cost]:
    """Measure a block; what others left in this process is not collected on its account."""
    found = Cost()
    gc.disable()
    began = time.process_time()
    try:
        yield found
    finally:
        found.seconds = time.process_time() - began
        gc.enable()


def _slowness() -> float:
    began = time.process_time()
    _yardstick()
    return (time.process_time() - began) / _YARDSTICK_S


def _yardstick() -> int:
    return sum(len(str(i)) for i in range(100_000))
