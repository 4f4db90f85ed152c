from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from inspect_lens.client import LensClient, VLLMLensClient
from inspect_lens.errors import CaptureError, LensError, SpecError, UnsupportedError
from inspect_lens.spec import CaptureSpec, SteeringVector
from tests.kit.fake_server import FakeLensServer, residual, tokens_of

PROMPT = "one two three"


def test_capture_and_text(server: FakeLensServer) -> None:
    with LensClient(server.url) as client:
        out = client.generate(PROMPT, capture_layers=[2, 1], max_tokens=2)
    assert client.model == "org/tiny"
    assert out.text == "word00 word01"
    assert out.activations is not None
    stream = out.activations["residual_stream"]
    assert isinstance(stream, torch.Tensor)
    assert stream.dtype == torch.bfloat16
    tokens = tokens_of(PROMPT) + tokens_of(out.text)
    assert (out.prompt_token_ids, out.token_ids) == (tokens[:3], tokens[3:])
    expected = residual(tokens, (1, 2), [0, 1, 2, 3]).to_float32()
    np.testing.assert_array_equal(out.activations.numpy(), expected)
    assert out.receipt is not None
    assert out.raw["choices"]
    assert server.requests[-1]["vllm_xargs"] == {"output_residual_stream": "[1, 2]"}


def test_chat_all_layers_and_binary(server: FakeLensServer) -> None:
    client = VLLMLensClient(f"{server.url}/v1/", model="org/tiny")
    messages = [{"role": "user", "content": PROMPT}]
    plain = client.chat(messages, capture_layers=True, top_p=0.5)
    binary = client.chat(messages, capture_layers=True, activations_transport="binary")
    assert plain.activations is not None
    assert binary.activations is not None
    np.testing.assert_array_equal(plain.activations.numpy(), binary.activations.numpy())
    assert server.requests[0]["top_p"] == 0.5
    assert client.chat(messages).activations is None


def test_steering_and_positions(server: FakeLensServer) -> None:
    client = LensClient(server.url)
    vector = SteeringVector(activations=np.ones((1, 8)), layer_indices=[1], scale=2.0)
    out = client.generate(
        PROMPT,
        steering_vectors=[vector],
        capture=CaptureSpec(layers=(1,), positions="last_prompt"),
    )
    assert out.text.startswith("steered")
    assert out.activations is not None
    assert out.activations["residual_stream"].shape == (1, 1, 8)
    assert json.loads(server.requests[-1]["vllm_xargs"]["inspect_lens"])["steer"]
    client.generate(PROMPT, steering_vectors=[vector.model_dump(mode="json")])
    (sent,) = json.loads(server.requests[-1]["vllm_xargs"]["apply_steering_vectors"])
    assert sent["scale"] == 2.0


def test_what_is_not_served_says_so(server: FakeLensServer) -> None:
    client = LensClient(server.url)
    with pytest.raises(UnsupportedError, match="hooks"):
        client.generate(PROMPT, hooks=[object()])
    with pytest.raises(UnsupportedError, match="capture_qk"):
        client.chat([], capture_qk=[1])
    with pytest.raises(UnsupportedError, match="register_hooks"):
        client.register_hooks([])
    with pytest.raises(AttributeError):
        client.nothing  # noqa: B018
    assert not server.requests


def test_errors_carry_the_words_of_the_server(
    server: FakeLensServer, plain: FakeLensServer
) -> None:
    client = LensClient(server.url)
    with pytest.raises(SpecError, match="layer 9; org/tiny"):
        client.generate(PROMPT, capture_layers=[9])
    with pytest.raises(LensError, match="does not exist"):
        LensClient(server.url, model="other").generate(PROMPT)
    with pytest.raises(CaptureError, match="plug-in"):
        LensClient(plain.url).generate(PROMPT, capture_layers=[1])
    with FakeLensServer(expire_handles=True) as expired, pytest.raises(CaptureError, match="404"):
        LensClient(expired.url).generate(PROMPT, capture_layers=[1], activations_transport="binary")
    with FakeLensServer(api_key="secret") as closed:
        with pytest.raises(LensError, match="Unauthorized"):
            LensClient(closed.url).generate(PROMPT)
        assert LensClient(closed.url, api_key="secret").generate(PROMPT).text
