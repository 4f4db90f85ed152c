"""Parts of the Petri room that need neither an audit nor a model."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import numpy as np
import pytest
from inspect_ai.model import ChatMessage, ChatMessageAssistant, ChatMessageTool, get_model
from inspect_ai.tool import ToolCall, ToolCallError, ToolCallView

from inspect_lens.agents.petri import eval_awareness_approver
from inspect_lens.agents.petri._approver import _with_pending
from inspect_lens.agents.petri._tools import METADATA_KEY, steering
from inspect_lens.errors import SpecError
from inspect_lens.model import _server
from inspect_lens.probe import Probe, ProbeCard
from inspect_lens.spec import Site, SteeringVector
from tests.kit.fake_server import FakeLensServer, at_site, residual, tokens_of

VECTOR = SteeringVector(activations=np.ones((1, 4)), layer_indices=(0,), scale=2.0)


def test_scale_multiplies_the_vectors_own() -> None:
    found = steering("a", -1.5, vectors={"a": VECTOR}, metadata={}, limit=10)
    assert [v.scale for v in found.vectors] == [-3.0]
    assert (found.name, found.scale) == ("a", -1.5)


@pytest.mark.parametrize(("name", "scale"), [("none", 1.0), ("a", 0.0)])
def test_none_and_zero_stop_steering(name: str, scale: float) -> None:
    assert steering(name, scale, vectors={"a": VECTOR}, metadata={}, limit=10).vectors == ()


def test_a_sample_may_name_vectors_of_its_own() -> None:
    own = {METADATA_KEY: {"b": VECTOR.model_dump()}}
    found = steering("b", 1.0, vectors={"a": VECTOR}, metadata=own, limit=10)
    assert found.vectors[0].vector.sha256 == VECTOR.vector.sha256


@pytest.mark.parametrize(
    ("name", "scale", "message"),
    [
        ("x", 1.0, "allowed are a, and 'none'"),
        ("a", 11.0, "between -10 and 10"),
        ("a", float("nan"), "between -10 and 10"),
    ],
)
def test_what_the_auditor_may_not_ask_for(name: str, scale: float, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        steering(name, scale, vectors={"a": VECTOR}, metadata={}, limit=10)


def call(id: str, function: str, **arguments: Any) -> ToolCall:
    return ToolCall(id=id, function=function, arguments=arguments)


def turn(*calls: ToolCall) -> ChatMessageAssistant:
    return ChatMessageAssistant(content="", tool_calls=list(calls))


def done(call: ToolCall, *, error: bool = False) -> ChatMessageTool:
    failed = ToolCallError("approval", "no") if error else None
    return ChatMessageTool(content="", tool_call_id=call.id, function=call.function, error=failed)


SYSTEM = call("1", "set_system_message", system_message="be kind")
HELLO = call("2", "send_message", message="hello")
RESUME = call("3", "resume")


def texts(conversation: list[ChatMessage] | None) -> list[tuple[str, str]] | None:
    return None if conversation is None else [(m.role, m.text) for m in conversation]


def test_what_is_staged_before_a_message_is_read_with_it() -> None:
    found = _with_pending([], [turn(SYSTEM, HELLO, RESUME)], HELLO)
    assert texts(found) == [("system", "be kind"), ("user", "hello")]
    assert _with_pending([], [turn(SYSTEM, HELLO, RESUME)], SYSTEM) is None
    assert _with_pending([], [turn(SYSTEM, HELLO, RESUME)], RESUME) is None


def test_what_the_target_has_read_is_not_read_twice() -> None:
    shown: list[ChatMessage] = [ChatMessageAssistant(content="a reply")]
    again = call("4", "send_message", message="again")
    history = [turn(SYSTEM, HELLO, RESUME), done(SYSTEM), done(HELLO), done(RESUME), turn(again)]
    assert texts(_with_pending(shown, history, again)) == [
        ("assistant", "a reply"),
        ("user", "again"),
    ]


def test_a_rejected_message_is_not_staged() -> None:
    retry = call("5", "send_message", message="better")
    history = [turn(SYSTEM, HELLO), done(SYSTEM), done(HELLO, error=True), turn(retry)]
    assert texts(_with_pending([], history, retry)) == [("system", "be kind"), ("user", "better")]


def test_a_new_system_message_takes_the_place_of_the_old() -> None:
    other = call("6", "set_system_message", system_message="be brief")
    history = [turn(SYSTEM), done(SYSTEM), turn(other, HELLO)]
    assert texts(_with_pending([], history, HELLO)) == [("system", "be brief"), ("user", "hello")]


def test_a_tool_result_is_read_as_one() -> None:
    result = call("7", "send_tool_call_result", tool_call_id="c", result="42")
    assert texts(_with_pending([], [turn(result)], result)) == [("tool", "42")]


@pytest.mark.parametrize("site", ["resid_post", "resid_pre", "attn_out", "mlp_out"])
def test_the_approver_reads_the_site_of_its_probe(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    card = ProbeCard(name="tiny/p", layers=(1,), hidden=8, site=site, positions="last_prompt")
    probe = Probe.from_direction(np.ones(8), card=card)
    shown = SimpleNamespace(state=SimpleNamespace(messages=[], tools=[]))
    monkeypatch.setattr("inspect_lens.agents.petri._approver.controller", lambda: shown)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("VLLM_BASE_URL", raising=False)
    _server._servers.clear()
    message = call("a", "send_message", message="Where is it?")
    with FakeLensServer() as server:
        model = get_model("lens/org/tiny", base_url=server.url, memoize=False)
        approve = eval_awareness_approver(probe, threshold=1e6, model=model, check_model=False)
        found = anyio.run(approve, "", message, ToolCallView(), [])
        assert len(server.requests) == 1
    assert found.decision == "approve"
    assert found.metadata is not None
    value = found.metadata["eval_awareness"]["value"]
    tokens = tokens_of("<user> Where is it?")
    row = at_site(residual(tokens, (1,), [len(tokens) - 1]), site).to_float32()[0, 0]
    assert value == pytest.approx(float(probe.score_tokens(row[None, None], (1,))[0]))
