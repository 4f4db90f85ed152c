"""The V2 model runner: where a request begins and ends, how a step is laid out, and when it ran."""

from __future__ import annotations

import functools
from typing import Any

import torch

from inspect_lens._engine.step.stepper import Stepper
from inspect_lens._vllm.compat.engine_facts import is_compiled
from inspect_lens._vllm.compat.guard import guarded, idle
from inspect_lens.spec import ENVELOPE_KEY, EnginePath

from .eager_steps import is_eager_step

__all__ = ["RunnerV2"]


class RunnerV2:
    """Wraps three methods of the runner's model state, and `execute_model`.

    `preprocess_state` runs for real batches only, before the forward pass and before a graph is
    replayed. Dummy runs never pass there: the taps are made idle before them.
    """

    def __init__(self, runner: Any, stepper: Stepper) -> None:
        self._runner = runner
        self._stepper = stepper
        self._graph: EnginePath | None = None
        self._watched: Any = None

    def attach(self) -> None:
        """Wrap the runner."""
        state = self._runner.model_state
        add, remove, preprocess = (
            state.add_request,
            state.remove_request,
            state.preprocess_state,
        )
        execute, dummy_run = self._runner.execute_model, self._runner._dummy_run

        @functools.wraps(add)
        def add_request(req_index: int, new_req_data: Any, *args: Any, **kwargs: Any) -> Any:
            guarded(self._stepper, self._add, new_req_data)
            return add(req_index, new_req_data, *args, **kwargs)

        @functools.wraps(remove)
        def remove_request(req_id: str, *args: Any, **kwargs: Any) -> Any:
            # Also called before every add and on pre-emption; a pre-empted request is added
            # again with its parameters.
            if self._stepper.is_watching:
                guarded(self._stepper, self._stepper.remove, req_id)
            return remove(req_id, *args, **kwargs)

        @functools.wraps(preprocess)
        def preprocess_state(input_batch: Any, *args: Any, **kwargs: Any) -> Any:
            result = preprocess(input_batch, *args, **kwargs)
            if self._stepper.is_watching:
                guarded(self._stepper, self._begin, input_batch)
            elif self._stepper.is_armed:
                guarded(self._stepper, self._stepper.disarm)
            return result

        @functools.wraps(execute)
        def execute_model(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            if self._stepper.is_watching:
                guarded(self._stepper, self._leave, scheduler_output)
            result = execute(scheduler_output, *args, **kwargs)
            if self._stepper.is_watching and not kwargs.get("dummy_run"):
                guarded(self._stepper, self._end)
            return result

        self._stepper.state.bank.fed.source = self._fed
        state.add_request = add_request
        self._runner._dummy_run = idle(self._stepper, dummy_run)
        state.remove_request = remove_request
        state.preprocess_state = preprocess_state
        self._runner.execute_model = execute_model

    def _add(self, new_req_data: Any) -> None:
        params = new_req_data.sampling_params
        extra = params.extra_args if params is not None else None
        if extra and ENVELOPE_KEY in extra:
            self._stepper.add(new_req_data.req_id, extra[ENVELOPE_KEY])

    def _leave(self, scheduler_output: Any) -> None:
        if scheduler_output.finished_req_ids:
            self._stepper.finish(scheduler_output.finished_req_ids)

    def _begin(self, input_batch: Any) -> None:
        self._watch_graphs()
        self._stepper.begin(
            input_batch.req_ids,
            input_batch.query_start_loc_np[:-1],
            input_batch.num_scheduled_tokens,
            input_batch.num_computed_tokens_np,
        )

    def _fed(self) -> torch.Tensor:
        """Ids of the tokens of this step: written before `preprocess_state` is called."""
        ids: torch.Tensor = self._runner.input_buffers.input_ids
        return ids

    def _end(self) -> None:
        self._stepper.end_step(self._path())

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
        if is_eager_step():
            return "eager"
        return self._graph or ("compiled" if is_compiled(self._runner.vllm_config) else "eager")
