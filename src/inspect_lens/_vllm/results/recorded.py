"""Results of requests that a rule records: taken in a thread, while the answer goes its way.

Their clients know nothing of it. So whatever goes wrong here is counted, and no answer waits.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING

from .expected import Expected
from .ticket import Choice, Ticket, is_ready

if TYPE_CHECKING:
    from .attach import Results

logger = logging.getLogger("vllm.inspect_lens")

_EVERY_S = 0.005
_MOST = 4096
"""Choices whose rows are on their way."""


@dataclass
class _Coming:
    ticket: Ticket
    expected: Expected
    began: float = field(default_factory=time.monotonic)


class Recorded:
    """Choices that have ended, and whose rows are on their way to a sink."""

    def __init__(self, results: Results) -> None:
        self._results = results
        self._new: deque[_Coming] = deque()
        self._changed = threading.Condition()
        self._n_coming = 0
        self._unflushed: deque[str] = deque(maxlen=_MOST)
        self._has_begun = False

    def put(self, ticket: Ticket) -> None:
        """Take over a choice that has ended; never waits and never raises for what it holds."""
        expected = self._results.take_over(ticket.key)
        if expected is None or expected.sink is None:
            return
        if not ticket.n_completion or self._n_coming >= _MOST:
            self._results.the_collector().discard(ticket.key)
            expected.sink.recorder.count("dropped" if ticket.n_completion else "failed")
            return
        self._unflushed.append(ticket.key)
        with self._changed:
            self._n_coming += 1
            self._new.append(_Coming(ticket, expected))
            if not self._has_begun:
                self._has_begun = True
                name = "inspect-lens-recorded"
                threading.Thread(target=self._run, name=name, daemon=True).start()
            self._changed.notify_all()

    def take_unflushed(self) -> list[str]:
        """Choices since the last call: an engine in this process may take no further step."""
        found = []
        while self._unflushed:
            found.append(self._unflushed.popleft())
        return found

    def _run(self) -> None:
        coming: list[_Coming] = []
        while True:
            with self._changed:
                if not self._new:
                    self._changed.wait(_EVERY_S if coming else None)
                while self._new:
                    coming.append(self._new.popleft())
            try:
                left = [one for one in coming if not self._is_over(one)]
            except BaseException:
                logger.exception("inspect_lens: a fault beside requests that are recorded")
                left = []
            with self._changed:
                self._n_coming -= len(coming) - len(left)
            coming = left

    def _is_over(self, one: _Coming) -> bool:
        """See to a choice; False where its rows are still on their way."""
        collector = self._results.the_collector()
        try:
            is_late = time.monotonic() - one.began > self._results.timeout_s
            if not is_late and not is_ready(one.ticket, one.expected, collector):
                return False
            choice = Choice(SimpleNamespace(token_ids=()), one.ticket, one.expected)
            choice.take(collector, self._results.timeout_s, may_wait=False)
            choice.finish(0)
        except Exception as error:  # noqa: BLE001 - its answer is on its way already
            collector.discard(one.ticket.key)
            if one.expected.sink is not None:
                one.expected.sink.recorder.failed(error)
        return True
