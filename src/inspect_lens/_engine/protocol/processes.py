"""Whether another process goes on."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from inspect_lens.errors import CaptureError

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


class Process:
    """Who takes rows: a process of this host, which is not known until it asks for something."""

    def __init__(self, pid: int | None = None) -> None:
        self.pid = pid

    def is_alive(self) -> bool:
        """Whether it is still there."""
        return self.pid is None or is_alive(self.pid)

    def is_stopped(self) -> bool:
        """Whether it was told to stop."""
        return self.pid is not None and is_stopped(self.pid)

    def __str__(self) -> str:
        """For logs."""
        return "a front-end" if self.pid is None else f"process {self.pid}"


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


def ends_process(error: BaseException, *, in_user_code: bool = False) -> bool:
    """Whether an exception has to be passed on, whoever else is hurt by it."""
    if isinstance(error, Exception):
        return False
    if isinstance(error, GeneratorExit | asyncio.CancelledError):
        return not in_user_code
    frames = error.__traceback__
    while frames is not None and frames.tb_next is not None:
        frames = frames.tb_next
    code = None if frames is None else frames.tb_frame.f_code
    for number in (signal.SIGTERM, signal.SIGINT):
        handler = signal.getsignal(number)
        if code is not None and getattr(handler, "__code__", None) is code:
            return True
        # Python's own handler has no frame: somebody presses Ctrl-C at his own engine.
        if handler is signal.default_int_handler and isinstance(error, KeyboardInterrupt):
            return not in_user_code
    return False


@contextlib.contextmanager
def contained(tell: Callable[[BaseException], object]) -> Iterator[None]:
    """Tell of a fault of ours, which does not end the loop that all requests share."""
    try:
        yield
    except BaseException as error:
        if ends_process(error):
            raise
        tell(error)


def as_exception(error: BaseException) -> Exception:
    """A fault as an error that a request can end with."""
    if isinstance(error, Exception):
        return error
    return CaptureError(f"{type(error).__name__}: {error}")
