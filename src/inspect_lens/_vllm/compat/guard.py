"""The boundary between our code and vLLM's shared loops: nothing of ours raises into them.

A loop that many requests share ends for all of them when one iteration raises. So whatever goes
wrong in our code there, also a `SystemExit`, becomes the error of the requests that it concerns.
A contract test finds every place where such a loop enters our code, and that it is guarded.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

from inspect_lens._engine.protocol.processes import as_exception, ends_process
from inspect_lens._engine.step.stepper import Stepper
from inspect_lens._vllm.metrics import refused
from inspect_lens.errors import CaptureError, LensError

logger = logging.getLogger("vllm.inspect_lens")


def guarded(stepper: Stepper, work: Callable[..., Any], *args: Any) -> Any:
    """Do some work in the step loop; a fault fails the requests that use the lens."""
    try:
        return work(*args)
    except BaseException as error:
        if ends_process(error):
            raise
        logger.exception("inspect_lens: a fault in the step loop; its requests have failed")
        try:
            stepper.fail_all(as_exception(error))
        except BaseException as further:
            if ends_process(further):
                raise
            # Their front-ends' time-outs fail them.
            logger.exception("inspect_lens: the fault could not be cleared away")
        return None


def idle(stepper: Stepper, dummy_run: Callable[..., Any]) -> Callable[..., Any]:
    """Make the taps idle before a dummy run, which is nobody's step."""

    @functools.wraps(dummy_run)
    def run(*args: Any, **kwargs: Any) -> Any:
        if stepper.is_armed:
            guarded(stepper, stepper.disarm)
        return dummy_run(*args, **kwargs)

    # The start-up check is the one dummy run that arms the taps itself.
    run.inspect_lens_original = dummy_run  # type: ignore[attr-defined]
    return run


def fault_of(error: BaseException) -> LensError:
    """The error of a request for which our code went wrong, in words for its client."""
    if isinstance(error, LensError):
        return error
    return CaptureError(
        f"a fault of inspect_lens ended this request ({type(error).__name__}: {error}); the "
        "server's log has its traceback; please report it"
    )


def pass_over(error: BaseException, *, uses_lens: bool) -> None:
    """Decide on a fault in a call of one request's own."""
    if ends_process(error) or isinstance(error, LensError):
        raise refused(error)
    if uses_lens:
        raise refused(fault_of(error)) from error
    logger.error("inspect_lens: a fault beside a request without the lens", exc_info=error)
