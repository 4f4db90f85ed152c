"""Where the time of a run goes, as its client sees it: handing over, steps, what is left then."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Any

import psutil

__all__ = ["GarbageClock", "Phases"]


_FIRST = 16
"""Steps: prompts are computed in the first few, and requests join."""


class GarbageClock:
    """Seconds that the garbage collector takes, in whatever thread."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._began = 0.0

    def __enter__(self) -> GarbageClock:
        gc.callbacks.append(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        gc.callbacks.remove(self._note)

    def _note(self, phase: str, _info: dict[str, int]) -> None:
        now = time.perf_counter()
        if phase == "start":
            self._began = now
        else:
            self.seconds += now - self._began


class Phases:
    """Notes when an offline engine was given its last request, and when its last outputs came.

    Args:
        llm: vLLM's `LLM`. Two of its engine's methods are wrapped while this is entered: a
            microsecond per call, in all arms alike.
    """

    def __init__(self, llm: Any) -> None:
        self._engine = llm.llm_engine
        self._began = self._added = self._ended = 0.0
        self._own = [0.0] * 4
        """What the thread had worked at the beginning, when the last request was handed over, when
        the last outputs came, and at the end."""
        self._come: list[float] = []
        """When outputs came, of the steps since the last request was handed over."""
        self._waited = 0.0
        """Seconds for which the client waited for them."""
        self._machine: Any = None
        self._busy = self._stolen = 0.0

    def __enter__(self) -> Phases:
        engine = self._engine
        self._machine = psutil.cpu_times()
        engine.add_request = _timing(engine.add_request, self._note_added)
        core = engine.engine_core
        core.get_output = _timing(core.get_output, self._note_come)
        self._began = self._added = time.perf_counter()
        self._own = [time.thread_time()] * 4
        return self

    def __exit__(self, *_: object) -> None:
        self._ended, self._own[3] = time.perf_counter(), time.thread_time()
        # What lies on the instance hides the class's own.
        del self._engine.add_request, self._engine.engine_core.get_output
        before, now = self._machine, psutil.cpu_times()
        spent = [getattr(now, name) - getattr(before, name) for name in ("idle", "iowait", "steal")]
        self._stolen = spent[2]
        self._busy = sum(now) - sum(before) - sum(spent)

    def _note_added(self, _: float) -> None:
        self._added = time.perf_counter()
        self._own[1:] = [time.thread_time()] * 3
        self._come.clear()
        self._waited = 0.0

    def _note_come(self, asked: float) -> None:
        self._come.append(time.perf_counter())
        self._own[2] = time.thread_time()
        self._waited += self._come[-1] - asked

    def report(self) -> dict[str, float]:
        """Milliseconds, by the names of `WAITS`."""
        come = self._come or [self._added]
        own = self._own
        return {
            "add_ms": 1e3 * (self._added - self._began),
            "add_own_ms": 1e3 * (own[1] - own[0]),
            "first_steps_ms": 1e3 * (come[:_FIRST][-1] - self._added),
            "steps_ms": 1e3 * (come[-1] - self._added),
            "idle_ms": 1e3 * self._waited,
            "end_ms": 1e3 * (self._ended - come[-1]),
            "end_own_ms": 1e3 * (own[3] - own[2]),
            "busy_ms": 1e3 * self._busy,
            "stolen_ms": 1e3 * self._stolen,
        }


def _timing(original: Callable[..., Any], note: Callable[[float], None]) -> Callable[..., Any]:
    """A call that is followed by a note of when it began."""

    def timed(*args: Any, **kwargs: Any) -> Any:
        asked = time.perf_counter()
        result = original(*args, **kwargs)
        note(asked)
        return result

    return timed
