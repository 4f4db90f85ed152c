"""Results for the outputs of an event loop, attached in the loop as soon as all of them are there.

Requests that end in one step would each take a thread that waits for the same rows, and all these
threads want the interpreter while the loop has as many responses to write. So the loop is told
that something has come, looks which outputs have everything, and sees to them together.
"""

from __future__ import annotations

import asyncio
import logging
import weakref
from collections import deque
from functools import partial
from typing import Any

from inspect_lens._engine.protocol.processes import contained, ends_process
from inspect_lens._vllm.compat.features import fault_of
from inspect_lens._vllm.telemetry import failed, waited

from .attach import Results, log_fault, unprepared

logger = logging.getLogger("vllm.inspect_lens")

_AT_ONCE = 32
"""Outputs after which others have their turn in the loop: some milliseconds."""
_EVERY_S, _UNTOLD_EVERY_S = 0.1, 0.002
"""Seconds between two looks, where something is told of and where not all is."""
_PREPARE_EVERY_S, _PREPARE_AT_MOST_S = 0.02, 0.32
"""Seconds between two rounds of work ahead, each of half a millisecond or so: while there is any,
and where requests only wait for an engine that has no place for them."""
_PATIENCE = 10
"""A look that takes long is not repeated before that many times as long has passed."""


class _Waiting:
    """An output without its results, or one of requests that go on."""

    __slots__ = ("deadline", "done", "goes_on", "is_told", "output")

    def __init__(
        self,
        output: Any,
        done: asyncio.Future[None],
        deadline: float,
        told: bool,
        goes_on: bool = False,
    ) -> None:
        self.output, self.done, self.deadline, self.is_told = output, done, deadline, told
        self.goes_on = goes_on


class Arrivals:
    """The outputs of one event loop that wait for results."""

    def __init__(self, results: Results, loop: asyncio.AbstractEventLoop) -> None:
        # Weak: it is kept by what the loop is looked up in, which must not keep the loop.
        self.results, self._loop = results, weakref.proxy(loop)
        self._waiting: list[_Waiting] = []
        self._ready: deque[_Waiting] = deque()
        self._looked_at: list[_Waiting] = []
        """While they are looked at."""
        self._is_called = self._is_watching = self._is_attaching = False
        self._timer: asyncio.TimerHandle | None = None
        self._unprepared = unprepared()
        self._prepare_s = _PREPARE_EVERY_S

    def prepare_later(self, key: str) -> None:
        """Do for a request, while the engine is at it, what `Results.prepare` does."""
        self._unprepared.append(key)
        if len(self._unprepared) == 1:
            self._loop.call_later(_PREPARE_EVERY_S, self._prepare)

    def _prepare(self) -> None:
        # Requests that are not prepared take a little longer.
        self._prepare_s = min(2 * self._prepare_s, _PREPARE_AT_MOST_S)
        with contained(partial(log_fault, "results could not be prepared")):
            if self.results.prepare(self._unprepared):
                self._prepare_s = _PREPARE_EVERY_S
        if self._unprepared:
            self._loop.call_later(self._prepare_s, self._prepare)

    async def attach(self, output: Any) -> None:
        """Wait for the results of an output, and put them on it."""
        results = self.results
        deadline = self._loop.time() + results.timeout_s
        told = results.tells_all(output)
        waiting = _Waiting(output, self._loop.create_future(), deadline, told)
        self._waiting.append(waiting)
        self._call()
        try:
            with waited():
                await waiting.done
        except asyncio.CancelledError:
            results.forget(output)
            raise
        finally:
            del waiting  # an error's traceback holds this frame, and the future holds the error

    async def wait_for(self, output: Any) -> None:
        """Wait for what an output of requests that go on is to carry; see `Results.carry`."""
        if not self.results.has_come(output):
            deadline = self._loop.time() + self.results.timeout_s
            waiting = _Waiting(output, self._loop.create_future(), deadline, True, goes_on=True)
            self._waiting.append(waiting)
            self._call()
            await waiting.done

    def _call(self) -> None:
        """Have the loop look, once for all that end in one step."""
        if not self._is_called:
            self._is_called = True
            self._loop.call_soon(self._look)

    def _tell(self) -> None:
        """Something has come; called in the thread that receives."""
        if not self._is_called:
            self._is_called = True
            try:
                self._loop.call_soon_threadsafe(self._look)
            except (ReferenceError, RuntimeError):
                # The loop was closed with requests in it, which keep it.
                self._watch(False)
                self._timer = None
                self._waiting.clear()
                self._ready.clear()

    def _look(self) -> None:
        """See who has everything, and when to look again."""
        try:
            self._look_at_all()
        except BaseException as error:
            self._fail_all(error)
            if ends_process(error):
                raise

    def _fail_all(self, error: BaseException) -> None:
        everyone = [*self._waiting, *self._looked_at, *self._ready]
        self._waiting, self._looked_at = [], []
        self._ready.clear()
        _fail(everyone, error)

    def _look_at_all(self) -> None:
        self._is_called = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        began = self._loop.time()
        self._looked_at, self._waiting = self._waiting, []
        for one in self._looked_at:
            if one.done.done():
                continue
            if not self._is_due(one, began):
                self._waiting.append(one)
            elif one.goes_on:
                one.done.set_result(None)
            else:
                self._ready.append(one)
        self._looked_at = []
        self._watch(bool(self._waiting))
        if self._waiting:
            every = _EVERY_S if all(one.is_told for one in self._waiting) else _UNTOLD_EVERY_S
            took = self._loop.time() - began
            self._timer = self._loop.call_later(max(every, _PATIENCE * took), self._look)
        self._attach_soon()

    def _is_due(self, one: _Waiting, now: float) -> bool:
        try:
            is_ready = self.results.has_come if one.goes_on else self.results.is_ready
            return now >= one.deadline or is_ready(one.output)
        except BaseException as error:
            if ends_process(error):
                raise
            return True  # what fails here fails there, too, and is told to whom it concerns

    def _watch(self, wanted: bool) -> None:
        if wanted and not self._is_watching:
            self._is_watching = True
            self.results.notifier.watch(self._tell)
            self._call()  # for what came before
        elif not wanted and self._is_watching:
            self._is_watching = False
            self.results.notifier.unwatch(self._tell)

    def _attach_soon(self) -> None:
        """See to those that have everything; however often others are told of, some at a time."""
        if self._ready and not self._is_attaching:
            self._is_attaching = True
            self._loop.call_soon(self._attach_some)

    def _attach_some(self) -> None:
        """See to some of those that have everything, and to more when others had their turn."""
        self._is_attaching = False
        some: list[_Waiting] = []
        try:
            some = self._next()
            self._attach_soon()
            errors = self.results.attach_each([one.output for one in some], may_wait=False)
            # Frames in an error's traceback lead back to this one, which must not hold the error.
            while some:
                _settle(some[0].done, errors.pop(0))
                del some[0]
        except BaseException as error:
            if some:
                _fail(some, error)
            else:  # nobody knows whose turn it was
                self._fail_all(error)
            if ends_process(error):
                raise

    def _next(self) -> list[_Waiting]:
        """Some of those that have everything; nobody waits for one that was cancelled."""
        some: list[_Waiting] = []
        while self._ready and len(some) < _AT_ONCE:
            if not (one := self._ready.popleft()).done.done():
                some.append(one)
        return some


def _fail(waiting: list[_Waiting], error: BaseException) -> None:
    """Tell those who wait of a fault: it would end the loop of all, or be nobody's."""
    logger.error("inspect_lens: a fault in the event loop", exc_info=error)
    for one in waiting:
        if not one.done.done():
            one.done.set_exception(failed(fault_of(error)))


def _settle(done: asyncio.Future[None], error: Exception | None) -> None:
    if error is None:
        done.set_result(None)
    else:
        done.set_exception(error)


_loops: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Arrivals]
_loops = weakref.WeakKeyDictionary()


def arrivals_of(loop: asyncio.AbstractEventLoop, results: Results) -> Arrivals:
    """What waits in a loop; a process may run several, one after the other or side by side."""
    if (found := _loops.get(loop)) is None or found.results is not results:
        found = _loops[loop] = Arrivals(results, loop)
    return found
