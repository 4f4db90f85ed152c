"""Whether another process goes on."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

__all__ = ["STALLED_S", "STOPPED_S", "Peer", "Process", "is_alive", "is_stopped"]

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


class Peer(Protocol):
    """Who takes rows: a process of this host, or one at the other end of a link."""

    def is_alive(self) -> bool:
        """Whether it is still there."""
        ...

    def is_stopped(self) -> bool:
        """Whether it was told to stop."""
        ...


@dataclass(frozen=True)
class Process:
    """A process of this host."""

    pid: int

    def is_alive(self) -> bool:
        """See `Peer.is_alive`."""
        return is_alive(self.pid)

    def is_stopped(self) -> bool:
        """See `Peer.is_stopped`."""
        return is_stopped(self.pid)

    def __str__(self) -> str:
        """For logs."""
        return f"process {self.pid}"
