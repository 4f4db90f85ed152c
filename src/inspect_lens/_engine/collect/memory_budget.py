"""How much memory this process may use: the machine's, or what its control group has of it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

__all__ = ["memory_bytes"]


def memory_bytes(root: Path = Path("/")) -> int:
    """Memory of this machine, or of the container or batch job that the process is in.

    Args:
        root: of the file system.

    Returns:
        Bytes.
    """
    found = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for path in _limits(root):
        with contextlib.suppress(OSError, ValueError):  # "max" where there is no limit
            found = min(found, int(path.read_text()))
    return found


def _limits(root: Path) -> Iterator[Path]:
    """Files that may hold a limit: of the process's group and of those that it lies in."""
    groups = root / "sys/fs/cgroup"
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, kinds, path = line.split(":", 2)
        if not kinds:
            base, name = groups, "memory.max"
        elif "memory" in kinds.split(","):
            base, name = groups / "memory", "memory.limit_in_bytes"
        else:
            continue
        own = base / path.lstrip("/")
        # Within a container the path is often that of the host, and the limit lies at the base.
        for folder in (own, *own.parents):
            yield folder / name
            if folder == base:
                break
