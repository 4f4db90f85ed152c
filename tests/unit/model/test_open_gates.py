"""Gates that stay open over a conversation: the provider and the client pass their keys on."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from inspect_ai.event import ModelEvent
from inspect_ai.model import ChatMessageAssistant, ChatMessageUser, GenerateConfig
from inspect_ai.solver import Generate, Solver, TaskState, solver

from inspect_lens.client import LensClient
from inspect_lens.model import lens_config
from inspect_lens.model._response import OPEN_GATES, with_open_gates
from inspect_lens.spec import Add, Gate, LensRequest, parse_extra_args


def edit(threshold: float) -> Add:
    gate = Gate(direction=np.ones(8), layer=1, threshold=threshold, scope="rest", conversation=True)
    return Add(vector=np.ones(8), layers=[1], when=gate, positions="completion")


FIRES, STAYS = edit(-1.0), edit(1.0)
"""The fake server opens the first by itself, and the second where it is told."""


def sent(server: Any) -> list[tuple[str, ...]]:
    requests = [parse_extra_args(body.get("vllm_xargs") or {}) for body in server.requests]
    return [(one or LensRequest()).open_gates for one in requests]


@solver
def turns(n: int, edits: Any) -> Solver:
    async def solve(state: TaskState, generate: Generate) -> TaskState:
        for _ in range(n):
            state = await generate(state)
            state.messages.append(ChatMessageUser(content="go on"))
        # Another conversation of the same sample.
        state.messages = [ChatMessageUser(content="begin anew")]
        return await generate(state)

    return solve


def test_a_conversation_keeps_its_gate_open(server: Any, run_eval: Any, model_of: Any) -> None:
    config = lens_config(edits=[FIRES, STAYS], base=GenerateConfig())
    log = run_eval(server, n=1, model=model_of(server), config=config, solver=turns(3, None))
    assert log.status == "success", log.error
    key = FIRES.gates[0].key
    assert sent(server) == [(), (key,), (key,), ()]
    events = [e for e in log.samples[0].events if isinstance(e, ModelEvent)]
    asked = [(e.config.extra_body or {})["extra_args"]["inspect_lens"] for e in events]
    assert [one.get("open_gates", []) for one in asked] == [[], [key], [key], []]


def test_a_key_goes_with_requests_that_have_its_gate(
    server: Any, run_eval: Any, model_of: Any
) -> None:
    @solver
    def two() -> Solver:
        async def solve(state: TaskState, generate: Generate) -> TaskState:
            for edits in ([FIRES], [STAYS], [FIRES, STAYS]):
                config = lens_config(edits=edits, base=GenerateConfig())
                state = await generate(state, extra_body=config.extra_body)
                state.messages.append(ChatMessageUser(content="go on"))
            return state

        return solve

    run_eval(server, n=1, model=model_of(server), solver=two())
    assert sent(server) == [(), (), (FIRES.gates[0].key,)]


def test_the_client_passes_on_what_an_answer_tells(server: Any) -> None:
    with LensClient(server.url) as client:
        first = client.chat([{"role": "user", "content": "a"}], edits=[FIRES])
        assert first.open_gates == (FIRES.gates[0].key,)
        second = client.chat(
            [{"role": "user", "content": "b"}], edits=[STAYS], open_gates=[STAYS.gates[0].key]
        )
        assert second.open_gates == (STAYS.gates[0].key,)
        # The server may know the gate, by a name or as its operator's.
        client.generate("c", open_gates=first.open_gates)
    assert sent(server)[-3:] == [(), (STAYS.gates[0].key,), first.open_gates]


@pytest.mark.parametrize("capture", [None, {"layers": [1]}])
def test_a_gate_of_the_servers_own_is_told_to_be_open(
    server: Any, run_eval: Any, model_of: Any, capture: Any
) -> None:
    key = FIRES.gates[0].key

    @solver
    def after_one() -> Solver:
        async def solve(state: TaskState, generate: Generate) -> TaskState:
            kept = {OPEN_GATES: {"keys": [key], "named": True}}
            state.messages.append(ChatMessageAssistant(content="yes", metadata=kept))
            state.messages.append(ChatMessageUser(content="go on"))
            return await generate(state)

        return solve

    config = lens_config(capture=capture, base=GenerateConfig()) if capture else GenerateConfig()
    log = run_eval(server, n=1, model=model_of(server), config=config, solver=after_one())
    assert log.status == "success", log.error
    assert sent(server) == [(key,)]


@pytest.mark.parametrize(
    "kept", [{}, {"keys": None}, {"keys": 5}, {"keys": "0" * 64}, {"keys": [5, "x", ["0"]]}, "x"]
)
def test_metadata_of_others_opens_nothing(kept: Any) -> None:
    message = ChatMessageAssistant(content="x", metadata={OPEN_GATES: kept})
    if isinstance(kept, dict):
        kept["named"] = True
    assert with_open_gates(None, [message]) is None
