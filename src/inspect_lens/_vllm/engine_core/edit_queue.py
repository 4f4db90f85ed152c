"""Requests whose edits do not fit the edit table now wait until running ones give up their rows.

A worker has one table for the edits of all requests that run, and the scheduler decides which do.
So it is asked to start a request only when the table has room for its edits. Until then the request
stays in vLLM's own queue, where it can be cancelled like any other. Edited requests start in the
order in which they came, because small ones would otherwise pass a large one for good. Requests
without edits pass.

How many numbers a request takes is known exactly where it is placed in a table of the same size,
since requests share what they have in common. That costs time, so it is done only while a number
that every request brings along, of what it takes at most, says that the table might be too small.
"""

from __future__ import annotations

import heapq
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from inspect_lens._engine.protocol.envelope import HASH_KEY, NUMBERS_KEY, Envelope
from inspect_lens._engine.protocol.readouts import share_of
from inspect_lens._engine.tap.edit_table import Placements, Steering
from inspect_lens._vllm.compat.features import queued
from inspect_lens.errors import CapacityError, LensError
from inspect_lens.spec import ENVELOPE_KEY, EngineFacts

logger = logging.getLogger("vllm.inspect_lens")


def sealed_of(request: Any) -> Any:
    """The envelope of a request; None for one that asks nothing of the lens."""
    extra = getattr(getattr(request, "sampling_params", None), "extra_args", None)
    return extra.get(ENVELOPE_KEY) if extra else None


class EditQueue:
    """Which edited requests of one scheduler may start.

    Args:
        facts: of the engine.
        most_s: how long the first of those that wait is kept back. Then it may start, and the
            worker refuses it where there is still no room.
        most_waiting: how many are kept back. Further ones may start, and are refused likewise.
        now: a clock, in seconds.
    """

    def __init__(
        self,
        facts: EngineFacts,
        *,
        most_s: float,
        most_waiting: int,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._facts, self._now = facts, now
        self._most_s, self._most_waiting = most_s, most_waiting
        self._tap_index = {tap: i for i, tap in enumerate(facts.taps)}
        self._waiting: dict[str, Any] = {}
        """Edited requests that have not run yet, in the order in which they came."""
        self._started: dict[str, Any] = {}
        """Those that have, pre-empted ones too."""
        self._contents: dict[str, list[int]] = {}
        """By content: numbers of the table that its requests share, at most, and how many they
        are."""
        self._most = 0
        """Numbers that all of them take at most."""
        self._table: Placements | None = None
        """What is placed; None while there is room for all."""
        self._placed: dict[str, Steering | None] = {}
        """By request; None for one that a worker has to judge."""
        self._first: tuple[str, float] | None = None
        """The first of those that wait, and since when."""
        self._is_full = False
        """Whether that one has had no room, and what is placed has not changed since."""
        self._is_told = False

    @property
    def is_idle(self) -> bool:
        """Whether no request has edits."""
        return not (self._waiting or self._started)

    @property
    def is_settled(self) -> bool:
        """Whether all requests with edits have started."""
        return not self._waiting

    def add(self, request: Any) -> None:
        """Take note of a request that has come, or was pre-empted."""
        key, sealed = request.request_id, sealed_of(request)
        content = None if sealed is None else sealed.get(HASH_KEY)
        if content is None or key in self._started or key in self._waiting:
            return
        self._waiting[key] = request
        shared, own = sealed[NUMBERS_KEY]
        known = self._contents.setdefault(content, [shared, 0])
        self._most += own + (0 if known[1] else shared)
        known[1] += 1

    def forget(self, keys: Iterable[str]) -> None:
        """Give back what requests held that are over."""
        for key in keys:
            request = self._started.pop(key, None) or self._waiting.pop(key, None)
            if request is not None:
                sealed = sealed_of(request)
                content = sealed[HASH_KEY]
                known = self._contents[content]
                self._most -= sealed[NUMBERS_KEY][1]
                known[1] -= 1
                if not known[1]:
                    self._most -= known[0]
                    del self._contents[content]
                self._take_back(key)

    def started(self, keys: Iterable[str]) -> None:
        """Take note of requests that a step runs for the first time."""
        for key in keys:
            if (request := self._waiting.pop(key, None)) is not None:
                self._started[key] = request
                if self._table is not None and self._placed.get(key) is None:
                    # The worker may have room for what was not asked for here.
                    self._placed[key] = self._place(key, request, may_fail=True)
                    self._is_full = False

    def held_back(self, n_free: int, *, is_in_order: bool = True) -> list[Any]:
        """Requests that the next step must not start.

        Args:
            n_free: how many requests it may start.
            is_in_order: whether vLLM starts requests in the order in which they came; else in the
                order that they compare by.
        """
        if self._most <= self._facts.bank_rows:
            self._table = None
            self._placed.clear()
            self._first, self._is_full = None, False
            return []
        if not self._waiting or n_free <= 0:
            return []
        if self._table is None:
            self._table = self._new_table()
            for key, request in self._started.items():
                self._placed[key] = self._place(key, request, may_fail=True)
        waiting = [one for key, one in self._waiting.items() if key not in self._placed]
        n_free -= len(self._waiting) - len(waiting)
        if not is_in_order:
            # This is done in each step, and most steps look at the first one alone.
            heapq.heapify(waiting)
        while waiting and n_free > 0 and self._may_start(waiting[0].request_id, waiting[0]):
            if is_in_order:
                del waiting[0]
            else:
                heapq.heappop(waiting)
            n_free -= 1
        if not is_in_order and len(waiting) > self._most_waiting:
            waiting.sort()
        return waiting[: self._most_waiting]

    def _may_start(self, key: str, request: Any) -> bool:
        """Whether the first of those that wait has room now, or need not wait any longer."""
        if self._first is None or self._first[0] != key:
            self._first, self._is_full = (key, self._now()), False
        if not self._is_full:
            try:
                # With the table to itself it waits for nobody.
                self._placed[key] = self._place(key, request, may_fail=not self._placed)
            except CapacityError:
                self._is_full = True
                if not self._is_told:
                    self._is_told = True
                    logger.warning(
                        "inspect_lens: requests wait, since the edits of those that run fill the "
                        "edit table; INSPECT_LENS_BANK_BYTES makes it larger"
                    )
            else:
                self._first = None
                return True
        if self._now() - self._first[1] < self._most_s:
            return False
        self._placed[key] = self._first = None
        return True

    def _new_table(self) -> Placements:
        facts = self._facts
        shares = [share_of(facts.width_of(tap.site), facts.ranks, 0) for tap in facts.taps]
        return Placements(facts.bank_rows + 1, facts.hidden, shares)

    def _place(self, key: str, request: Any, *, may_fail: bool) -> Steering | None:
        """Place edits as a worker does; None where that one has to judge them."""
        assert self._table is not None
        steering = None
        try:
            envelope = Envelope.unpack(sealed_of(request))
            steering = self._table.admit(envelope, self._tap_index)
            if envelope.edited.has_latches:
                self._table.keep_history(key, 0, envelope, self._tap_index)
        except LensError as error:
            if steering is not None:
                self._table.release(steering)
            self._table.drop_history(key)
            if isinstance(error, CapacityError) and not may_fail:
                raise
            return None
        return steering

    def _take_back(self, key: str) -> None:
        if self._first is not None and self._first[0] == key:
            self._first = None
        if key in self._placed:
            self._is_full = False
        steering = self._placed.pop(key, None)
        if self._table is not None:
            self._table.drop_history(key)
            if steering is not None:
                self._table.release(steering)


@contextmanager
def kept_back(scheduler: Any, requests: list[Any]) -> Iterator[None]:
    """Take requests out of the queue of a scheduler for one step."""
    waiting = scheduler.waiting
    # vLLM has other queues, too. What stands there must not come into this one.
    here = set(map(id, queued(waiting))) if requests else set()
    requests = [request for request in requests if id(request) in here]
    if not requests:
        yield
        return
    before = list(waiting) if isinstance(waiting, deque) else []
    is_all = len(before) == len(requests)
    if is_all:
        waiting.clear()
    else:
        waiting.remove_requests(requests)
    try:
        yield
    finally:
        if is_all:
            # Behind what was pre-empted in this step.
            waiting.extend(before)
        elif isinstance(waiting, deque):
            apart, known = set(map(id, requests)), set(map(id, before))
            left = set(map(id, waiting))
            # What was pre-empted in this step stands in front.
            order = [request for request in waiting if id(request) not in known]
            order += [r for r in before if id(r) in apart or id(r) in left]
            waiting.clear()
            waiting.extend(order)
        else:
            waiting.prepend_requests(requests)
