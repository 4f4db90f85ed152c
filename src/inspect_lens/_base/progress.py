"""A progress bar on a terminal, and a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

LINE_S = 30.0
"""Seconds between two lines where standard error is no terminal."""


@contextmanager
def progress_bar(
    name: str, *, total: int, done: int, show: bool, at_once: int = 1
) -> Iterator[Callable[[], None]]:
    """Show how many samples are done; `at_once` of them are under way together."""
    if not show:
        yield lambda: None
        return
    if not sys.stderr.isatty():
        yield _Lines(name, total, done, at_once).advance
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True)) as bar:
        task = bar.add_task(name, total=total, completed=done)
        yield lambda: bar.advance(task)


class _Lines:
    """What a log file gets; work that ends sooner writes nothing."""

    def __init__(self, name: str, total: int, done: int, at_once: int) -> None:
        self._name, self._total, self._first, self._done = name, total, done, done
        self._at_once = at_once
        self._begin = self._last = time.monotonic()

    def advance(self) -> None:
        self._done += 1
        now = time.monotonic()
        if now - self._last < LINE_S or self._done >= self._total:
            return
        self._last = now
        line = f"{self._name}: {self._done} of {self._total}"
        # The first of a batch have waited for all of it, and say nothing of how long one takes.
        if self._done - self._first < self._at_once:
            sys.stderr.write(f"{line}\n")
            sys.stderr.flush()
            return
        each = (now - self._begin) / (self._done - self._first)
        left = each * (self._total - self._done)
        about = f"{left / 60:.0f} min" if left >= 90 else f"{left:.0f} s"
        sys.stderr.write(f"{line}, about {about} left\n")
        sys.stderr.flush()
