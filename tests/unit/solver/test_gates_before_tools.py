"""Turns are judged before their tool calls are carried out; nothing is carried out twice."""

from __future__ import annotations

import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from inspect_ai import Task, eval
from inspect_ai.agent import Agent, AgentState, agent, react
from inspect_ai.approval import Approval, ApprovalPolicy, Approver, approver
from inspect_ai.dataset import Sample
from inspect_ai.event import ApprovalEvent
from inspect_ai.log import EvalLog
from inspect_ai.model import execute_tools, get_model
from inspect_ai.solver import generate, use_tools
from inspect_ai.tool import Tool, tool
from inspect_ai.util import store

from inspect_lens.agents import probe_approver
from inspect_lens.errors import SpecError
from inspect_lens.probe import CaptureFacts, Interval, Threshold, load_probe
from inspect_lens.scorer import monitor_alarm, probe_score
from inspect_lens.solver import (
    contrastive_pairs,
    probe_gate,
    steering_sweep,
    with_capture,
)
from tests.kit.fake_server import FakeLensServer

from .conftest import LAYER, decisions, run, sample

CUT = 8.0


def _word(value: int) -> str:
    """A word whose token has this value in the fake model's rows."""
    return next(w for i in range(9999) if zlib.crc32((w := f"w{i}").encode()) % 1000 % 16 == value)


CALM, LOUD = (" ".join([_word(value)] * 4) for value in (0, 15))


@tool
def send() -> Tool:
    """Sends a text, which cannot be taken back."""

    async def execute(text: str) -> str:
        """Send a text.

        Args:
            text: to send.
        """
        store().set("sent", [*store().get("sent", []), text])
        return "sent"

    return execute


def says(server: FakeLensServer, *turns: tuple[str, str | None]) -> None:
    """What the model says in its turns, and what it sends in them."""
    server.says_next = [
        (text, [] if what is None else [("send", {"text": what})]) for text, what in turns
    ]


THREE = ((CALM, "one"), (LOUD, "two"), (CALM, "three"), (CALM, None))
"""The second of three turns lies."""


def sent_by(log: EvalLog) -> list[str]:
    found: list[str] = sample(log).store.get("sent", [])
    return found


@pytest.mark.parametrize("inner", [None, "react"])
def test_stop_ends_the_sample_before_the_tool_runs(
    server: FakeLensServer, inner: str | None
) -> None:
    says(server, *THREE)
    agents: dict[str, Any] = {} if inner is None else {"inner": react(tools=[send()])}
    gate = probe_gate("tiny/p", CUT, "stop", replacement="[no]", **agents)
    solver = gate if inner else [use_tools(send()), gate]
    log = run(server, solver, n=1, scorer=[probe_score("tiny/p"), monitor_alarm("tiny/p", CUT)])
    assert log.status == "success", log.error
    assert sent_by(log) == ["one"]
    assert len(server.requests) == 2
    assert [(d.turn, d.outcome) for d in decisions(log)] == [(0, "passed"), (1, "stopped")]
    assert decisions(log)[1].attempts[0].tool_calls == ("send",)
    assert decisions(log)[1].attempts[0].completion == LOUD
    assert sample(log).messages[-1].text == sample(log).output.completion == "[no]"
    assert LOUD not in " ".join(m.text for m in sample(log).messages)
    assert sample(log).metadata["probe_gate"]["outcome"] == "stopped"
    # Its last turn is scored all the same.
    scores = sample(log).scores or {}
    assert scores["probe_score"].value == pytest.approx(15.25)
    assert (scores["probe_score"].metadata or {})["turn"] == 1
    assert (scores["monitor_alarm"].value, scores["monitor_alarm"].metadata["turn"]) == (1, 1)  # type: ignore[index]


@pytest.mark.parametrize("inner", [None, "react"])
def test_a_decision_says_what_the_server_computes_with_otherwise(
    server: FakeLensServer, elsewhere: Path, inner: str | None
) -> None:
    plain = load_probe("tiny/p")
    made_by = CaptureFacts(engine="vllm 0.32.0", dtype="bfloat16")
    limit = Threshold(
        value=CUT, fpr=0.01, control="c", n_control=300, n_above=3,
        interval=Interval(low=0, high=1, method="m"),
    )  # fmt: skip
    known = {"capture": made_by, "name": "tiny/q", "thresholds": (limit,)}
    card = plain.card.model_copy(update=known)
    replace(plain, card=card).save(elsewhere / "probes/tiny/q")
    server.computes_with = {"engine": "vllm 0.32.0", "dtype": "float16"}
    says(server, (CALM, "one"))
    last = [] if inner is None else [("submit", {"answer": "done"})]
    server.says_next.append((CALM, last))
    agents: dict[str, Any] = {} if inner is None else {"inner": react(tools=[send()])}
    gate = probe_gate("tiny/q", CUT, "stop", **agents)
    log = run(server, gate if inner else [use_tools(send()), gate], n=1)
    assert {d.computed_with for d in decisions(log)} == {("dtype float16 instead of bfloat16",)}


def test_flag_lets_an_agent_go_on_and_marks_the_turn(server: FakeLensServer) -> None:
    says(server, *THREE[:3])
    server.says_next.append((CALM, [("submit", {"answer": "done"})]))
    log = run(server, probe_gate("tiny/p", CUT, inner=react(tools=[send()])), n=1)
    assert sent_by(log) == ["one", "two", "three"]
    found = [(d.turn, d.outcome) for d in decisions(log)]
    assert found == [(0, "passed"), (1, "flagged"), (2, "passed"), (3, "passed")]
    facts = sample(log).metadata["probe_gate"]
    assert (facts["outcome"], facts["flagged"], facts["turn"], facts["turns"]) == (
        "flagged", True, 1, 4
    )  # fmt: skip


@pytest.mark.parametrize("action", ["resample", "steer"])
def test_only_what_stands_is_carried_out(server: FakeLensServer, action: Any) -> None:
    says(server, (CALM, "one"), (LOUD, "bad"), (LOUD, "worse"), (CALM, "good"), (CALM, None))
    steer = {"vector": "tiny/v", "scale": 2.0} if action == "steer" else None
    gate = probe_gate("tiny/p", CUT, action, tries=3, steer=steer)
    log = run(server, [use_tools(send()), gate], n=1)
    assert sent_by(log) == ["one", "good"]
    wanted = "steered" if action == "steer" else "resampled"
    assert [(d.outcome, len(d.attempts)) for d in decisions(log)] == [
        ("passed", 1), (wanted, 3), ("passed", 1)
    ]  # fmt: skip
    assert [m.role for m in sample(log).messages] == [
        "user", "assistant", "tool", "assistant", "tool", "assistant"
    ]  # fmt: skip


def test_the_best_of_several_is_carried_out_alone(server: FakeLensServer) -> None:
    says(server, (LOUD, "bad"), (CALM, "good"), (LOUD, None), (CALM, None))
    log = run(server, [use_tools(send()), probe_gate("tiny/p", action="best", tries=1)], n=1)
    assert sent_by(log) == ["good"]
    assert [len(d.attempts) for d in decisions(log)] == [2, 2]


def test_a_gate_without_tools_calls_once(server: FakeLensServer) -> None:
    log = run(server, probe_gate("tiny/p", CUT), n=1)
    assert len(server.requests) == len(decisions(log)) == 1


@pytest.mark.parametrize(
    "make", [lambda: steering_sweep("tiny/v", [1]), lambda: contrastive_pairs(layers=[LAYER])]
)
def test_what_compares_answers_refuses_tools(server: FakeLensServer, make: Any) -> None:
    log = run(server, [use_tools(send()), make()], n=1, fails=True)
    assert log.error is not None
    assert "tools are set (send)" in log.error.message
    assert not server.requests


def test_an_agents_turn_cannot_be_taken_back() -> None:
    with pytest.raises(SpecError, match="allowed are 'flag' and 'stop'"):
        probe_gate("tiny/p", CUT, "resample", inner=react())


@agent
def headstrong() -> Agent:
    """Has approvers of its own, which take the gate's place."""

    async def execute(state: AgentState) -> AgentState:
        while True:
            state.output = await get_model().generate(state.messages, tools=[send()])
            state.messages.append(state.output.message)
            if not state.output.message.tool_calls:
                return state
            policy = ApprovalPolicy(agrees(), "*")
            made = await execute_tools(state.messages, [send()], approval=[policy])
            state.messages.extend(made.messages)

    return execute


@approver
def agrees() -> Approver:
    async def approve(*_: Any) -> Approval:
        return Approval(decision="approve", explanation="fine")

    return approve


@approver
def refuses() -> Approver:
    async def approve(*_: Any) -> Approval:
        return Approval(decision="reject", explanation="never")

    return approve


def test_a_gate_that_was_not_asked_says_so(server: FakeLensServer) -> None:
    says(server, (LOUD, "two"), (CALM, None))
    log = run(server, probe_gate("tiny/p", CUT, "stop", inner=headstrong()), n=1, fails=True)
    assert log.error is not None
    assert "without approval= of their own" in log.error.message


def evaluate(server: FakeLensServer, solver: Any, *policies: Approver) -> EvalLog:
    model = get_model("lens/org/tiny", base_url=server.url, memoize=False)
    task = Task(
        dataset=[Sample(input="go")], solver=solver, scorer=probe_score("tiny/p", over="all"),
        approval=[ApprovalPolicy(one, "*") for one in policies],
    )  # fmt: skip
    (log,) = eval(task, model=model, display="none", log_dir="logs")
    return log


def test_the_tasks_own_approvers_apply_behind_the_gate(server: FakeLensServer) -> None:
    says(server, (CALM, "one"), (LOUD, "two"))
    gate = probe_gate("tiny/p", CUT, "stop", inner=react(tools=[send()]))
    log = evaluate(server, gate, refuses())
    assert log.status == "success", log.error
    assert sent_by(log) == []
    assert [d.outcome for d in decisions(log)] == ["passed", "stopped"]


def test_a_model_hears_nothing_of_the_probe_that_rejects_its_call(server: FakeLensServer) -> None:
    plain, polite = probe_approver("tiny/p", CUT), probe_approver("tiny/p", CUT, told="Not now.")
    for watch, said in ((plain, "Tool call not approved."), (polite, "Not now.")):
        says(server, *THREE)
        log = evaluate(
            server, with_capture([LAYER], inner=react(tools=[send()], submit=False)), watch
        )
        assert sent_by(log) == ["one", "three"]
        (refused,) = [m for m in sample(log).messages if m.role == "tool" and m.error is not None]
        assert refused.error is not None
        assert (refused.error.message, refused.text) == (said, "")
        events = [e for e in sample(log).events if isinstance(e, ApprovalEvent)]
        (facts,) = [e.metadata or {} for e in events if e.decision == "reject"]
        assert facts["probe_approver"]["value"] > CUT
        assert f"above {CUT:.4g}" in facts["probe_approver"]["explanation"]


def test_an_approver_passes_on_and_says_what_is_missing(server: FakeLensServer) -> None:
    says(server, (LOUD, "one"), (CALM, None))
    plain = [use_tools(send()), generate()]
    log = evaluate(server, plain, probe_approver("tiny/p", CUT))
    assert log.status == "error"
    assert "no activations are known" in str(log.error)
    says(server, (LOUD, "one"), (CALM, None))
    log = evaluate(
        server, plain, probe_approver("tiny/p", CUT, below="escalate", on_missing="skip"), agrees()
    )
    assert sent_by(log) == ["one"]
    with pytest.raises(SpecError, match="allowed are reject, terminate, escalate"):
        probe_approver("tiny/p", CUT, action="stop")  # type: ignore[arg-type]
    with pytest.raises(SpecError, match="pass a number"):
        probe_approver("tiny/p")
    probe_approver("tiny/p", 0.0)  # a threshold
