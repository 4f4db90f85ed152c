"""Python's garbage collector in a process that runs evals: fewer and shorter stops.

An eval keeps a few hundred thousand objects (modules, the transcripts of its samples), makes new
ones all the time, and runs on one thread. With Python's thresholds the collector goes through all
of them again and again: a fifth of that thread's time was measured. What is loaded by the time a
model is made stays, so the collector need not look at it; and younger objects are looked at less
often. Only cycles wait for the collector; everything else is freed at once, as always.
"""

from __future__ import annotations

import gc

from inspect_lens._settings import Settings

__all__ = ["collect_less"]


def collect_less() -> None:
    """Let garbage be collected less often in this process; a collector that is off stays off.

    A threshold that somebody has set higher stays, too. `INSPECT_LENS_GARBAGE_THRESHOLD` is ours,
    and 0 leaves the collector alone.
    """
    ours = Settings.load().garbage_threshold
    first, *rest = gc.get_threshold()
    # A threshold of 0 switches the collector off, too.
    if not gc.isenabled() or first == 0 or first >= ours:
        return
    gc.collect()  # what is garbage by now would be kept for ever
    gc.freeze()
    gc.set_threshold(ours, *rest)
