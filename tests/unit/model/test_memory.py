"""A long agent run: what is resident stays bounded, and every turn can still be read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from inspect_ai.log import read_eval_log
from inspect_ai.model import ChatMessageUser, Model, get_model
from inspect_ai.solver import Generate, Solver, TaskState, solver

from inspect_lens.model import _handle as store
from inspect_lens.model import (
    activations_df,
    activations_for,
    lens_config,
    read_activations,
    resident_activation_bytes,
)
from tests.kit.fake_server import FakeLensServer, residual

TURNS, HIDDEN, LAYER, LIMIT = 50, 256, 2, 256 << 10


@pytest.fixture
def small_memory(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """INSPECT_LENS_MEMORY_BYTES as a fresh process would read it, and all levels that occurred."""
    monkeypatch.setenv("INSPECT_LENS_MEMORY_BYTES", str(LIMIT))
    store.MEMORY.clear()
    monkeypatch.setattr(store.MEMORY, "_limit_bytes", None)
    levels: list[int] = []
    put = store.MEMORY.put

    def watched(key: str, payload: Any) -> None:
        put(key, payload)
        levels.append(resident_activation_bytes())

    monkeypatch.setattr(store.MEMORY, "put", watched)
    return levels


@solver
def agent() -> Solver:
    async def solve(state: TaskState, generate: Generate) -> TaskState:
        model: Model = get_model()
        for turn in range(TURNS):
            output = await model.generate(state.messages, config=lens_config(capture=[LAYER]))
            state.messages += [output.message, ChatMessageUser(content=f"and number {turn} ?")]
            state.output = output
        # While it runs, its first turn is there for whoever has the message alone.
        first = next(m for m in state.messages if m.role == "assistant")
        handle = activations_for(first)
        assert handle is not None
        state.metadata["first"] = handle.numpy().shape[1]
        return state

    return solve


def test_fifty_turns_stay_within_the_limit_and_all_can_be_read(
    small_memory: list[int], run_eval: Any, tmp_path: Path
) -> None:
    with FakeLensServer(hidden=HIDDEN) as server:
        log = run_eval(server, n=1, solver=agent())
    assert log.status == "success", log.error
    # The server is gone. All that follows comes from memory and files.
    calls = read_activations(read_eval_log(log.location))
    assert len(calls) == TURNS
    everything = sum(
        int(np.prod(c.activations.tensors["residual_stream"].shape)) * 2 for c in calls
    )
    assert everything > 8 * LIMIT
    for call in calls:
        handle = call.activations
        tokens = [*handle.prompt_token_ids, *handle.token_ids]
        expected = residual(tokens, (LAYER,), list(range(len(tokens) - 1)), HIDDEN).to_float32()
        np.testing.assert_array_equal(handle.numpy(), expected)
    # Each was read here; those that the process beside wrote were not held before.
    assert len(small_memory) >= TURNS
    assert max(small_memory) <= LIMIT
    assert log.samples[0].metadata["first"] == calls[0].activations.numpy().shape[1]
    frame = activations_df(log)
    assert frame["n_prompt"].is_monotonic_increasing
    assert len(frame) == TURNS
