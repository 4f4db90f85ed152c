"""How often Python looks for garbage in a process that many requests share."""

from __future__ import annotations

import gc


def collect_less(ours: int, *, freezes: bool = False) -> None:
    """Let garbage be collected less often in this process."""
    first, *rest = gc.get_threshold()
    # What somebody has chosen stays: a collector that is off (0 does that), or more objects.
    if not gc.isenabled() or first == 0 or first >= ours:
        return
    if freezes:
        gc.collect()  # what is garbage by now would be kept for ever
        gc.freeze()
    gc.set_threshold(ours, *rest)
