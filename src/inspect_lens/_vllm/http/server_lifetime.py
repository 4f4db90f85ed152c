"""What a process started ends with it, also where that process was killed.

A process that is killed (by a user, a batch system, or for want of memory) cannot stop what it
started, and a server or an engine would hold its GPU until somebody finds it. The server that the
provider started ends with the provider's process, and an engine with the one that started it: its
only API server, the process above several of them, or a program of a user. vLLM sees to the rest,
where one API server of several is killed, or a worker.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import cast

import psutil

from inspect_lens._base.temp_dirs import sweep

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
