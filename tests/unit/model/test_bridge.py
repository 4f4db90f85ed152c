"""Agents of other packages, which speak OpenAI's protocols to Inspect's bridge, and compaction."""

from __future__ import annotations

import anyio
import pytest
from inspect_ai.agent import Agent, AgentState, agent, agent_bridge
from inspect_ai.model import ModelAPI
from openai import AsyncOpenAI

from inspect_lens.model import read_activations
from tests.kit.fake_server import FakeLensServer

from .conftest import GetModel, RunEval


@agent
def speaks_responses() -> Agent:
    async def execute(state: AgentState) -> AgentState:
        async with agent_bridge(state) as bridge:
            client = AsyncOpenAI(api_key="none")
            await client.responses.create(model="inspect", input=state.messages[-1].text)
            return bridge.state

    return execute


def test_an_agent_of_the_responses_api_is_captured(
    server: FakeLensServer, model_of: GetModel, run_eval: RunEval
) -> None:
    log = run_eval(server, model=model_of(server, capture=[1]), solver=speaks_responses())
    assert log.status == "success", log.error
    calls = read_activations(log.location)
    assert [call.activations.layers for call in calls] == [(1,)] * len(log.samples or [])
    assert calls[0].message_id == (log.samples or [])[0].output.message.id


def test_tokens_are_counted_by_the_server(
    server: FakeLensServer, model_of: GetModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of(server)
    assert anyio.run(model.count_tokens, "four words of text") == 4

    async def estimated(api: ModelAPI, text: str) -> int:
        return 7

    monkeypatch.setattr(ModelAPI, "count_text_tokens", estimated)
    monkeypatch.setattr(server, "post", lambda path, body: (404, {"detail": "Not Found"}))
    assert anyio.run(model.count_tokens, "four words of text") == 7  # behind a proxy, say
