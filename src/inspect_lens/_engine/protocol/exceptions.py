"""Which exceptions are faults, and which end the process: `SystemExit` may be either.

vLLM's workers and engines end by a `SystemExit` that their signal handler raises wherever the main
thread happens to be. A hook that calls `sys.exit()` raises the same class, and must not end them.
"""

from __future__ import annotations

import asyncio
import signal

from inspect_lens.errors import CaptureError

__all__ = ["as_exception", "ends_process"]


def ends_process(error: BaseException, *, in_user_code: bool = False) -> bool:
    """Whether an exception has to be passed on, whoever else is hurt by it.

    Args:
        error: as caught.
        in_user_code: whether code of a client raised it. A `KeyboardInterrupt` from there is the
            client's, as an engine that serves has a signal handler of its own.

    Returns:
        True where a signal handler raised it, or it ends a coroutine or a generator.
    """
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


def as_exception(error: BaseException) -> Exception:
    """A fault as an error that a request can end with."""
    if isinstance(error, Exception):
        return error
    return CaptureError(f"{type(error).__name__}: {error}")
