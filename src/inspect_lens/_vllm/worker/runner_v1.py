"""The V1 model runner: where a request begins and ends, how a step is laid out, and when it ran."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch

from inspect_lens._engine.step.stepper import Stepper
from inspect_lens._vllm.compat.engine_facts import is_compiled
from inspect_lens._vllm.compat.guard import guarded, idle
from inspect_lens.spec import ENVELOPE_KEY, EnginePath

from .eager_steps import is_eager_step

__all__ = ["RunnerV1"]


class RunnerV1:
    """Wraps three methods of one runner object.

    Dummy and profile runs call the model directly and never pass here: the taps are made idle
    before them.
    """

    def __init__(self, runner: Any, stepper: Stepper) -> None:
        self._runner = runner
        self._stepper = stepper

    def attach(self) -> None:
        """Wrap the runner."""
        runner = self._runner
        update, prepare, forward = (
            runner._update_states,
            runner._prepare_inputs,
            runner._model_forward,
        )

        @functools.wraps(update)
        def update_states(scheduler_output: Any) -> Any:
            result = update(scheduler_output)
            guarded(self._stepper, self._follow, scheduler_output)
            return result

        @functools.wraps(prepare)
        def prepare_inputs(scheduler_output: Any, num_scheduled_tokens: Any) -> Any:
            result = prepare(scheduler_output, num_scheduled_tokens)
            if self._stepper.is_watching:
                guarded(self._stepper, self._begin, num_scheduled_tokens)
            elif self._stepper.is_armed:
                guarded(self._stepper, self._stepper.disarm)
            return result

        @functools.wraps(forward)
        def model_forward(*args: Any, **kwargs: Any) -> Any:
            result = forward(*args, **kwargs)
            if self._stepper.is_watching:
                guarded(self._stepper, self._end)
            return result

        self._stepper.state.bank.fed.source = self._fed
        runner._dummy_run = idle(self._stepper, runner._dummy_run)
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
            params = new.sampling_params
            extra = params.extra_args if params is not None else None
            if extra and ENVELOPE_KEY in extra:
                stepper.add(new.req_id, extra[ENVELOPE_KEY])

    def _begin(self, num_scheduled_tokens: Any) -> None:
        batch = self._runner.input_batch
        counts = np.asarray(num_scheduled_tokens, dtype=np.int64)
        keys = batch.req_ids
        self._stepper.begin(
            keys, np.cumsum(counts) - counts, counts, batch.num_computed_tokens_cpu[: len(keys)]
        )

    def _fed(self) -> torch.Tensor:
        """Ids of the tokens of this step: written before `_prepare_inputs` returns."""
        ids: torch.Tensor = self._runner.input_ids.gpu
        return ids

    def _end(self) -> None:
        self._stepper.end_step(self._path())

    def _path(self) -> EnginePath:
        if is_eager_step():
            return "eager"
        from vllm.forward_context import get_forward_context

        mode = get_forward_context().cudagraph_runtime_mode.name
        if mode == "FULL":
            return "graph"
        if mode == "PIECEWISE":
            return "piecewise"
        return "compiled" if is_compiled(self._runner.vllm_config) else "eager"
