"""What a user sees while a server of ours starts: seconds, in the footer of Inspect's display."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Awaitable, Callable

import anyio
from inspect_ai.util import display_counter

from inspect_lens.model._host import VLLMServer

__all__ = ["while_telling"]

CAPTION = "vLLM server"
EVERY_S = 1.0

_told: set[int] = set()
"""Ids of records whose start is being shown: all samples wait for one server, and one shows it."""


async def while_telling(server: VLLMServer, start: Callable[[], Awaitable[None]]) -> None:
    """Wait for a server, and show that it is on its way.

    Loading a large model and compiling it take minutes, in which no sample moves.

    Args:
        server: record of the server.
        start: starts it, or waits for whoever does.
    """
    if id(server) in _told:
        await start()
        return
    _told.add(id(server))
    began = time.monotonic()
    failure: Exception | None = None
    try:
        async with anyio.create_task_group() as group:
            group.start_soon(_tick, began)
            try:
                await start()
            except Exception as error:  # noqa: BLE001 (raised below, and not in a group of one)
                failure = error
            group.cancel_scope.cancel()
    finally:
        _told.discard(id(server))
    if failure is not None:
        _show("did not start")
        raise failure
    _show(f"started in {time.monotonic() - began:.0f} s")


async def _tick(began: float) -> None:
    while True:
        _show(f"starts, {time.monotonic() - began:.0f} s")
        await anyio.sleep(EVERY_S)


def _show(said: str) -> None:
    # Outside an eval, Inspect's full-screen display raises: it has nothing to draw on. No call may
    # fail for want of a counter.
    with contextlib.suppress(Exception):
        display_counter(CAPTION, said)
