"""`-M edits`, `-M steer`, INSPECT_LENS_EDITS: any task steered, without a line of its code."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from inspect_ai.event import ModelEvent
from inspect_ai.model import GenerateConfig
from inspect_ai.solver import Generate, Solver, TaskState, generate, solver

from inspect_lens.model import lens_config, lens_scope
from inspect_lens.model._host import PrerequisiteError
from inspect_lens.model._scope import outside_scopes
from inspect_lens.solver import steering_sweep, with_lens
from inspect_lens.spec import Add, LensRequest, SteeringVector, parse_extra_args
from inspect_lens.vector import load_vector

VARIABLE = "INSPECT_LENS_EDITS"
TRUTH = load_vector("organism/truth")
ADD = [{"op": "add", "vector": [1.0] * 8, "layers": [1], "scale": 2.0}]


def asked(body: dict[str, Any]) -> LensRequest:
    request = parse_extra_args(body.get("vllm_xargs") or {})
    return request if request is not None else LensRequest()


def strengths(body: dict[str, Any]) -> list[float]:
    return [edit.scale for edit in asked(body).edits if isinstance(edit, Add)]


@pytest.mark.parametrize("by", ["argument", "json file", "yaml file", "variable", "file, variable"])
def test_every_call_is_edited_and_the_log_says_so(
    server: Any, run_eval: Any, model_of: Any, monkeypatch: Any, tmp_path: Path, by: str
) -> None:
    written = tmp_path / "edits.file"
    written.write_text(
        "- op: add\n  vector: [1, 1, 1, 1, 1, 1, 1, 1]\n  layers: [1]\n  scale: 2.0\n"
        if by == "yaml file"
        else json.dumps(ADD)
    )
    given: dict[str, Any] = {"argument": {"edits": ADD}}.get(by, {"edits": str(written)})
    if "variable" in by:
        monkeypatch.setenv(VARIABLE, str(written) if "file" in by else json.dumps(ADD))
        given = {}
    model = model_of(server, **given)
    config = GenerateConfig(extra_body={"chat_template_kwargs": {"enable_thinking": False}})
    log = run_eval(server, n=1, model=model, config=config, solver=generate())
    assert log.status == "success", log.error
    (edit,) = asked(server.requests[-1]).edits
    assert isinstance(edit, Add)
    assert (edit.layers, edit.scale) == ((1,), 2.0)
    np.testing.assert_array_equal(edit.vector.to_float32(), np.ones(8))
    assert server.requests[-1]["chat_template_kwargs"] == {"enable_thinking": False}
    (event,) = [e for e in log.samples[0].events if isinstance(e, ModelEvent)]
    assert edit.vector.sha256 in json.dumps(event.config.model_dump(), default=str)


def test_vectors_and_directions_have_names(server: Any, run_eval: Any, model_of: Any) -> None:
    run_eval(server, n=1, model=model_of(server, steer="organism/truth"), solver=generate())
    (edit,) = asked(server.requests[-1]).edits
    assert edit.reference() == TRUTH.to_steering().reference()
    half = {"vector": "organism/truth", "scale": 0.5}
    run_eval(server, n=1, model=model_of(server, steer=half), solver=generate())
    assert strengths(server.requests[-1]) == [0.5]
    ablate = [{"op": "ablate", "direction": "organism/truth"}, half]
    run_eval(server, n=1, model=model_of(server, edits=ablate), solver=generate())
    first, second = asked(server.requests[-1]).edits
    assert (first.op, first.layers, second.op) == ("ablate", TRUTH.layers, "add")


def test_other_edits_are_other_calls_for_the_cache(
    server: Any, run_eval: Any, model_of: Any
) -> None:
    config = GenerateConfig(cache=True)
    for steer in ({}, {"edits": ADD}, {"edits": [{**ADD[0], "scale": 3.0}]}):
        for _ in range(2):
            model = model_of(server, **steer)
            run_eval(server, n=1, model=model, config=config, solver=generate())
    assert [strengths(body) for body in server.requests] == [[], [2.0], [3.0]]


def test_scopes_add_to_it_and_a_call_may_decline(server: Any, run_eval: Any, model_of: Any) -> None:
    vector = SteeringVector(activations=np.ones((1, 8)), layer_indices=[1], scale=5.0)

    @solver
    def several() -> Solver:
        async def solve(state: TaskState, generate: Generate) -> TaskState:
            no = {"extra_args": {"apply_steering_vectors": []}}
            with lens_scope(steer=vector):
                await generate(deepcopy(state))
            with outside_scopes():
                await generate(deepcopy(state))
            return await generate(state, extra_body=no)

        return solve

    log = run_eval(server, n=1, model=model_of(server, edits=ADD), solver=several())
    assert log.status == "success", log.error
    assert [strengths(body) for body in server.requests] == [[2.0, 5.0], [], []]


@pytest.mark.parametrize("where", ["-M", "-M alone", "scope", "with_lens", "lens_config"])
def test_calls_say_that_edits_must_not_meet(
    server: Any, run_eval: Any, model_of: Any, where: str
) -> None:
    vector = SteeringVector(activations=np.ones((1, 8)), layer_indices=[1], scale=5.0)
    meet: Any = {"edits_meet": "error"}

    @solver
    def scoped() -> Solver:
        async def solve(state: TaskState, generate: Generate) -> TaskState:
            with lens_scope(steer=vector), lens_scope(**meet):
                return await generate(state)

        return solve

    given = {"-M": {"edits": ADD, **meet}, "-M alone": meet}.get(where, {"edits": ADD})
    chain = {"scope": scoped(), "with_lens": with_lens(steer=vector, **meet)}
    config = lens_config(**meet, base=GenerateConfig()) if where == "lens_config" else None
    by = chain.get(where, with_lens(steer=vector))
    more = {} if config is None else {"config": config}
    log = run_eval(server, n=1, model=model_of(server, **given), solver=by, **more)
    assert log.status == "success", log.error
    assert asked(server.requests[-1]).edits_meet == "error"
    assert strengths(server.requests[-1]) == ([5.0] if where == "-M alone" else [2.0, 5.0])


def test_a_sweep_does_not_start_from_an_edited_answer(
    server: Any, run_eval: Any, model_of: Any
) -> None:
    swept = steering_sweep("organism/truth", scales=[1.0])
    log = run_eval(server, n=1, model=model_of(server, edits=ADD), solver=swept)
    assert log.status == "error"
    assert "-M edits" in log.error.message


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"edits_meet": "no"}, "-M edits_meet='no'; .*in_order.* 'error'"),
        ({"edits": ADD, "edits_meet": "no"}, "vllm-lens: -M edits_meet='no'"),
        ({"edits": "no-such-file.json"}, "-M edits: 'no-such-file.json' cannot be read"),
        ({"edits": "[{"}, "cannot be read"),
        ({"edits": "[]"}, "has no edits"),
        ({"edits": [{"op": "abblate"}]}, "ablate"),
        ({"edits": [{"op": "ablate", "direction": "organism/thruth"}]}, "organism/thruth"),
        ({"steer": "organism/thruth"}, "-M steer: .*organism/thruth"),
        ({"steer": {"vector": "organism/truth", "scael": 2}}, "scael"),
    ],
)
def test_what_is_wrong_is_said_before_a_server_is_asked(
    server: Any, model_of: Any, given: dict[str, Any], message: str
) -> None:
    with pytest.raises(PrerequisiteError, match=message):
        model_of(server, **given)
    assert not server.requests


def test_a_wrong_variable_is_named(
    server: Any, model_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "nowhere.json")
    with pytest.raises(PrerequisiteError, match=rf"{VARIABLE}: 'nowhere.json'") as caught:
        model_of(server)
    assert "-M" not in str(caught.value)
    monkeypatch.setenv(VARIABLE, json.dumps(ADD))
    with pytest.raises(PrerequisiteError, match="-M edits_meet='no'") as caught:
        model_of(server, edits_meet="no")
    assert VARIABLE not in str(caught.value)


def test_the_models_own_config_adds_to_it(server: Any, run_eval: Any, model_of: Any) -> None:
    own = lens_config(steer={"vector": "organism/truth", "scale": 7.0})
    model = model_of(server, config=own, edits=ADD)
    run_eval(server, n=1, model=model, solver=generate())
    assert strengths(server.requests[-1]) == [7.0, 2.0]


def test_a_refusal_outlives_what_is_added_to_its_config(
    server: Any, run_eval: Any, model_of: Any
) -> None:
    no = {"extra_args": {"apply_steering_vectors": []}}
    config = lens_config(capture=[1], extra_body=no, base=GenerateConfig())
    run_eval(server, n=1, model=model_of(server, edits=ADD), config=config, solver=generate())
    assert strengths(server.requests[-1]) == []
    assert asked(server.requests[-1]).capture is not None


def test_names_are_looked_up_in_edits_alone(server: Any, run_eval: Any, model_of: Any) -> None:
    columns = {"sink": {"name": "s", "columns": {"direction": "north", "vector": "south"}}}
    config = GenerateConfig(extra_body={"extra_args": {"inspect_lens": columns}})
    log = run_eval(server, n=1, model=model_of(server), config=config, solver=generate())
    assert "recording" in log.error.message, "it was sent; this server has no sinks"
    gate = {"direction": "organism/truth", "layer": 0, "threshold": 0.0}
    edit = [{"op": "ablate", "direction": "organism/truth", "when": gate}]
    run_eval(server, n=1, model=model_of(server, edits=edit), solver=generate())
    (sent,) = asked(server.requests[-1]).edits
    assert sent.when is not None
    assert sent.when.gates[0].direction.shape == (256,)
    late = {"schedule": {"points": [[0, 0.0], [8, 1.0]]}, "positions": "completion"}
    edit = [{**edit[0], "when": {"all": [gate], "none": [{"any": [gate, gate]}]}, **late}]
    run_eval(server, n=1, model=model_of(server, edits=edit), solver=generate())
    (sent,) = asked(server.requests[-1]).edits
    assert [one.direction.sha256 for one in sent.gates] == [sent.gates[0].direction.sha256] * 3
    assert sent.schedule is not None
    assert sent.schedule.at(4) == 0.5


@pytest.mark.parametrize("steer", [5, True])
def test_a_number_is_no_vector(server: Any, model_of: Any, steer: Any) -> None:
    with pytest.raises(PrerequisiteError, match=r"-M steer=.*allowed are a vector"):
        model_of(server, steer=steer)
