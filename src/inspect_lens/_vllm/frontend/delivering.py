"""Results onto an output of `AsyncLLM`, encoded where this process serves HTTP."""

from __future__ import annotations

import asyncio
import contextvars
from typing import Any

from inspect_lens._engine.protocol.exceptions import ends_process
from inspect_lens._vllm import traces
from inspect_lens._vllm.compat.features import busy
from inspect_lens._vllm.compat.guard import fault_of
from inspect_lens._vllm.http.responses import as_json, is_serving
from inspect_lens._vllm.results.event_loop import arrivals_of
from inspect_lens._vllm.results.outputs import attached, ticket_keys
from inspect_lens._vllm.sinks.process import offers, settle
from inspect_lens.errors import CapacityError, CaptureError, LensError

from .state import front_end

__all__ = ["attached_for_http"]


async def attached_for_http(output: Any) -> int:
    """Attach results, encoded where this process serves HTTP.

    Args:
        output: vLLM's `RequestOutput`; results are put onto its finished choices.

    Returns:
        How many choices got one.

    Raises:
        LensError: a result is not whole.
        Exception: vLLM's own, of HTTP 429, where there is no room for it.
    """
    before = attached(output)
    try:
        with traces.ends(ticket_keys(output)):
            await _attach(output)
    except CapacityError as error:
        raise busy(str(error)) from error
    except CaptureError as error:
        # The body's `type` is vLLM's own; clients tell from the text that a retry is no use.
        raise CaptureError(f"{CaptureError.__name__}: {error}") from error
    except (LensError, asyncio.CancelledError):
        raise
    except BaseException as error:
        # A SystemExit in a task ends the event loop, and with it the server.
        if ends_process(error):
            raise
        raise CaptureError(f"{CaptureError.__name__}: {fault_of(error)}") from error
    return attached(output) - before


async def _attach(output: Any) -> None:
    loop, front = asyncio.get_running_loop(), front_end()
    if front.results.is_light(output, encodes=is_serving()):
        await arrivals_of(loop, front.results).attach(output)
        _encode(output)
        return
    # It copies or compresses much, for which no other response has to wait.
    own = contextvars.copy_context()  # whose request this is
    await loop.run_in_executor(front.waiting, own.run, _attach_and_encode, output)
    if offers([output]):
        await settle(output, front.results.timeout_s)
        await loop.run_in_executor(front.waiting, own.run, _encode, output)


def _attach_and_encode(output: Any) -> None:
    front_end().results.attach(output)
    if not offers([output]):
        _encode(output)


def _encode(output: Any) -> None:
    if is_serving():
        for completion in output.outputs:
            if hasattr(completion, "inspect_lens") and not hasattr(completion, "inspect_lens_json"):
                completion.inspect_lens_json = as_json(completion)
    traces.delivered([output])
