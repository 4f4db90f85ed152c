"""Wait for what another thread or process does."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

__all__ = ["until"]


def until(is_so: Callable[[], Any], timeout_s: float = 10.0) -> bool:
    """Whether something becomes true in time.

    Args:
        is_so: asked again and again.
        timeout_s: seconds to wait at most.
    """
    deadline = time.monotonic() + timeout_s
    while not is_so() and time.monotonic() < deadline:
        time.sleep(0.005)
    return bool(is_so())
