"""What a process and its descendants hold: descriptors and shared memory."""

from __future__ import annotations

import contextlib
import re
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

__all__ = ["TreeUsage", "cpu_model", "settled_usage", "usage"]

# Address range, permissions, offset, device, inode, then the name.
_SHARED = re.compile(
    r"^([0-9a-f]+)-([0-9a-f]+) \S+ ([0-9a-f]+) (\S+) (\d+)\s+"
    r"(/dev/shm/.*|/memfd:.*|/dev/zero.*)$"
)


@dataclass(frozen=True)
class TreeUsage:
    """What a process tree holds at one moment."""

    processes: int
    descriptors: int
    shared_bytes: int
    """Bytes of files in the shared-memory file system and of memfds, as far as they are mapped."""


def usage(pid: int) -> TreeUsage:
    """Measure a process and its descendants now.

    Args:
        pid: of the root of the tree.
    """
    root = psutil.Process(pid)
    processes = [root, *root.children(recursive=True)]
    descriptors = 0
    ends: dict[tuple[str, str], int] = {}
    for process in processes:
        # A process may end while it is looked at.
        with contextlib.suppress(psutil.Error, OSError):
            descriptors += process.num_fds()
            for line in Path(f"/proc/{process.pid}/maps").read_text().splitlines():
                found = _SHARED.match(line)
                if found:
                    start, end, offset, device, inode, _ = found.groups()
                    # One file may be mapped in parts, twice, and by several processes.
                    reach = int(offset, 16) + int(end, 16) - int(start, 16)
                    key = (device, inode)
                    ends[key] = max(ends.get(key, 0), reach)
    return TreeUsage(len(processes), descriptors, sum(ends.values()))


def cpu_model() -> str:
    """Name of the processor; empty where the system does not tell."""
    with contextlib.suppress(OSError):
        found = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
        return found[1] if found else ""
    return ""


def settled_usage(pid: int, *, within_s: float = 10.0) -> TreeUsage:
    """Measure until two readings, half a second apart, agree.

    Args:
        pid: of the root of the tree.
        within_s: take the last reading after this time.
    """
    last = usage(pid)
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        time.sleep(0.5)
        now = usage(pid)
        if now == last:
            return now
        last = now
    return last
