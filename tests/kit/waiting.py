"""Wait for what another thread or process does."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import anyio

__all__ = ["soon", "until"]


def until(is_so: Callable[[], Any], timeout_s: float = 60.0) -> bool:
    """Whether something becomes true in time.

    Args:
        is_so: asked again and again.
        timeout_s: seconds to wait at most; long, as whoever waits for it in vain has failed anyway.
    """
    deadline = time.monotonic() + timeout_s
    while not is_so() and time.monotonic() < deadline:
        time.sleep(0.005)
    return bool(is_so())


async def soon(is_so: Callable[[], Any], timeout_s: float = 60.0) -> bool:
    """The same in an event loop, which goes on meanwhile."""
    deadline = time.monotonic() + timeout_s
    while not is_so() and time.monotonic() < deadline:
        await anyio.sleep(0.005)
    return bool(is_so())
