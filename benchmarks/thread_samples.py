"""What the threads of a process do during a run, by looking at their stacks every millisecond.

A profiler that traces calls slows the traced down by half; this one takes what a thread of Python
takes that wakes up, looks and sleeps. What it tells is where a run's time goes, phase by phase: an
engine in another process is waited for in most of it, and what matters is what is left to do when
the last step is over.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
from collections import Counter
from types import FrameType
from typing import Any

__all__ = ["GarbageClock", "Sampler"]

_PHASES = 10
_MOST_SHOWN = 12
_STEP_S = 0.001
_OWN = "inspect_lens"


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


class Sampler:
    """Samples all other threads of this process while it is entered."""

    def __init__(self) -> None:
        self._stop = threading.Event()
        self._samples: list[tuple[float, str, str, str]] = []
        """Seconds, thread, innermost function, innermost function of the lens."""
        self._thread = threading.Thread(target=self._look, name="sampler", daemon=True)
        self._began = 0.0

    def __enter__(self) -> Sampler:
        # A thread that computes gives the lock up after this time; 5 ms would hide short calls.
        self._interval = sys.getswitchinterval()
        sys.setswitchinterval(2e-4)
        self._began = time.perf_counter()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        sys.setswitchinterval(self._interval)

    def _look(self) -> None:
        own = threading.get_ident()
        names: dict[int, str] = {}
        while not self._stop.wait(_STEP_S):
            now = time.perf_counter() - self._began
            for thread, frame in sys._current_frames().items():  # noqa: SLF001 (CPython has no other way)
                if thread == own:
                    continue
                if thread not in names:
                    names = {t.ident or 0: t.name for t in threading.enumerate()}
                name = names.get(thread, "?").rstrip("0123456789_-")
                self._samples.append((now, name, _label(frame), _own(frame)))

    def report(self) -> dict[str, Any]:
        """By thread: share of its samples by innermost function, whole and in tenths of the run."""
        end = max((s[0] for s in self._samples), default=0.0) or 1.0
        threads: dict[str, list[tuple[float, str, str, str]]] = {}
        for sample in self._samples:
            threads.setdefault(sample[1], []).append(sample)
        return {
            "seconds": round(end, 4),
            "threads": {name: _summary(samples, end) for name, samples in threads.items()},
        }


def _summary(samples: list[tuple[float, str, str, str]], end: float) -> dict[str, Any]:
    total = len(samples)
    phases: list[Counter[str]] = [Counter() for _ in range(_PHASES)]
    for at, _, _, own in samples:
        phases[min(_PHASES - 1, int(at / end * _PHASES))][own or "-"] += 1

    def shares(found: Counter[str], most: int) -> dict[str, float]:
        n = sum(found.values()) or 1
        return {what: round(count / n, 3) for what, count in found.most_common(most)}

    return {
        "samples": total,
        "innermost": shares(Counter(s[2] for s in samples), _MOST_SHOWN),
        "lens": shares(Counter(s[3] or "-" for s in samples), _MOST_SHOWN),
        "lens_by_tenth": [shares(phase, 6) for phase in phases],
    }


def _label(frame: FrameType) -> str:
    code = frame.f_code
    return f"{os.path.basename(code.co_filename)}:{code.co_name}"


def _own(frame: FrameType | None) -> str:
    """The innermost function of the package, or nothing where the thread is elsewhere."""
    while frame is not None:
        # Not by its file: a clone is often called like the package.
        if str(frame.f_globals.get("__name__", "")).partition(".")[0] == _OWN:
            return _label(frame)
        frame = frame.f_back
    return ""
