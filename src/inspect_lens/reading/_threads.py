"""Threads that read and score rows, a few at once: the event loop is for everybody."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TypeVar

import anyio.to_thread
from anyio import CapacityLimiter
from anyio.lowlevel import RunVar

__all__ = ["in_thread"]

_MOST = 8
_limiters: RunVar[CapacityLimiter] = RunVar("inspect_lens_readers")

Made = TypeVar("Made")


async def in_thread(work: Callable[[], Made]) -> Made:
    """Do what reads files or multiplies rows in a thread.

    Calls that end together would start as many threads as Inspect allows, and all take the
    interpreter from the event loop.
    """
    try:
        limiter = _limiters.get()
    except LookupError:
        _limiters.set(limiter := CapacityLimiter(min(_MOST, os.cpu_count() or 1)))
    return await anyio.to_thread.run_sync(work, limiter=limiter)
