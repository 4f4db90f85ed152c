"""Whether another process goes on, and ending with the one that started this.

A process that is killed (by a user, a batch system, or for want of memory) cannot stop what it
started, and a server or an engine would hold its GPU until somebody finds it. The server that the
provider started ends with the provider's process, and an engine with the one that started it: its
only API server, the process above several of them, or a program of a user. vLLM sees to the rest,
where one API server of several is killed, or a worker.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import multiprocessing
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import cast

import psutil

from inspect_lens._base.temp_dirs import sweep
from inspect_lens.errors import CaptureError

STOPPED_S = 0.5
"""Seconds that others wait for a process that is stopped; one that is looked at is, for less."""
STALLED_S = 10.0
"""Seconds that others wait for a process that runs and takes nothing."""


def is_alive(pid: int) -> bool:
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
        return self.pid is None or is_alive(self.pid)

    def is_stopped(self) -> bool:
        return self.pid is not None and is_stopped(self.pid)

    def __str__(self) -> str:
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


class contained:
    """Tell of a fault of ours, which does not end the loop that all requests share."""

    # No generator, which takes five times as long: each request enters several.
    def __init__(self, tell: Callable[[BaseException], object]) -> None:
        self._tell = tell

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if error is None or ends_process(error):
            return False
        self._tell(error)
        return True


def as_exception(error: BaseException) -> Exception:
    """A fault as an error that a request can end with."""
    if isinstance(error, Exception):
        return error
    return CaptureError(f"{type(error).__name__}: {error}")


logger = logging.getLogger("vllm.inspect_lens")

_POLL_S = 1.0
_GRACE_S = 10.0
"""For a process to end in order, and what it has started."""
_ENGINE = "EngineCore"
"""How vLLM names processes of engines."""


def end_engine_with_parent() -> None:
    """End this process with the one that started it, where it is an engine's own."""
    parent = multiprocessing.parent_process()
    if parent is not None and multiprocessing.current_process().name.startswith(_ENGINE):
        # Loading a model takes minutes: the one that started it may have gone by now. Under a fork
        # server it is not the parent that the system knows.
        pid = cast("int", parent.pid)
        _watch(pid, partial(_runs, pid))


def end_with(parent: int) -> None:
    """End this process, and all below it, once its parent is gone."""
    _watch(parent, lambda: os.getppid() == parent)


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _watch(parent: int, is_there: Callable[[], bool]) -> None:
    target = partial(_end_with, parent, is_there)
    threading.Thread(target=target, name="inspect-lens-end", daemon=True).start()


def _end_with(parent: int, is_there: Callable[[], bool]) -> None:
    # A signal that the kernel sends at the parent's end would come when the thread ends that
    # started this process, which may be long before.
    while is_there():
        time.sleep(_POLL_S)
    logger.warning("inspect_lens: process %d, which started this one, is gone; ending", parent)
    deadline = time.monotonic() + _GRACE_S
    sweep()
    below = psutil.Process().children(recursive=True)
    if signal.getsignal(signal.SIGTERM) in (signal.SIG_DFL, None):
        # Nobody here would end what lies below, which is still starting.
        for process in below:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.terminate()
    else:
        os.kill(os.getpid(), signal.SIGTERM)
    # This thread goes with the process where that ends in order.
    _, alive = psutil.wait_procs(below, timeout=_GRACE_S)
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    time.sleep(max(0.0, deadline - time.monotonic()))
    os._exit(1)
