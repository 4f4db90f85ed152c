"""The boundary between our code and vLLM's shared loops: nothing of ours raises into them.

A loop that many requests share ends for all of them when one iteration raises. So whatever goes
wrong in our code there, also a `SystemExit`, becomes the error of the requests that it concerns.
`DOORS` lists every place where such a loop enters our code; a contract test finds them anew.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from inspect_lens._engine.protocol.processes import as_exception, ends_process
from inspect_lens._engine.step.stepper import Stepper
from inspect_lens._vllm.metrics import refused
from inspect_lens.errors import CaptureError, LensError

__all__ = ["DOORS", "Door", "fault_of", "guarded", "idle", "pass_over"]

logger = logging.getLogger("vllm.inspect_lens")

Loop = Literal[
    "step loop",
    "scheduler",
    "worker calls",
    "output handler",
    "receiving thread",
    "event loop",
    "sink",
    "own call",
]


@dataclass(frozen=True)
class Door:
    """A place where code of vLLM, or a thread that requests share, enters our code."""

    where: str
    """`module:function`, below `inspect_lens`; nested functions behind a dot."""
    loop: Loop
    """What would end. In an `own call` one request's own coroutine runs."""
    fails: str
    """Whose error a fault becomes."""


_OWN = "the request itself; one without the lens goes on as if there were no plug-in"

DOORS: tuple[Door, ...] = (
    # The worker's step loop, with two model runners.
    Door("_vllm.worker.runner_v1:RunnerV1.attach.update_states", "step loop", "all lens requests"),
    Door("_vllm.worker.runner_v1:RunnerV1.attach.prepare_inputs", "step loop", "all lens requests"),
    Door("_vllm.worker.runner_v1:RunnerV1.attach.model_forward", "step loop", "all lens requests"),
    Door("_vllm.worker.runner_v2:RunnerV2.attach.add_request", "step loop", "all lens requests"),
    Door("_vllm.worker.runner_v2:RunnerV2.attach.remove_request", "step loop", "all lens requests"),
    Door(
        "_vllm.worker.runner_v2:RunnerV2.attach.preprocess_state", "step loop", "all lens requests"
    ),
    Door("_vllm.worker.runner_v2:RunnerV2.attach.execute_model", "step loop", "all lens requests"),
    Door("_vllm.compat.guard:idle.run", "step loop", "all lens requests"),
    Door(
        "_vllm.worker.eager_steps:EagerV1.attach.prepare_inputs", "step loop", "all lens requests"
    ),
    Door("_vllm.worker.eager_steps:EagerV1.attach.model_forward", "step loop", "all lens requests"),
    Door(
        "_vllm.worker.eager_steps:EagerV2.attach.preprocess_state", "step loop", "all lens requests"
    ),
    Door("_vllm.worker.eager_steps:EagerV2.attach.execute_model", "step loop", "all lens requests"),
    Door("_vllm.worker.eager_steps:EagerV2.attach.wants_eager", "step loop", "all lens requests"),
    Door(
        "_vllm.worker.eager_steps:LayerHooks._before",
        "step loop",
        "requests with hooks of the step",
    ),
    Door(
        "_vllm.worker.eager_steps:LayerHooks._after", "step loop", "requests with hooks of the step"
    ),
    Door("_engine.hooks.runner:HookRunner.run", "step loop", "the request whose hook it is"),
    # The scheduler's loop, before a step.
    Door(
        "_vllm.engine_core.cache_hits:_get_computed_blocks.get_computed_blocks",
        "scheduler",
        "nobody's: its prompt is computed",
    ),
    Door(
        "_vllm.engine_core.connector_guard:GuardedConnector.on_new_request",
        "scheduler",
        "nobody's: the KV connector is not told of the request",
    ),
    Door(
        "_vllm.engine_core.connector_guard:GuardedConnector.get_num_new_matched_tokens",
        "scheduler",
        "nobody's: its prompt is computed",
    ),
    Door(
        "_vllm.engine_core.connector_guard:GuardedConnector._marked",
        "scheduler",
        "nobody's: the engine that goes on computes the prompt again",
    ),
    # Calls to all workers, which run between two steps.
    Door("_vllm.worker.rpc:manage_hooks", "worker calls", "the caller"),
    Door("_vllm.worker.worker:register", "worker calls", "the caller"),
    # One task of the API server, or of `AsyncLLM`, hands all outputs out.
    Door(
        "_vllm.frontend.wrappers:_new_completion_output.new_completion_output",
        "output handler",
        "it",
    ),
    Door("_vllm.results.alarms:stop_at_alarm.update_or_stop", "output handler", "it"),
    Door("_vllm.frontend.wrappers:_output_add.add", "output handler", "it"),
    Door("_vllm.frontend.wrappers:_abort_requests.abort_requests", "output handler", "nobody's"),
    # One thread of the front-end receives all rows.
    Door(
        "_engine.collect.collector:Collector._receive",
        "receiving thread",
        "requests of the message",
    ),
    Door(
        "_engine.collect.notifier:News.tell", "receiving thread", "nobody's: who waits looks again"
    ),
    # A thread of the front-end, and one of the worker for each front-end, serve other hosts.
    Door(
        "_engine.collect.listener:Listener._run",
        "receiving thread",
        "nobody's: a worker that sends nonsense is dropped, and its requests fail",
    ),
    Door(
        "_engine.export.link:Link._run",
        "receiving thread",
        "requests of that front-end: the link ends",
    ),
    # Threads of sinks, which nobody waits for but who asked to.
    Door("_vllm.sinks.recorder:Recorder._run", "sink", "nobody's: the sink goes on"),
    Door(
        "_vllm.results.recorded:Recorded._run",
        "sink",
        "nobody's: requests by rule that were under way are not recorded",
    ),
    # Callbacks of the event loop.
    Door("_vllm.results.event_loop:Arrivals._look", "event loop", "requests that wait there"),
    Door(
        "_vllm.results.event_loop:Arrivals._attach_some", "event loop", "requests that wait there"
    ),
    # Coroutines and calls of one request, where a SystemExit would still end the event loop.
    Door("_vllm.frontend.wrappers:_verify_args.verify_args", "own call", _OWN),
    Door("_vllm.frontend.wrappers:_process_inputs.process_inputs", "own call", _OWN),
    Door("_vllm.frontend.wrappers:_add_request.add_request", "own call", _OWN),
    Door("_vllm.frontend.wrappers:_async_generate.generate", "own call", _OWN),
    Door("_vllm.frontend.wrappers:attached_for_http", "own call", "the request itself"),
    Door("_vllm.frontend.wrappers:_engine_step.step", "own call", "requests of the step"),
    Door("_vllm.http.responses:decorate", "own call", _OWN),
    Door("_vllm.http.responses:_collect", "own call", _OWN),
    Door("_vllm.http.responses:_tokens_full.full", "own call", _OWN),
    Door("_vllm.http.responses:_to_sampling_params.to_sampling_params", "own call", _OWN),
    Door("_vllm.http.responses:_refuse.make.refusing", "own call", _OWN),
    Door("_vllm.http.bodies:LensBodies.__call__", "own call", _OWN),
)
"""Every door; `tests/contracts/test_doors.py` holds that the list is whole and all are guarded."""


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
