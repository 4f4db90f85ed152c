from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from inspect_lens.model import activations_for, lens_config
from tests.kit.fake_server import FakeLensServer, tokens_of

from .conftest import GetModel

pytestmark = pytest.mark.anyio

PROMPT = "one two three"


class _Seen:
    def __init__(self) -> None:
        self.events: list[Any] = []

    async def __call__(self, event: Any) -> None:
        self.events.append(event)


async def test_a_lens_call_declines_to_stream(server: FakeLensServer, model_of: GetModel) -> None:
    seen = _Seen()
    model = model_of(server)
    output = await model.generate(PROMPT, config=lens_config(capture=[1]), on_stream=seen)
    assert output.metadata["activations"].layers == (1,)
    assert not server.requests[-1].get("stream")


async def test_other_calls_stream_and_keep_their_tokens(
    server: FakeLensServer, model_of: GetModel
) -> None:
    seen = _Seen()
    output = await model_of(server).generate(PROMPT, on_stream=seen)
    assert server.requests[-1]["stream"] is True
    assert seen.events
    assert output.completion == "word00 word01 word02"
    assert output.metadata["token_ids"] == tokens_of(output.completion)
    assert output.metadata["prompt_token_ids"] == tokens_of("<user> one two three")


@pytest.mark.parametrize("dialect", ["inspect_lens", "vllm_lens"])
async def test_forced_streaming_loses_nothing(model_of: GetModel, dialect: Any) -> None:
    with FakeLensServer(dialect=dialect) as server:
        config = lens_config(capture=[1, 2])
        whole = await model_of(server).generate(PROMPT, config=config)
        streamed = await model_of(server, stream=True).generate(PROMPT, config=config)
        assert server.requests[-1]["stream"] is True
        one, two = (output.metadata["activations"] for output in (whole, streamed))
        np.testing.assert_array_equal(one.numpy(), two.numpy())
        assert one.token_ids == two.token_ids
        assert one.prompt_token_ids == two.prompt_token_ids
        assert one.receipt == two.receipt


async def test_forced_streaming_keeps_every_choice(
    server: FakeLensServer, model_of: GetModel
) -> None:
    config = lens_config(capture=[1], num_choices=2)
    output = await model_of(server, stream=True).generate(PROMPT, config=config)
    for choice in output.choices:
        handle = activations_for(choice.message)
        assert handle is not None
        assert handle.token_ids == tuple(tokens_of(choice.message.text))
