"""Ends requests whose worker has gone: their next token would never come."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import AsyncGenerator, Mapping
from typing import Any

from inspect_lens._engine.collect.collector import Collector
from inspect_lens._vllm.compat.features import busy
from inspect_lens._vllm.metrics import failed
from inspect_lens.errors import CapacityError, CaptureError, LensError

logger = logging.getLogger("vllm.inspect_lens")

_CHOSEN_S = 1.0


class Running:
    """Where callers wait for the outputs of requests, by key."""

    def __init__(self) -> None:
        self._queues: dict[str, tuple[asyncio.AbstractEventLoop, Any]] = {}
        self._lock = threading.Lock()
        self._has_far_workers = False
        self.routes: Mapping[str, Any] = {}
        """Which engine has each request, where there are several; see `routes_of`."""
        self._gone: dict[Any, LensError] = {}
        """Engines that have lost a worker, and how: vLLM may send them requests still."""

    def listen(self, collector: Collector) -> None:
        """Hear of workers on other hosts that go, and of those that come back."""
        collector.ends, collector.came = self.end, self._gone.clear
        self._has_far_workers = collector.listener is not None

    def watch(self, key: str, queue: Any) -> None:
        """Take note of a request that has begun; called in its event loop."""
        if queue is None or not self._has_far_workers:
            return
        loop = asyncio.get_running_loop()
        with self._lock:
            self._queues[key] = loop, queue
        if self._gone:
            # By then vLLM has chosen an engine for it.
            loop.call_later(_CHOSEN_S, self._end_if_gone)

    def forget(self, key: str) -> None:
        """Take note that it is over."""
        with self._lock:
            self._queues.pop(key, None)

    def end(self, failed: Mapping[str, LensError]) -> None:
        """Have requests end with an error, and all others of their engines; from any thread."""
        for key, error in failed.items():
            if (engine := self.routes.get(key)) is not None:
                self._gone[engine] = error
            self._end(key, error)
        self._end_if_gone()

    def _end_if_gone(self) -> None:
        with self._lock:
            keys = list(self._queues)
        for key in keys:
            if (error := self._gone.get(self.routes.get(key))) is not None:
                self._end(key, error)

    def _end(self, key: str, error: LensError) -> None:
        with self._lock:
            found = self._queues.pop(key, None)
        if found is None:
            return
        loop, queue = found
        try:
            loop.call_soon_threadsafe(queue.put, failed(error))
        except RuntimeError:
            logger.debug("inspect_lens: nobody waits for request %s any more", key)


async def named(outputs: AsyncGenerator[Any, None]) -> AsyncGenerator[Any, None]:
    """Outputs as they come, and our own error where vLLM wraps it in one without a word.

    It does so with all that is raised while a request is taken in, or waits: a name was removed
    since it was judged, or a worker has gone.
    """
    async with contextlib.aclosing(outputs):
        try:
            async for output in outputs:
                yield output
        except Exception as error:
            ours = error.__cause__
            if isinstance(ours, CaptureError):
                raise CaptureError(f"{CaptureError.__name__}: {ours}") from ours
            if isinstance(ours, CapacityError):
                raise busy(str(ours)) from ours
            if isinstance(ours, LensError):
                raise ours from None
            raise
