"""Eager steps on runners that have nothing but what is wrapped: told, armed, run, taken back."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from inspect_lens import Hook
from inspect_lens._engine.hooks.runner import EAGER_KEY, HookRunner
from inspect_lens._vllm.model.parameters import Ranks
from inspect_lens._vllm.registered.persistent_hooks import packed_hook
from inspect_lens._vllm.worker import runners
from inspect_lens._vllm.worker.runners import Eager, LayerHooks, RunnerV1, RunnerV2

HIDDEN = 4
Steps = dict[str, tuple[int, int]]
"""By request: position and tokens."""


class Block(nn.Module):
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return hidden_states + 1


class Runner:
    """What both of vLLM's runners do in a step, with one layer for a model."""

    def __init__(self) -> None:
        self.block = Block()
        nothing = lambda *args, **kwargs: None  # noqa: E731
        self.model_state = SimpleNamespace(
            add_request=nothing, remove_request=nothing, preprocess_state=nothing
        )
        self._update_states = self._dummy_run = nothing
        self.told: list[tuple[bool, bool]] = []
        """Of each step: whether no graph was wanted, and whether compilation was skipped."""
        self.out = torch.zeros(0)
        self.fails = False
        self._dispatch = runners._dispatch_v2(lambda **kw: kw["need_eager"])
        self._determine = runners._dispatch_v1(lambda _, force_eager=False: force_eager)
        self._context = runners._forward_context(lambda: SimpleNamespace(skip_compiled=False))
        self.input_batch: Any = None
        self.device = torch.device("cuda")

    def forward(self, no_graph: bool, n: int) -> None:
        if self.fails:
            raise RuntimeError("the model failed")
        self.out = self.block(hidden_states=torch.zeros(n, HIDDEN))
        self.told.append((no_graph, self._context().skip_compiled))

    # V2

    def execute_model(self, scheduled: Any, dummy_run: bool = False) -> None:
        steps: Steps = scheduled.steps
        no_graph = self._dispatch(need_eager=False)
        counts = np.asarray([n for _, n in steps.values()])
        if not dummy_run:
            self.model_state.preprocess_state(
                SimpleNamespace(
                    req_ids=list(steps),
                    query_start_loc_np=np.concatenate([[0], np.cumsum(counts)]),
                    num_scheduled_tokens=counts,
                    num_computed_tokens_np=np.asarray([p for p, _ in steps.values()]),
                )
            )
        self.forward(no_graph, int(counts.sum()))

    # V1

    def _prepare_inputs(self, scheduled: Any, counts: Any) -> None:
        steps: Steps = scheduled.steps
        self.input_batch = SimpleNamespace(
            req_ids=list(steps),
            num_computed_tokens_cpu=np.asarray([p for p, _ in steps.values()] + [0, 0]),
        )

    def _model_forward(self, no_graph: bool, n: int) -> None:
        self.forward(no_graph, n)

    def step(self, steps: Steps, *, is_v2: bool, dummy_run: bool = False) -> None:
        scheduled = SimpleNamespace(
            steps=steps,
            num_scheduled_tokens={key: n for key, (_, n) in steps.items()},
            scheduled_spec_decode_tokens={},
        )
        if is_v2:
            self.execute_model(scheduled, dummy_run=dummy_run)
            return
        counts = np.asarray([n for _, n in steps.values()], dtype=np.int32)
        if dummy_run:
            self.forward(self._determine(None), int(counts.sum()))
            return
        self._prepare_inputs(scheduled, counts)
        self._model_forward(self._determine(None), int(counts.sum()))


class Stepper:
    def __init__(self, hooks: HookRunner) -> None:
        self.hooks = hooks
        self.failed: dict[str, str] = {}
        self.is_watching = self.is_armed = False
        self.stages = None
        self.state = SimpleNamespace(bank=SimpleNamespace(fed=SimpleNamespace(source=None)))

    def replays_none(self, keys: Any) -> bool:
        return False

    def fail(self, key: str, error: Exception) -> None:
        self.failed[key] = str(error)
        self.hooks.drop(key)

    def fail_all(self, error: Exception) -> None:
        raise AssertionError from error


@pytest.fixture(params=[False, True], ids=["V1", "V2"])
def is_v2(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture
def made(is_v2: bool, monkeypatch: pytest.MonkeyPatch) -> tuple[Runner, Stepper]:
    monkeypatch.setattr(runners, "layout_here", lambda layer: "fused")
    runner = Runner()
    stepper: Any = Stepper(HookRunner(layers=[0], allowed=True, most_bytes=1 << 20))
    state: Any = SimpleNamespace(is_active=False)
    layers = LayerHooks([runner.block], stepper.hooks, state, lambda asks: nullcontext())
    adapter = (RunnerV2 if is_v2 else RunnerV1)(runner, stepper)
    adapter.eager = Eager(stepper, layers, Ranks(SimpleNamespace(world_size=1)))
    adapter.attach()
    return runner, stepper


def add(stepper: Stepper, key: str, function: Any) -> None:
    hook = packed_hook(Hook(fn=function, layer_indices=[0]))
    asked = {"own": [hook], "persistent": []}
    stepper.hooks.add(key, {"reply": "", "pid": 0, EAGER_KEY: asked})


def test_only_steps_with_such_a_request_are_eager(
    made: tuple[Runner, Stepper], is_v2: bool
) -> None:
    runner, stepper = made
    runner.step({"x": (0, 2)}, is_v2=is_v2)
    add(stepper, "a", lambda ctx, h: h * 10)
    runner.step({"x": (2, 1), "y": (0, 2)}, is_v2=is_v2)
    runner.step({"x": (3, 1), "a": (0, 3), "y": (2, 1)}, is_v2=is_v2)
    assert runner.out[:, 0].tolist() == [1, 10, 10, 10, 1]
    runner.step({"a": (3, 1)}, is_v2=is_v2, dummy_run=True)
    assert runner.out[:, 0].tolist() == [1]
    runner.step({"y": (3, 1), "a": (3, 1)}, is_v2=is_v2)
    assert runner.out[:, 0].tolist() == [1, 10]
    stepper.hooks.remove("a")
    runner.step({"x": (4, 1)}, is_v2=is_v2)
    eager, ordinary = (True, True), (False, False)
    assert runner.told == [ordinary, ordinary, eager, ordinary, eager, ordinary]
    assert not runner.block._forward_hooks
    assert not stepper.failed


def test_a_request_that_fails_leaves_the_engine_as_it_was(
    made: tuple[Runner, Stepper], is_v2: bool
) -> None:
    runner, stepper = made

    def bad(ctx: Any, h: Any) -> Any:
        raise ValueError("no")

    add(stepper, "a", bad)
    runner.step({"a": (0, 2), "x": (0, 1)}, is_v2=is_v2)
    assert runner.out[:, 0].tolist() == [1, 1, 1]
    assert "ValueError: no" in stepper.failed["a"]
    # Eager until the scheduler removes it: other ranks may not know that it failed.
    runner.step({"a": (2, 1), "x": (1, 1)}, is_v2=is_v2)
    stepper.hooks.remove("a")
    runner.step({"x": (2, 1)}, is_v2=is_v2)
    assert runner.told == [(True, True), (True, True), (False, False)]


def test_a_forward_pass_that_fails_takes_the_hooks_out(
    made: tuple[Runner, Stepper], is_v2: bool
) -> None:
    runner, stepper = made
    add(stepper, "a", lambda ctx, h: h)
    runner.fails = True
    with pytest.raises(RuntimeError, match="the model failed"):
        runner.step({"a": (0, 2)}, is_v2=is_v2)
    assert not runners._Step.is_eager
    assert not runner.block._forward_hooks
