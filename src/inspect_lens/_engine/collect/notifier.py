"""Tells those who wait for rows that something has come."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

logger = logging.getLogger("vllm.inspect_lens")


class Notifier:
    """Threads wait on it, and others are called; while anybody does, rows are hurried."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        """Held by whoever reads or changes what requests have."""
        self.hurry = threading.Event()
        """Set while somebody waits for rows, or reads scores as they come."""
        self.n_waiting = 0
        """Who waits or watches."""
        self._watchers: list[Callable[[], None]] = []

    def wait_for(self, is_ready: Callable[[], bool], timeout_s: float, every_s: float) -> bool:
        """Wait until something is so; the lock is held, and let go of meanwhile."""
        if is_ready():
            self.calm()
            return True
        deadline = time.monotonic() + timeout_s
        self.n_waiting += 1
        self.hurry.set()
        try:
            while (now := time.monotonic()) < deadline:
                self.changed.wait(min(deadline - now, every_s))
                if is_ready():
                    return True
            return False
        finally:
            self.n_waiting -= 1
            self.calm()

    def watch(self, call: Callable[[], None]) -> None:
        """Have something called whenever anything has come, until `unwatch`."""
        with self.changed:
            self._watchers.append(call)
            self.n_waiting += 1
            self.hurry.set()

    def unwatch(self, call: Callable[[], None]) -> None:
        """Undo `watch`."""
        with self.changed:
            self._watchers.remove(call)
            self.n_waiting -= 1
            self.calm()

    def tell(self) -> None:
        """Something has come; the lock is held."""
        self.changed.notify_all()
        for call in tuple(self._watchers):
            try:
                call()
            except BaseException:
                # All results come by this thread. Who watches looks again by itself, too.
                logger.exception("inspect_lens: somebody could not be told of results")

    def calm(self) -> None:
        """Let rows take their time if nobody waits any more."""
        # A batch that ends at once is taken request by request: clearing takes longer than a look.
        if not self.n_waiting and self.hurry.is_set():
            self.hurry.clear()
