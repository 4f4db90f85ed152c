"""Threads beside requests: begun when they are first needed, and ended by no fault."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

logger = logging.getLogger("vllm.inspect_lens")


class Threads:
    """Do some works again and again, each in a thread of its own."""

    def __init__(self, name: str, what: str, *works: Callable[[], None]) -> None:
        """Prepare for `works`; `what` is where a fault is, in words of the log."""
        self._name, self._what = name, what
        self._left = list(works)
        self._lock = threading.Lock()
        self._has_told = False
        """Whether the log has said that there is no thread; each result asks for one."""

    def begin(self) -> None:
        """Begin those that have not begun; one that the system does not allow begins next time."""
        if not self._left:
            return
        with self._lock:
            try:
                while self._left:
                    own = threading.Thread(
                        target=self._run, args=self._left[:1], name=self._name, daemon=True
                    )
                    own.start()
                    del self._left[0]
            except RuntimeError as error:
                if not self._has_told:
                    logger.error("inspect_lens: no thread for %s yet: %s", self._what, error)
                self._has_told = True

    def _run(self, work: Callable[[], None]) -> None:
        while True:
            try:
                work()
            except BaseException:
                logger.exception("inspect_lens: a fault in %s; it goes on", self._what)
                time.sleep(1.0)
