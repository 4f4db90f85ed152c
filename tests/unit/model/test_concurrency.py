from __future__ import annotations

import threading
import time

import anyio
import numpy as np
import pytest

from inspect_lens.model import activations_for, lens_config
from inspect_lens.model._provider import LensAPI
from inspect_lens.model._response import TAKERS
from tests.kit.fake_server import FakeLensServer, residual, tokens_of

from .conftest import GetModel

pytestmark = pytest.mark.anyio


async def test_eight_calls_at_once_do_not_mix(model_of: GetModel) -> None:
    with FakeLensServer(delay_s=0.1) as server:
        model = model_of(server)
        found: dict[int, np.ndarray] = {}
        messages: dict[int, str] = {}

        async def call(i: int) -> None:
            prompt = " ".join(f"w{i}{j}" for j in range(i + 1))
            output = await model.generate(prompt, config=lens_config(capture=[i % 4]))
            acts = output.metadata["activations"]
            assert acts.prompt_token_ids == tuple(tokens_of(f"<user> {prompt}"))
            tokens = [*acts.prompt_token_ids, *acts.token_ids]
            expected = residual(tokens, (i % 4,), list(range(len(tokens) - 1)))
            np.testing.assert_array_equal(acts.numpy(), expected.to_float32())
            found[i] = acts.numpy()
            messages[i] = output.message.id or ""

        async with anyio.create_task_group() as group:
            for i in range(8):
                group.start_soon(call, i)
        assert len(found) == 8
        for i, message_id in messages.items():
            handle = activations_for(message_id)
            assert handle is not None
            np.testing.assert_array_equal(handle.numpy(), found[i])


async def test_calls_that_end_together_are_taken_by_a_few_threads(
    model_of: GetModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock, now, most = threading.Lock(), 0, 0

    def slow(self: LensAPI, handle: str) -> bytes:
        nonlocal now, most
        with lock:
            now += 1
            most = max(most, now)
        time.sleep(0.02)
        with lock:
            now -= 1
        return fetch(self, handle)

    fetch = LensAPI.fetch
    monkeypatch.setattr(LensAPI, "fetch", slow)
    with FakeLensServer(delay_s=0.1) as server:
        model = model_of(server)
        done: list[object] = []

        async def call() -> None:
            output = await model.generate("a b", config=lens_config(capture=[1]))
            done.append(output.metadata["activations"])

        async with anyio.create_task_group() as group:
            for _ in range(3 * TAKERS):
                group.start_soon(call)
    assert len(done) == 3 * TAKERS
    assert 1 < most <= TAKERS
