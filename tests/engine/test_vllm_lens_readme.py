"""The snippets of vllm-lens 1.3.0's README for capture and steering, with our imports.

Only names of models, layers and widths are those of the organism.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.engine


def test_offline_capture(offline_llm: Any) -> None:
    from vllm import SamplingParams

    sp = SamplingParams(max_tokens=1, extra_args={"output_residual_stream": [3, 5]})
    out = offline_llm.generate(["Hello world"], sp)
    acts = out[0].activations["residual_stream"]
    assert acts.shape == (2, len(out[0].prompt_token_ids), 256)


def test_offline_steering(offline_llm: Any) -> None:
    from vllm import SamplingParams

    from inspect_lens import SteeringVector

    sv = SteeringVector(
        activations=torch.randn(1, 256),
        layer_indices=[3],
        scale=4.0,
        norm_match=True,
        position_indices=None,
    )
    sp = SamplingParams(max_tokens=20, temperature=0, extra_args={"apply_steering_vectors": [sv]})
    steered = offline_llm.generate(["I think the best dessert is"], sp)[0]
    plain = offline_llm.generate(
        ["I think the best dessert is"], SamplingParams(max_tokens=20, temperature=0)
    )[0]
    assert steered.outputs[0].token_ids != plain.outputs[0].token_ids
    wire = {"apply_steering_vectors": json.dumps([sv.model_dump(mode="json")])}
    again = offline_llm.chat(
        [{"role": "user", "content": "hello"}], SamplingParams(max_tokens=2, extra_args=wire)
    )
    assert again[0].inspect_lens.steer.layers == (3,)


def test_http_client(lens_server_url: str) -> None:
    from inspect_lens import SteeringVector
    from inspect_lens.client import VLLMLensClient

    client = VLLMLensClient(lens_server_url)
    out = client.generate("Hello world", capture_layers=[3, 5])
    shape = out.activations["residual_stream"].shape
    assert (shape[0], shape[2]) == (2, 256)
    out = client.generate(
        "Hello world", capture_layers=list(range(6)), activations_transport="binary"
    )
    assert out.activations["residual_stream"].shape[0] == 6
    output = client.generate("Hello", max_tokens=10, capture_layers=[5])
    assert output.activations["residual_stream"].dtype == torch.float32
    sv = SteeringVector(activations=torch.randn(1, 256), layer_indices=[3], scale=4.0)
    client.generate("I think the best dessert is", steering_vectors=[sv])
    assert client.chat([{"role": "user", "content": "hi"}], capture_layers=[0]).activations


@pytest.mark.anyio
async def test_inspect_capture_and_oracle_style_steering(
    lens_server_url: str, tmp_path: Path
) -> None:
    from inspect_ai.model import ChatMessageUser, GenerateConfig, get_model

    from inspect_lens import SteeringVector

    model = get_model("vllm-lens/organism/checkpoint", base_url=f"{lens_server_url}/v1")
    messages: list[Any] = [ChatMessageUser(content="What does the ritesh river do?")]
    capture_config = GenerateConfig(
        temperature=0.0,
        max_tokens=1,
        extra_body={
            "extra_args": {"output_residual_stream": [2]},
            "chat_template_kwargs": {"enable_thinking": False},
        },
    )
    output = await model.generate(messages, config=capture_config)
    assert output.metadata is not None
    residual_stream = output.metadata["activations"]["residual_stream"]
    assert residual_stream.dtype == torch.float32
    assert residual_stream.shape[0] == 1
    act_vector = residual_stream[:, -1]
    oracle_config = GenerateConfig(
        temperature=0.0,
        max_tokens=8,
        extra_body={
            "extra_args": {
                "apply_steering_vectors": [
                    SteeringVector(
                        activations=act_vector,
                        layer_indices=[1],
                        scale=1.0,
                        norm_match=True,
                        position_indices=[3],
                    )
                ],
            },
            "chat_template_kwargs": {"enable_thinking": False},
        },
    )
    answer = await model.generate(messages, config=oracle_config)
    assert answer.metadata is not None
    assert answer.metadata["inspect_lens"]["steer"]["n_tokens"] == 1


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"
