"""The two model runners of vLLM: where requests begin and end, how a step is laid out, and runs."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from inspect_lens._engine.hooks.runner import Part
from inspect_lens._engine.step.stepper import Stepper
from inspect_lens._vllm.compat.engine_facts import is_compiled
from inspect_lens._vllm.compat.guard import guarded, idle
from inspect_lens.spec import ENVELOPE_KEY, EnginePath

from .eager_steps import Eager, ask_for_eager, is_eager_step, set_eager


class _Runner:
    """What both have in common. Dummy runs are nobody's steps: the taps are idle in them."""

    def __init__(self, runner: Any, stepper: Stepper) -> None:
        self._runner = runner
        self._stepper = stepper
        self.eager: Eager | None = None
        """What runs hooks of requests; None where this vLLM has not what they need."""

    def _add(self, new: Any) -> None:
        params = new.sampling_params
        extra = params.extra_args if params is not None else None
        if extra and ENVELOPE_KEY in extra:
            self._stepper.add(new.req_id, extra[ENVELOPE_KEY])

    def _end(self) -> None:
        self._stepper.end_step("eager" if is_eager_step() else self._path())

    def _path(self) -> EnginePath:
        return "compiled" if is_compiled(self._runner.vllm_config) else "eager"

    def _end_eager(self) -> None:
        """Leave an eager step, also one that has failed."""
        if self.eager is not None and is_eager_step():
            guarded(self._stepper, self.eager.end)


def _parts(keys: Iterable[str], *columns: Any) -> list[Part]:
    """Requests of a step with first token, number of tokens, and position."""
    rows = zip(keys, *(column.tolist() for column in columns), strict=False)
    return [Part(*row) for row in rows]


class RunnerV1(_Runner):
    def attach(self) -> None:
        runner, stepper = self._runner, self._stepper
        update, prepare, forward = (
            runner._update_states,
            runner._prepare_inputs,
            runner._model_forward,
        )

        @functools.wraps(update)
        def update_states(scheduler_output: Any) -> Any:
            result = update(scheduler_output)
            guarded(stepper, self._follow, scheduler_output)
            return result

        @functools.wraps(prepare)
        def prepare_inputs(scheduler_output: Any, num_scheduled_tokens: Any) -> Any:
            result = prepare(scheduler_output, num_scheduled_tokens)
            if stepper.is_watching:
                guarded(stepper, self._begin, num_scheduled_tokens)
            elif stepper.is_armed:
                guarded(stepper, stepper.disarm)
            if self.eager is not None and self.eager.live:
                guarded(stepper, self._begin_eager, num_scheduled_tokens)
            return result

        @functools.wraps(forward)
        def model_forward(*args: Any, **kwargs: Any) -> Any:
            try:
                result = forward(*args, **kwargs)
                if stepper.is_watching:
                    guarded(stepper, self._end)
                return result
            finally:
                self._end_eager()

        stepper.state.bank.fed.source = self._fed
        runner._dummy_run = idle(stepper, runner._dummy_run)
        runner._update_states = update_states
        runner._prepare_inputs = prepare_inputs
        runner._model_forward = model_forward

    def _follow(self, scheduler_output: Any) -> None:
        stepper = self._stepper
        if stepper.is_watching:
            stepper.finish(scheduler_output.finished_req_ids)
            for key in scheduler_output.finished_req_ids:
                stepper.remove(key)
        for new in scheduler_output.scheduled_new_reqs:
            self._add(new)

    def _layout(self, num_scheduled_tokens: Any) -> tuple[Any, Any, Any, Any]:
        batch = self._runner.input_batch
        counts = np.asarray(num_scheduled_tokens, dtype=np.int64)
        keys = batch.req_ids
        return keys, np.cumsum(counts) - counts, counts, batch.num_computed_tokens_cpu[: len(keys)]

    def _begin(self, num_scheduled_tokens: Any) -> None:
        self._stepper.begin(*self._layout(num_scheduled_tokens))

    def _begin_eager(self, num_scheduled_tokens: Any) -> None:
        assert self.eager is not None
        set_eager(self.eager.begin(_parts(*self._layout(num_scheduled_tokens))))

    def _fed(self) -> torch.Tensor:
        """Ids of the tokens of this step: written before `_prepare_inputs` returns."""
        ids: torch.Tensor = self._runner.input_ids.gpu
        return ids

    def _path(self) -> EnginePath:
        from vllm.forward_context import get_forward_context

        mode = get_forward_context().cudagraph_runtime_mode.name
        paths: dict[str, EnginePath] = {"FULL": "graph", "PIECEWISE": "piecewise"}
        return paths.get(mode) or super()._path()


class RunnerV2(_Runner):
    """Wraps three methods of the runner's model state, and `execute_model`.

    `preprocess_state` runs for real batches only, before the forward pass and before a graph is
    replayed.
    """

    def __init__(self, runner: Any, stepper: Stepper) -> None:
        super().__init__(runner, stepper)
        self._graph: EnginePath | None = None
        self._watched: Any = None
        self._scheduled: Any = None

    def attach(self) -> None:
        self._attach_state()
        stepper, execute = self._stepper, self._runner.execute_model

        def wants_eager() -> bool:
            return bool(guarded(stepper, self._wants_eager))

        @functools.wraps(execute)
        def execute_model(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            if stepper.is_watching:
                guarded(stepper, self._leave, scheduler_output)
            if kwargs.get("dummy_run"):
                return execute(scheduler_output, *args, **kwargs)
            if self.eager is not None:
                self._scheduled = scheduler_output
                ask_for_eager(wants_eager)
            try:
                result = execute(scheduler_output, *args, **kwargs)
                if stepper.is_watching:
                    guarded(stepper, self._end)
                return result
            finally:
                self._scheduled = None
                ask_for_eager(None)
                self._end_eager()

        stepper.state.bank.fed.source = self._fed
        self._runner._dummy_run = idle(stepper, self._runner._dummy_run)
        self._runner.execute_model = execute_model

    def _attach_state(self) -> None:
        stepper, state = self._stepper, self._runner.model_state
        add, remove, preprocess = (
            state.add_request,
            state.remove_request,
            state.preprocess_state,
        )

        @functools.wraps(add)
        def add_request(req_index: int, new_req_data: Any, *args: Any, **kwargs: Any) -> Any:
            guarded(stepper, self._add, new_req_data)
            return add(req_index, new_req_data, *args, **kwargs)

        @functools.wraps(remove)
        def remove_request(req_id: str, *args: Any, **kwargs: Any) -> Any:
            # Also called before every add and on pre-emption; a pre-empted request is added
            # again with its parameters.
            if stepper.is_watching:
                guarded(stepper, stepper.remove, req_id)
            return remove(req_id, *args, **kwargs)

        @functools.wraps(preprocess)
        def preprocess_state(input_batch: Any, *args: Any, **kwargs: Any) -> Any:
            result = preprocess(input_batch, *args, **kwargs)
            if stepper.is_watching:
                guarded(stepper, self._begin, input_batch)
            elif stepper.is_armed:
                guarded(stepper, stepper.disarm)
            if self.eager is not None and is_eager_step():
                guarded(stepper, self._begin_eager, input_batch)
            return result

        state.add_request = add_request
        state.remove_request = remove_request
        state.preprocess_state = preprocess_state

    def _leave(self, scheduler_output: Any) -> None:
        if scheduler_output.finished_req_ids:
            self._stepper.finish(scheduler_output.finished_req_ids)

    def _begin(self, input_batch: Any) -> None:
        self._watch_graphs()
        self._stepper.begin(*_layout_v2(input_batch))

    def _begin_eager(self, input_batch: Any) -> None:
        assert self.eager is not None
        self.eager.begin(_parts(*_layout_v2(input_batch)))

    def _wants_eager(self) -> bool:
        scheduled = self._scheduled.num_scheduled_tokens
        return self.eager is not None and any(key in scheduled for key in self.eager.live)

    def _fed(self) -> torch.Tensor:
        """Ids of the tokens of this step: written before `preprocess_state` is called."""
        ids: torch.Tensor = self._runner.input_buffers.input_ids
        return ids

    def _watch_graphs(self) -> None:
        """Learn which kind of graph a step replays; the manager is made after loading."""
        self._graph = None
        manager = getattr(self._runner, "cudagraph_manager", None)
        if manager is None or manager is self._watched:
            return
        self._watched = manager
        kinds: dict[str, EnginePath] = {"run_fullgraph": "graph", "run_pw_graph": "piecewise"}
        for name, kind in kinds.items():
            setattr(manager, name, self._noting(getattr(manager, name), kind))

    def _noting(self, original: Any, kind: EnginePath) -> Any:
        @functools.wraps(original)
        def run(*args: Any, **kwargs: Any) -> Any:
            self._graph = kind
            return original(*args, **kwargs)

        return run

    def _path(self) -> EnginePath:
        return self._graph or super()._path()


def _layout_v2(input_batch: Any) -> tuple[Any, Any, Any, Any]:
    return (
        input_batch.req_ids,
        input_batch.query_start_loc_np[:-1],
        input_batch.num_scheduled_tokens,
        input_batch.num_computed_tokens_np,
    )


def adapter_of(runner: Any, stepper: Stepper) -> RunnerV1 | RunnerV2:
    """What attaches a stepper to a runner; the newer one keeps per-model state in an object."""
    return (RunnerV2 if hasattr(runner, "model_state") else RunnerV1)(runner, stepper)
