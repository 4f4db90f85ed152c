"""In the worker process: what it takes to run hooks, and the calls that manage persistent ones."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from inspect_lens._engine.export.transport import Exporter
from inspect_lens._engine.hooks.runner import HookedStepper, HookRunner
from inspect_lens._engine.protocol.processes import ends_process
from inspect_lens._settings import Settings
from inspect_lens._vllm.model.parameters import Parameters
from inspect_lens._vllm.model.ranks import Ranks
from inspect_lens.errors import LensError
from inspect_lens.spec import EngineFacts

from .eager_steps import Eager, LayerHooks, patch_eager_steps
from .runners import RunnerV1, RunnerV2

logger = logging.getLogger("vllm.inspect_lens")


def attach_hooks(
    runner: Any,
    adapter: RunnerV1 | RunnerV2,
    stepper: HookedStepper,
    exporter: Exporter | None,
    blocks: Sequence[nn.Module | None],
    facts: EngineFacts,
    settings: Settings,
) -> None:
    """Make a worker ready for requests with hooks."""
    patch_eager_steps(is_v2=isinstance(adapter, RunnerV2))
    model = runner.get_model()
    parameters = Parameters(model)
    stepper.hooks = HookRunner(
        layers=[layer for layer in facts.layers if blocks[layer] is not None],
        allowed=settings.allow_code,
        most_bytes=settings.hook_bytes,
        model=model,
        parameter=parameters.get,
        send=None if exporter is None else exporter.send_saved,
    )
    layers = LayerHooks(blocks, stepper.hooks, stepper.state, parameters.together)
    adapter.eager = Eager(stepper, layers, Ranks.here())
    runner.inspect_lens_parameters = parameters
    if settings.allow_code:
        logger.warning(
            "inspect_lens: INSPECT_LENS_ALLOW_CODE is set: whoever can send requests to this "
            "engine can run any code in it"
        )


def manage_hooks(worker: Any, action: str, payload: Any) -> str | None:
    """Manage persistent hooks; `collective_rpc("inspect_lens_hooks")` calls it on all workers."""
    runner = worker.model_runner
    stepper: HookedStepper | None = getattr(runner, "inspect_lens", None)
    parameters: Parameters | None = getattr(runner, "inspect_lens_parameters", None)
    try:
        if action == "prefetch":
            # A pipeline stage without taps has no hooks, and may have what others want.
            (parameters or Parameters(runner.get_model())).prefetch(payload)
        elif stepper is None or stepper.hooks is None or parameters is None:
            return None
        elif action == "register":
            _register(stepper.hooks, payload)
        elif action == "unregister":
            stepper.hooks.unregister(payload)
        elif action == "flush":
            stepper.flush(payload)
        elif action == "clear_prefetched":
            parameters.clear()
        else:
            raise LensError(f"unknown action {action!r}")
    except BaseException as error:
        # Told to the caller, see above; a function that is read here may raise what it likes.
        if ends_process(error, in_user_code=True):
            raise
        return f"{type(error).__name__}: {error}"
    return None


def _register(hooks: HookRunner, items: Mapping[str, Mapping[str, Any]]) -> None:
    for name, item in items.items():
        hooks.register(name, item)
