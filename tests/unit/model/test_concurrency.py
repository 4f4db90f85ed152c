from __future__ import annotations

import anyio
import numpy as np
import pytest

from inspect_lens.model import activations_for, lens_config
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
