"""Solvers through the provider on a fake server: what was sent, kept and decided."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from inspect_ai import Task, eval, score
from inspect_ai._util.registry import registry_info
from inspect_ai.agent import Agent, AgentState, agent
from inspect_ai.dataset import Sample
from inspect_ai.event import ModelEvent, SpanBeginEvent
from inspect_ai.log import EvalLog, read_eval_log
from inspect_ai.model import GenerateConfig, get_model
from inspect_ai.scorer import Score, Scorer, Target, mean, scorer
from inspect_ai.solver import Generate, Solver, TaskState, solver
from inspect_ai.util import Store

from inspect_lens.errors import SpecError
from inspect_lens.model import lens_config, lens_scope
from inspect_lens.reading import read_cells, read_pairs, read_turns
from inspect_lens.reading._stored import CellScores
from inspect_lens.scorer import (
    coherence,
    dose_response,
    monitor_alarm,
    probe_score,
)
from inspect_lens.solver import (
    ablate_direction,
    contrastive_pairs,
    probe_gate,
    steering_sweep,
    with_capture,
    with_lens,
    with_steering,
)
from inspect_lens.spec import LensRequest
from inspect_lens.vector import Vector
from tests.kit.fake_server import FakeLensServer

from .conftest import LAYER, H, decisions, run, sample, sent


@scorer(metrics=[mean()])
def says_steered() -> Scorer:
    async def score(state: TaskState, target: Target) -> Score:
        return Score(value=float(target.text in state.output.completion))

    return score


@agent
def careless() -> Agent:
    """Calls the model with an extra_body of its own, which replaces every other one."""

    async def execute(state: AgentState) -> AgentState:
        for body in ({"chat_template_kwargs": {"mine": 1}}, {}):
            output = await get_model().generate(
                state.messages, config=GenerateConfig(extra_body=body)
            )
            state.messages.append(output.message)
            state.output = output
        return state

    return execute


@pytest.mark.parametrize("inner", [None, "agent"])
def test_every_call_inside_is_steered_and_the_log_stays_small(
    server: FakeLensServer, inner: str | None
) -> None:
    log = run(server, with_steering("tiny/v", scale=3.0, inner=careless() if inner else None))
    vector = Vector.load("vectors/tiny/v")
    assert len(server.requests) == (4 if inner else 2)
    for body in server.requests:
        (steer,) = sent(body).edits
        assert (steer.layers, steer.scale) == ((LAYER,), 3.0)
        assert steer.vector.to_float32()[0].tolist() == vector.raw(LAYER).tolist()
    # The task's own extra_body went along where nobody replaced it, and the agent's own did.
    kwargs = [body.get("chat_template_kwargs") for body in server.requests]
    assert kwargs.count({"x": 1}) == (0 if inner else 2)
    assert kwargs.count({"mine": 1}) == (2 if inner else 0)
    for event in sample(log).events:
        if isinstance(event, ModelEvent):
            logged = json.dumps(event.config.model_dump(mode="json"))
            assert vector.to_steering().vector.sha256 in logged
            assert len(logged) < 1500
    assert sample(log).output.completion.startswith("steered")
    assert log.eval.solver is None or "tiny/v" in json.dumps(log.eval.model_dump(mode="json"))
    assert len(list(Path("logs/lens-vectors").iterdir())) == 1


def test_a_call_may_refuse_and_scopes_add_up(server: FakeLensServer) -> None:
    @solver
    def asks() -> Solver:
        async def solve(state: TaskState, generate: Generate) -> TaskState:
            plain = {"extra_args": {"apply_steering_vectors": []}}
            await get_model().generate("no thanks", config=GenerateConfig(extra_body=plain))
            own = lens_config(steer={"vector": "tiny/v", "scale": 9.0})
            await get_model().generate("my own", config=own)
            with lens_scope(capture=[0]):
                return await generate(state)

        return solve

    run(server, with_steering("tiny/v", inner=with_steering("tiny/v", layers=1, inner=asks())), n=1)
    refused, own, nested = [sent(body) for body in server.requests]
    assert refused == LensRequest()
    assert "vllm_xargs" not in server.requests[0]
    assert [v.scale for v in own.edits] == [9.0]
    assert [v.layers for v in nested.edits] == [(LAYER,), (1,)]
    assert nested.capture is not None
    assert nested.capture.layers == (0,)


def test_another_model_inside_is_not_steered(server: FakeLensServer) -> None:
    with FakeLensServer() as other:

        @solver
        def graded() -> Solver:
            async def solve(state: TaskState, generate: Generate) -> TaskState:
                grader = get_model("lens/org/tiny", base_url=other.url, memoize=False)
                await grader.generate("is it good?")
                return await generate(state)

            return solve

        run(server, with_steering("tiny/v", inner=graded()), n=1)
        assert sent(other.requests[0]) == LensRequest()
        assert len(sent(server.requests[0]).edits) == 1


def test_a_logged_solver_is_made_again_from_its_json(server: FakeLensServer) -> None:
    from inspect_ai._util.registry import registry_create

    log = run(server, with_steering("tiny/v", scale=2.0, norm_match=True), n=1)
    (step,) = read_eval_log(log.location).plan.steps
    again = registry_create("solver", step.solver, **json.loads(json.dumps(step.params)))
    run(server, again, n=1)
    first, second = (sent(body).edits for body in server.requests)
    assert first == second
    assert first[0].norm_match


def test_a_sweep_sends_each_cell_once_at_the_same_time() -> None:
    with FakeLensServer(delay_s=0.2) as server:
        log = run(
            server,
            steering_sweep("tiny/v", [-1, 0, 2], layers=[1, LAYER, 1], scorer=says_steered()),
            n=1,
        )
        bodies = [sent(body) for body in server.requests]
    # One unsteered answer, then three kinds at two layers and two scales.
    assert len(bodies) == 1 + 3 * 2 * 2
    vector = Vector.load("vectors/tiny/v")
    expected = {
        (source.to_steering(layer).vector.sha256, layer, scale)
        for source in (vector, vector.random_control(0), vector.orthogonal_control(0))
        for layer in (1, LAYER)
        for scale in (-1.0, 2.0)
    }
    found = {
        (r.edits[0].vector.sha256, r.edits[0].layers[0], r.edits[0].scale)
        for r in bodies
        if r.edits
    }
    assert found == expected
    # 13 answers of 0.2 s each would take 2.6 s one after the other.
    times = [(e.timestamp, e.completed) for e in sample(log).events if isinstance(e, ModelEvent)]
    assert max(start for start, _ in times) < min(end for _, end in times if end)
    cells = read_cells(Store(sample(log).store))
    assert [c.kind for c in cells].count("baseline") == 1
    assert [c.completion.startswith("steered") for c in cells] == [
        c.kind != "baseline" for c in cells
    ]
    assert CellScores(store=Store(sample(log).store)).values == [0.0] + [1.0] * 12
    spans = [e for e in sample(log).events if isinstance(e, SpanBeginEvent)]
    assert sum(s.type == "steering_cell" for s in spans) == 13
    assert not sample(log).output.completion.startswith("steered")


def test_dose_response_says_what_is_missing(server: FakeLensServer) -> None:
    log = run(server, steering_sweep("tiny/v", [1], controls=()), n=1)
    assert len(server.requests) == 2
    assert "pass a scorer" in _scored_error(log, dose_response())
    plain = run(server, with_steering("tiny/v"), n=1)
    assert "put steering_sweep" in _scored_error(plain, dose_response(says_steered()))


def _scored_error(log: EvalLog, scorer: Scorer) -> str:
    with pytest.raises(Exception, match="store: ") as error:
        score(log, scorer, action="overwrite", display="none")
    return str(error.value)


def test_a_withheld_answer_stays_in_the_metrics_of_a_probe(server: FakeLensServer) -> None:
    gate = probe_gate("tiny/p", -1.0, "stop")
    log = run(server, [gate, never()], n=1, scorer=[probe_score("tiny/p"), coherence("likelihood")])
    (decision,) = decisions(log)
    found = sample(log).scores or {}
    assert found["probe_score"].value == pytest.approx(decision.attempts[0].value)
    assert (found["probe_score"].metadata or {})["ended_by"] == "probe_gate"
    # The text itself is nowhere to judge.
    assert found["coherence"].reason == "no_tokens"


def test_what_was_only_compared_is_no_turn(server: FakeLensServer) -> None:
    sweep = steering_sweep("tiny/v", [-1, 2], capture=[LAYER])
    pairs = contrastive_pairs("Be honest.", "Lie.", layers=[LAYER])
    gate = probe_gate("tiny/p", -1.0, "resample", tries=2)
    for solver_, calls in ((sweep, 7), (pairs, 2), (gate, 3)):
        watch = monitor_alarm("tiny/p", threshold=1e6, value="max")
        log = run(server, solver_, n=1, scorer=[watch, probe_score("tiny/p", over="all")])
        assert sum(isinstance(e, ModelEvent) for e in sample(log).events) == calls
        (turn,) = read_turns(sample(log).events)
        assert turn.message_id == sample(log).output.message.id
        scores = sample(log).scores or {}
        facts = scores["monitor_alarm"].metadata or {}
        assert (facts["n_turns"], facts["n_turns_read"]) == (1, 1)
        assert scores["monitor_alarm"].value == scores["probe_score"].value


@solver
def never() -> Solver:
    async def solve(state: TaskState, generate: Generate) -> TaskState:
        raise AssertionError("the sample had ended")

    return solve


def test_gate_resamples_up_to_its_tries_and_says_what_stands(server: FakeLensServer) -> None:
    log = run(server, probe_gate("tiny/p", -1.0, "resample", tries=2, temperature=0.7), n=1)
    (decision,) = decisions(log)
    assert decision.outcome == "exhausted"
    assert len(decision.attempts) == len(server.requests) == 3
    assert [body.get("temperature") for body in server.requests] == [None, 0.7, 0.7]
    assert len({json.dumps(body["messages"]) for body in server.requests}) == 1
    assert [m.role for m in sample(log).messages] == ["user", "assistant"]


@pytest.mark.parametrize(("score_", "outcome"), [(2.0, "stopped"), (0.5, "passed")])
def test_gate_takes_the_word_of_a_probe_in_the_engine(
    server: FakeLensServer, score_: float, outcome: str
) -> None:
    server.probe_scores["lies"] = score_
    log = run(server, probe_gate("engine:lies", 1.0, "stop"), n=1)
    (use,) = sent(server.requests[0]).probes
    assert (use.name, use.alarm, use.threshold) == ("lies", "stop", 1.0)
    (decision,) = decisions(log)
    assert decision.outcome == outcome
    assert decision.attempts[0].stopped is (outcome == "stopped")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"action": "warn"}, "allowed are flag"),
        ({"action": "steer"}, "needs a vector"),
        ({"steer": "tiny/v"}, "take none"),
        ({"tries": 0}, "1 or more"),
        ({"threshold": None}, "has no threshold for the mean of an answer"),
        ({"probe": "engine:x", "action": "resample"}, "flag and stop"),
        ({"probe": "engine:x", "pool": "max", "layer": 2}, "layer=2, pool='max' with probe="),
        ({"probe": "engine:x", "on_missing": "skip"}, "on_missing='skip' with probe="),
    ],
)
def test_gate_refuses_before_any_sample(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        probe_gate(**{"probe": "tiny/p", "threshold": 0.0, **arguments})


@pytest.mark.parametrize("tokens", [5, "Paris"])
def test_a_token_of_a_lens_may_stand_alone(server: FakeLensServer, tokens: int | str) -> None:
    run(server, with_lens(lens={"layers": [1], "tokens": tokens}), n=1, fails=True)
    (asked,) = (sent(body).lens for body in server.requests)
    assert asked is not None
    assert asked.tokens == (tokens,)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [({"postions": "all"}, "did you mean 'positions'"), ({"layers": "x"}, "lens.layers='x'")],
)
def test_a_lens_is_judged_before_any_sample(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        with_lens(lens={"top_k": 0, "target": " {}", **wrong})


@pytest.mark.parametrize(("prefer", "wanted"), [("low", min), ("high", max)])
def test_the_best_of_several_stands(server: FakeLensServer, prefer: Any, wanted: Any) -> None:
    gate = probe_gate("tiny/p", action="best", tries=2, prefer=prefer, temperature=1.0)
    log = run(server, gate, n=1)
    (decision,) = decisions(log)
    assert len(decision.attempts) == len(server.requests) == 3
    values = [a.value for a in decision.attempts]
    assert values[decision.chosen] == wanted(values)


@pytest.mark.parametrize(
    "make",
    [
        lambda: with_capture([1]),
        lambda: with_steering("tiny/v"),
        lambda: ablate_direction("tiny/v"),
    ],
)
def test_a_model_without_a_lens_is_refused_by_the_solver_that_was_asked(make: Any) -> None:
    task = Task(dataset=[Sample(input="x")], solver=make())
    (log,) = eval(task, model="mockllm/model", display="none", log_format="json")
    assert log.error is not None
    name = registry_info(make()).name.removeprefix("inspect_lens/")
    assert f"{name}: mockllm/model has no lens" in log.error.message


def test_pairs_are_kept_with_their_activations(server: FakeLensServer) -> None:
    log = run(server, contrastive_pairs(["be true", "be right"], ["lie", "err"], layers=[1]), n=2)
    system = {body["messages"][0]["content"] for body in server.requests}
    assert system == {"be true", "be right", "lie", "err"}
    rows = read_pairs(log.location)
    assert [row.label for row in rows] == [0, 1, 0, 1] * 2
    assert len({row.group for row in rows}) == 2
    for row in rows:
        assert row.activations.layers == (1,)
        assert row.activations.numpy().shape == (1, 2, H)
    with pytest.raises(SpecError, match="in pairs"):
        contrastive_pairs(["a", "b"], ["c"])


def test_vectors_of_one_name_cannot_be_swept_together() -> None:
    for given in ([], ["tiny/v", "tiny/v"]):
        with pytest.raises(SpecError, match="names of their own"):
            steering_sweep(given, [1.0])
