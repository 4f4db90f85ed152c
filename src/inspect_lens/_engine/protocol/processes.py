"""Whether another process of this machine goes on."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["STALLED_S", "STOPPED_S", "is_alive", "is_stopped"]

STOPPED_S = 0.5
"""Seconds that others wait for a process that is stopped; one that is looked at is, for less."""
STALLED_S = 10.0
"""Seconds that others wait for a process that runs and takes nothing."""


def is_alive(pid: int) -> bool:
    """Whether there is such a process."""
    return os.path.exists(f"/proc/{pid}")


def is_stopped(pid: int) -> bool:
    """Whether a process was told to stop (SIGSTOP), or is traced."""
    try:
        # Behind the name, which may hold anything.
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return False
    return state in ("T", "t")
