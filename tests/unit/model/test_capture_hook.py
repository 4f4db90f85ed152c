"""INSPECT_LENS_CAPTURE: capture in any call of our models, and no cost without it."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import numpy as np
import pytest
from inspect_ai.event import ModelEvent
from inspect_ai.log import EvalLog
from inspect_ai.model import GenerateConfig
from inspect_ai.solver import Generate, Solver, TaskState, generate, solver

from inspect_lens.model import activations, lens_scope
from inspect_lens.model._host import PrerequisiteError
from inspect_lens.spec import CaptureSpec, SteeringVector, parse_extra_args

VARIABLE = "INSPECT_LENS_CAPTURE"


def layers(log: EvalLog) -> Any:
    assert log.status == "success", log.error
    handle = activations((log.samples or [])[0].output)
    return None if handle is None else handle.layers


def test_every_call_captures_and_the_rest_of_the_body_stays(
    server: Any, run_eval: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = GenerateConfig(extra_body={"chat_template_kwargs": {"enable_thinking": False}})
    assert layers(run_eval(server, n=1, config=config, solver=generate())) is None
    monkeypatch.setenv(VARIABLE, "1,2")
    assert layers(run_eval(server, n=1, config=config, solver=generate())) == (1, 2)
    assert server.requests[-1]["chat_template_kwargs"] == {"enable_thinking": False}
    monkeypatch.setenv(VARIABLE, '{"layers": [3], "positions": "completion"}')
    assert layers(run_eval(server, n=1, solver=generate())) == (3,)


def test_what_a_call_says_goes_first(
    server: Any, run_eval: Any, model_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "1")
    own = GenerateConfig(extra_body={"extra_args": {"output_residual_stream": [2]}})
    assert layers(run_eval(server, n=1, config=own, solver=generate())) == (2,)
    none = GenerateConfig(extra_body={"extra_args": {"output_residual_stream": False}})
    assert layers(run_eval(server, n=1, config=none, solver=generate())) is None
    model = model_of(server, capture=[3])
    assert layers(run_eval(server, n=1, model=model, solver=generate())) == (3,)


@pytest.mark.parametrize("by_model", [False, True])
def test_scopes_go_before_the_variable(
    server: Any, run_eval: Any, model_of: Any, monkeypatch: pytest.MonkeyPatch, by_model: bool
) -> None:
    @solver
    def scoped() -> Solver:
        async def solve(state: TaskState, generate: Generate) -> TaskState:
            # A scope without a capture leaves that to what comes behind it.
            with lens_scope(steer=vector):
                await generate(deepcopy(state))
            with lens_scope(capture={"layers": [0], "positions": "completion"}, steer=vector):
                return await generate(state)

        return solve

    vector = SteeringVector(activations=np.ones((1, 8)), layer_indices=[1])
    monkeypatch.setenv(VARIABLE, "1")
    model = model_of(server, capture=[3]) if by_model else None
    log = run_eval(server, n=1, solver=scoped(), model=model)
    assert layers(log) == (0,)
    first, second = (parse_extra_args(body["vllm_xargs"]) for body in server.requests)
    assert first is not None
    assert second is not None
    assert first.capture == CaptureSpec(layers=(3,) if by_model else (1,), transport="binary")
    assert second.capture == CaptureSpec(layers=(0,), positions="completion", transport="binary")
    assert len(first.edits) == len(second.edits) == 1
    # The log says what was sent, and equal calls have one cache key.
    events = [e for e in log.samples[0].events if isinstance(e, ModelEvent)]
    body = events[-1].config.extra_body
    assert body is not None
    assert body["extra_args"]["inspect_lens"]["capture"]["layers"] == [0]


def test_equal_captures_have_equal_cache_keys(
    server: Any, run_eval: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = GenerateConfig(cache=True)
    monkeypatch.setenv(VARIABLE, "1")
    run_eval(server, n=1, config=config, solver=generate())
    run_eval(server, n=1, config=config, solver=generate())
    assert len(server.requests) == 1
    monkeypatch.setenv(VARIABLE, "2")
    assert layers(run_eval(server, n=1, config=config, solver=generate())) == (2,)
    assert len(server.requests) == 2


def test_a_wrong_value_is_refused_at_the_start(
    server: Any, model_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "three")
    with pytest.raises(PrerequisiteError, match=r"INSPECT_LENS_CAPTURE='three'"):
        model_of(server)
