"""What a process and its descendants hold and use: descriptors, shared memory, processor time."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

__all__ = ["TreeUsage", "cpu_clock", "cpu_model", "settled_usage", "usage"]

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


def cpu_clock(names: Mapping[int, str]) -> Callable[[], dict[str, float]]:
    """Begin to measure the processor time of processes and of all below them.

    Args:
        names: of the first ones, by process id.

    Returns:
        Gives the seconds in user and system mode since then, by name. vLLM's processes have titles,
        such as `EngineCore` and `Worker_TP0`, and others are known by the module that they run.
    """
    before = _cpu_times(names)

    def used() -> dict[str, float]:
        found: dict[str, float] = {}
        for process, (name, seconds) in _cpu_times(names).items():
            more = seconds - before.get(process, (name, 0.0))[1]
            if more > 0:
                found[name] = found.get(name, 0.0) + more
        return found

    return used


def _cpu_times(names: Mapping[int, str]) -> dict[psutil.Process, tuple[str, float]]:
    found: dict[psutil.Process, tuple[str, float]] = {}
    for pid in names:
        root = psutil.Process(pid)
        for process in [root, *root.children(recursive=True)]:
            with contextlib.suppress(psutil.Error):
                times = process.cpu_times()
                name = names.get(process.pid) or _called(process)
                found[process] = name, times.user + times.system
    return found


def _called(process: psutil.Process) -> str:
    words = process.cmdline() or [process.name()]
    if "-m" in words[:-1]:
        return words[words.index("-m") + 1]
    title = words[0].partition("::")[2].partition(" ")[0]
    return title or process.name()


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
