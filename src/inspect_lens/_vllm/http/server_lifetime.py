"""A server that the provider started ends with it, also where that process was killed.

A process that is killed (by a user, a batch system, or for want of memory) cannot stop what it
started, and the server would hold its GPU until somebody finds it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time

import psutil

__all__ = ["end_with"]

logger = logging.getLogger("vllm.inspect_lens")

_POLL_S = 1.0
_GRACE_S = 10.0
"""For the server to end in order, and its engine and workers with it."""


def end_with(parent: int) -> None:
    """End this process, and all below it, once its parent is gone.

    Args:
        parent: process id. Where another process is the parent already, this one has gone.
    """
    threading.Thread(target=_end_with, args=(parent,), name="inspect-lens-end", daemon=True).start()


def _end_with(parent: int) -> None:
    # A signal that the kernel sends at the parent's end would come when the thread ends that
    # started this process, which may be long before.
    while os.getppid() == parent:
        time.sleep(_POLL_S)
    logger.warning("inspect_lens: process %d, which started this server, is gone; ending", parent)
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
    os._exit(1)
