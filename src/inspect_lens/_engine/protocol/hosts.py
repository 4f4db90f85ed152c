"""Which host a process runs on, and how a worker reaches a front-end on another one.

Two processes can share memory if each finds the other in its /proc and sees the same files: if they
run on one kernel, in one namespace of processes and one of mounts. Else rows travel over TCP.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from functools import cache
from pathlib import Path

__all__ = ["BEATS", "Address", "Links", "host_id"]

BEATS = 5
"""Signs of life in the time after which a silent peer counts as gone."""
_SEPARATOR = "|"


@cache
def host_id() -> str:
    """What is equal in two processes if they can share memory, and else is not."""
    try:
        kernel = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        spaces = [os.readlink(f"/proc/self/ns/{kind}") for kind in ("pid", "mnt")]
    except OSError:
        # No such /proc, as in some sandboxes: processes of other machines have other names.
        return f"{socket.gethostname()}/{os.getuid()}"
    return "/".join((kernel, *spaces))


@dataclass(frozen=True, kw_only=True)
class Links:
    """How this process links to processes of other hosts."""

    address: str = ""
    """Where a front-end listens: an IP address, with ports such as `10.0.0.1:7000-7010` or
    without."""
    key: str = ""
    """Shared secret of all hosts; empty for none."""
    timeout_s: float = 15.0
    """Seconds after which a silent peer counts as gone."""
    most_bytes: int = 1 << 30
    """Bytes of rows on their way that a front-end holds for each worker of another host."""
    most_message: int = 1 << 30
    """Bytes of the largest message beside rows."""
    facts: str = ""
    """Mark of the engine's facts, which have to be the same on all hosts."""
    host: str = ""
    """By default `host_id()`; tests name others."""

    @property
    def own_host(self) -> str:
        """Of this process."""
        return self.host or host_id()

    @property
    def beat_s(self) -> float:
        """Seconds between two signs of life."""
        return self.timeout_s / BEATS


@dataclass(frozen=True)
class Address:
    """Where a front-end takes results: what requests carry to workers."""

    local: str
    """Of processes of its host."""
    host: str = ""
    remote: str = ""
    """Of processes of other hosts; empty where there are none."""
    facts: str = ""
    """See `Links`."""

    def pack(self) -> str:
        """As one string, which says the same of one front-end in all its requests."""
        if not self.remote:
            return self.local
        return _SEPARATOR.join((self.local, self.host, self.remote, self.facts))

    @classmethod
    def unpack(cls, text: str) -> Address:
        """The address in a request."""
        if _SEPARATOR not in text:
            return cls(text)
        return cls(*text.rsplit(_SEPARATOR, 3))
