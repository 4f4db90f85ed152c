"""Steps that run eagerly: those in which a request with hooks runs.

vLLM has the means for encoder-decoder models: a step can be told to replay no graph, and to call
the model as it was before compilation. Here a step is told so when one of its requests needs
Python in the layers; the steps before and behind it are compiled or replayed as ever.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from inspect_lens._engine.hooks.runner import HookRunner, Part
from inspect_lens._engine.hooks.stepper import HookedStepper
from inspect_lens._engine.protocol.exceptions import ends_process
from inspect_lens._vllm.compat.guard import guarded
from inspect_lens._vllm.compat.seam_table import EAGER_SEAMS
from inspect_lens._vllm.compat.seams import seam, verify, wrap
from inspect_lens._vllm.model.ranks import Ranks
from inspect_lens.errors import CaptureError

from .layer_hooks import LayerHooks

__all__ = ["EagerV1", "EagerV2", "checked_steps", "is_eager_step", "note", "wrap_eager_seams"]

_READY = "ready"


class _Step:
    """The step that this process runs; class attributes, so that no `global` is needed."""

    is_eager = False
    wants_eager: Callable[[], bool] | None = None
    """Asked where the V2 runner chooses its graph; set while a real step runs."""
    modes: list[str] | None = None
    """Names of the modes that vLLM has chosen; kept during the start-up check only."""


def is_eager_step() -> bool:
    """Whether the step that runs was told to run eagerly."""
    return _Step.is_eager


@contextmanager
def checked_steps(*, is_eager: bool) -> Iterator[list[str]]:
    """Have vLLM run the passes of the start-up check eagerly, or as it chooses.

    Args:
        is_eager: whether they replay no graph and call the model as it was before compilation.

    Yields:
        Names of the modes of graphs that vLLM chooses, pass by pass; filled while it runs.
    """
    modes: list[str] = []
    _Step.modes = modes
    if is_eager:
        _Step.is_eager, _Step.wants_eager = True, lambda: True
    try:
        yield modes
    finally:
        _Step.modes = _Step.wants_eager = None
        _Step.is_eager = False


def note(chosen: Any) -> Any:
    """Note the mode of graphs that vLLM has chosen for a pass of the start-up check.

    Args:
        chosen: what its function returned: first the mode, or what has it as `cg_mode`.
    """
    if _Step.modes is not None:
        first = chosen[0] if isinstance(chosen, tuple) else chosen
        mode = getattr(first, "cg_mode", first)
        _Step.modes.append(str(getattr(mode, "name", "NONE")))
    return chosen


def wrap_eager_seams(*, is_v2: bool) -> None:
    """Wrap where vLLM decides how a step runs.

    Args:
        is_v2: whether steps run in the V2 model runner. The other's module is left alone: to
            import it takes seconds, and a worker has one of the two.

    Raises:
        CompatError: this vLLM cannot be told.
    """
    dispatch = ("dispatch_v2", _dispatch_v2) if is_v2 else ("dispatch_v1", _dispatch_v1)
    wrappers = dict([("forward_context", _forward_context), dispatch])
    verify(tuple(item for item in EAGER_SEAMS if item.name in wrappers))
    for name, make in wrappers.items():
        wrap(seam(name), make)


def _forward_context(original: Callable[..., Any]) -> Callable[..., Any]:
    def create_forward_context(*args: Any, **kwargs: Any) -> Any:
        context = original(*args, **kwargs)
        if _Step.is_eager:
            context.skip_compiled = True
        return context

    return create_forward_context


def _dispatch_v1(original: Callable[..., Any]) -> Callable[..., Any]:
    def determine(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _Step.is_eager:
            kwargs["force_eager"] = True
        return note(original(self, *args, **kwargs))

    return determine


def _dispatch_v2(original: Callable[..., Any]) -> Callable[..., Any]:
    def dispatch(*args: Any, **kwargs: Any) -> Any:
        if _Step.wants_eager is not None and _Step.wants_eager():
            _Step.is_eager = True
            kwargs["need_eager"] = True
        return note(original(*args, **kwargs))

    return dispatch


class _Eager:
    """What both runners do around an eager step."""

    def __init__(
        self, runner: Any, stepper: HookedStepper, layers: LayerHooks, ranks: Ranks
    ) -> None:
        """Store what steps need.

        Args:
            runner: vLLM's.
            stepper: of the worker.
            layers: puts hooks into the model's layers.
            ranks: those that run each step with this worker.
        """
        assert stepper.hooks is not None
        self._runner = runner
        self._stepper = stepper
        self._hooks: HookRunner = stepper.hooks
        self._layers = layers
        self._ranks = ranks

    def _arm(self, parts: list[Part]) -> bool:
        if not any(part.key in self._hooks.live for part in parts):
            self._hooks.begin(())
            return False
        problem: BaseException | None = None
        try:
            self._layers.arm(self._hooks.begin(parts))
        except BaseException as error:  # noqa: BLE001 - raised when the other ranks know
            problem = error
        if problem is None and all(said == _READY for said in self._ranks.say(_READY)):
            return True
        # What is half put in would run in steps of others; and ranks would wait for this one.
        self._layers.disarm()
        self._hooks.begin(())
        if problem is not None:
            if not ends_process(problem):
                self._ranks.say("")
            raise problem
        raise CaptureError("hooks could not run: they were not put in on another rank")

    def _end(self) -> None:
        """Take the hooks out of the layers again, and fail the requests that have to fail."""
        _Step.is_eager = False
        self._layers.disarm()
        for key, error in self._hooks.end():
            self._stepper.fail(key, error)


class EagerV1(_Eager):
    """Wraps two methods of a V1 runner; put on after `RunnerV1`, so that it lies outside."""

    def attach(self) -> None:
        """Wrap the runner."""
        prepare, forward = self._runner._prepare_inputs, self._runner._model_forward

        @functools.wraps(prepare)
        def prepare_inputs(scheduler_output: Any, num_scheduled_tokens: Any) -> Any:
            result = prepare(scheduler_output, num_scheduled_tokens)
            if self._hooks.live:
                guarded(self._stepper, self._begin, num_scheduled_tokens)
            return result

        @functools.wraps(forward)
        def model_forward(*args: Any, **kwargs: Any) -> Any:
            try:
                return forward(*args, **kwargs)
            finally:
                if _Step.is_eager:
                    guarded(self._stepper, self._end)

        self._runner._prepare_inputs = prepare_inputs
        self._runner._model_forward = model_forward

    def _begin(self, num_scheduled_tokens: Any) -> None:
        batch = self._runner.input_batch
        parts, start = [], 0
        for key, count, position in zip(
            batch.req_ids,
            num_scheduled_tokens.tolist(),
            batch.num_computed_tokens_cpu.tolist(),
            strict=False,
        ):
            parts.append(Part(key, start, count, position))
            start += count
        _Step.is_eager = self._arm(parts)


class EagerV2(_Eager):
    """Wraps two methods of a V2 runner; put on after `RunnerV2`, so that it lies outside."""

    def __init__(
        self, runner: Any, stepper: HookedStepper, layers: LayerHooks, ranks: Ranks
    ) -> None:
        """See `_Eager`."""
        super().__init__(runner, stepper, layers, ranks)
        self._scheduled: Any = None

    def attach(self) -> None:
        """Wrap the runner and its model state."""
        state = self._runner.model_state
        preprocess, execute = state.preprocess_state, self._runner.execute_model

        @functools.wraps(preprocess)
        def preprocess_state(input_batch: Any, *args: Any, **kwargs: Any) -> Any:
            result = preprocess(input_batch, *args, **kwargs)
            if _Step.is_eager:
                guarded(self._stepper, self._begin, input_batch)
            return result

        def wants_eager() -> bool:
            return bool(guarded(self._stepper, self._wants_eager))

        @functools.wraps(execute)
        def execute_model(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            if kwargs.get("dummy_run"):
                return execute(scheduler_output, *args, **kwargs)
            self._scheduled = scheduler_output
            _Step.wants_eager = wants_eager
            try:
                return execute(scheduler_output, *args, **kwargs)
            finally:
                _Step.wants_eager = self._scheduled = None
                if _Step.is_eager:
                    guarded(self._stepper, self._end)

        state.preprocess_state = preprocess_state
        self._runner.execute_model = execute_model

    def _wants_eager(self) -> bool:
        live = self._hooks.live
        if not live:
            return False
        scheduled = self._scheduled.num_scheduled_tokens
        return any(key in scheduled for key in live)

    def _begin(self, input_batch: Any) -> None:
        self._arm(
            [
                Part(key, start, count, position)
                for key, start, count, position in zip(
                    input_batch.req_ids,
                    input_batch.query_start_loc_np.tolist(),
                    input_batch.num_scheduled_tokens.tolist(),
                    input_batch.num_computed_tokens_np.tolist(),
                    strict=False,
                )
            ]
        )
