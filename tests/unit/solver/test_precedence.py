"""What goes first where a config, a scope, a call and a variable all ask for something."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
from inspect_ai.model import GenerateConfig, get_model
from inspect_ai.solver import Generate, Solver, TaskState, solver

from inspect_lens.model import lens_config
from inspect_lens.solver import (
    contrastive_pairs,
    probe_gate,
    steering_sweep,
    with_lens,
    with_steering,
)
from inspect_lens.spec import Zero
from tests.kit.fake_server import FakeLensServer

from .conftest import LAYER, decisions, run, sent

NAMED = {"inspect_lens": {"edits_named": ["registered"]}}


def by_config(**steer: Any) -> GenerateConfig:
    return lens_config(steer={"vector": "tiny/v", **steer}, base=GenerateConfig())


def test_solvers_that_capture_go_before_the_variable(
    server: FakeLensServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INSPECT_LENS_CAPTURE", "0")
    for layer, solves in (
        (LAYER, probe_gate("tiny/p", 1e6)),
        (LAYER, probe_gate("tiny/p", action="best", tries=1)),
        (LAYER, contrastive_pairs("be true", "lie", layers=[LAYER])),
        (LAYER, steering_sweep("tiny/v", [1], controls=(), capture=[LAYER])),
        (0, with_steering("tiny/v")),
    ):
        server.requests.clear()
        run(server, solves, n=1)
        captures = [sent(body).capture for body in server.requests]
        assert {capture and capture.layers for capture in captures} == {(layer,)}


@pytest.mark.parametrize("where", ["task", "model"])
@pytest.mark.parametrize("scale", [5.0, 3.0])
def test_vectors_add_to_those_of_the_config(
    server: FakeLensServer, where: str, scale: float
) -> None:
    @solver
    def asks() -> Solver:
        async def solve(state: TaskState, generate: Generate) -> TaskState:
            # Without a base lens_config goes on from the task's own extra_body.
            await generate(deepcopy(state), extra_body=lens_config(capture=[0]).extra_body)
            await get_model().generate("bare", config=GenerateConfig(extra_body={}))
            own = lens_config(steer={"vector": "tiny/v", "scale": 9.0})
            await get_model().generate("own", config=own)
            # A call that fails is tried again, and not steered twice.
            server.fail_next.append((500, {"error": {"message": "busy"}}))
            return await generate(state)

        return solve

    config = by_config(scale=scale)
    given: dict[str, Any] = {"config": config} if where == "task" else {"by_model": config}
    run(server, with_steering("tiny/v", scale=3.0, inner=asks()), n=1, **given)
    copied, bare, own, failed, again = [
        [v.scale for v in sent(body).edits] for body in server.requests
    ]
    # Inside another extra_body the config's vectors are not there, which is Inspect's doing.
    assert copied == ([scale, 3.0] if where == "task" else [3.0])
    assert bare == [3.0]
    assert own == [9.0]
    assert failed == again == [scale, 3.0]


def test_a_vector_adds_to_registered_ones_of_the_config(server: FakeLensServer) -> None:
    config = GenerateConfig(extra_body={"extra_args": NAMED})
    run(server, with_steering("tiny/v"), n=1, config=config)
    (body,) = server.requests
    assert [use.name for use in sent(body).edits_named] == ["registered"]
    assert len(sent(body).edits) == 1


def test_an_edit_adds_to_registered_ones_of_the_config_and_not_of_a_call(
    server: FakeLensServer,
) -> None:
    named = {"inspect_lens": {"edits_named": ["registered"]}}
    body = GenerateConfig(extra_body={"extra_args": named})

    @solver
    def asks() -> Solver:
        async def solve(state: TaskState, generate: Generate) -> TaskState:
            other = {"inspect_lens": {"edits_named": ["own"]}}
            own = GenerateConfig(extra_body={"extra_args": other})
            await get_model().generate("own", config=own)
            return await generate(state)

        return solve

    run(server, with_lens(edits=Zero(layers=[LAYER]), inner=asks()), n=1, config=body)
    found = [
        ([use.name for use in sent(one).edits_named], len(sent(one).edits))
        for one in server.requests
    ]
    assert found == [(["own"], 0), (["registered"], 1)]


def test_a_config_that_declines_all_vectors_is_refused(server: FakeLensServer) -> None:
    config = GenerateConfig(extra_body={"extra_args": {"apply_steering_vectors": []}})
    gate = probe_gate("tiny/p", -1e6, "steer", steer="tiny/v")
    for solves, n_sent in ((with_steering("tiny/v"), 0), (gate, 1)):
        server.requests.clear()
        log = run(server, solves, n=1, config=config, fails=True)
        assert log.error is not None
        assert "declines these edits" in log.error.message
        assert len(server.requests) == n_sent


@pytest.mark.parametrize("where", ["task", "model", "named", "scope", "declined"])
def test_a_sweep_whose_baseline_would_be_steered_is_refused(
    server: FakeLensServer, where: str
) -> None:
    sweep: Solver = steering_sweep("tiny/v", [1])
    declined: dict[str, Any] = {"apply_steering_vectors": []}
    cases: dict[str, tuple[dict[str, Any], str]] = {
        "task": ({"config": by_config(scale=3.0)}, "layers [2], scale 3, sha256"),
        "model": ({"by_model": by_config(scale=3.0)}, "layers [2], scale 3, sha256"),
        "named": ({"config": GenerateConfig(extra_body={"extra_args": NAMED})}, "'registered'"),
        "scope": ({"solver": with_steering("tiny/v", scale=3.0, inner=sweep)}, "around it steers"),
        "declined": (
            {"config": GenerateConfig(extra_body={"extra_args": declined})},
            "apply_steering_vectors: []",
        ),
    }
    given, said = cases[where]
    solves = given.pop("solver", sweep)
    log = run(server, solves, n=1, fails=True, **given)
    assert log.error is not None
    assert "answers with 'tiny/v' are compared with an unsteered" in log.error.message
    assert said in log.error.message
    assert server.requests == []


def test_gate_steers_on_top_of_the_task(server: FakeLensServer) -> None:
    gate = probe_gate("tiny/p", -1e6, "steer", steer={"vector": "tiny/v", "scale": 2.0}, tries=2)
    log = run(server, gate, n=1, config=by_config(scale=2.0))
    scales = [[v.scale for v in sent(body).edits] for body in server.requests]
    assert scales == [[2.0], [2.0, 2.0], [2.0, 4.0]]
    (decision,) = decisions(log)
    assert [a.scale for a in decision.attempts] == [None, 2.0, 4.0]


def test_gate_stops_also_where_the_task_runs_the_probe(server: FakeLensServer) -> None:
    server.probe_scores = {"lies": 2.0, "other": 0.0}
    probes = {"inspect_lens": {"probes": ["lies", "other"]}}
    config = GenerateConfig(extra_body={"extra_args": probes})
    log = run(server, probe_gate("engine:lies", 1.0, "stop"), n=1, config=config)
    assert decisions(log)[0].outcome == "stopped"
    uses = {use.name: use.alarm for use in sent(server.requests[0]).probes}
    assert uses == {"other": None, "lies": "stop"}
