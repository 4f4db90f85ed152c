"""What a body or a registration says is judged before it is scheduled; the server goes on."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
import zstandard

from inspect_lens import SteeringVector
from inspect_lens.spec import EngineProbe

pytestmark = pytest.mark.engine

MODEL = "organism/checkpoint"
REGISTRY = "/v1/inspect_lens/registry"
WEIGHT = {"weight": np.ones((1, 256), np.float32)}
VECTOR = SteeringVector(activations=np.ones((1, 256)), layer_indices=[1]).model_dump(mode="json")


@pytest.fixture(scope="module")
def client(lens_server_url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=lens_server_url, timeout=120) as made:
        for name, threshold in (("p", 1e6), ("bare", None)):
            probe = EngineProbe(layers=(1,), tensors=WEIGHT, threshold=threshold)
            item = {"name": name, "probe": probe.model_dump(mode="json")}
            assert made.post(REGISTRY, json=item).status_code == 200
        yield made
        for name in ("p", "bare"):
            assert made.delete(f"{REGISTRY}/{name}").status_code == 200


def complete(client: httpx.Client, **body: Any) -> httpx.Response:
    plain = {"model": MODEL, "prompt": "hello there", "max_tokens": 4, "temperature": 0}
    return client.post("/v1/completions", content=json.dumps(plain | body), headers=JSON)


JSON = {"content-type": "application/json"}


def refused(answer: httpx.Response, message: str) -> None:
    assert answer.status_code == 400, answer.text
    assert message in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            {"inspect_lens": {"probes": [{"name": "bare", "alarm": "stop"}]}},
            "has no threshold for the running mean",
        ),
        ({"inspect_lens": {"probes": ["nobody"]}}, "registered"),
        ({"capture": {"layers": [1]}}, "nobody reads it there"),
        ({"capture_layers": [1]}, "the key is 'output_residual_stream'"),
        ({"lens": {}}, '{"inspect_lens": {"lens": ...}}'),
        ({"sampling_params": {"extra_args": {"inspect_lens": {}}}}, "nobody reads it there"),
        ({"extra_body": {"inspect_lens": {}}}, "argument of clients"),
        ({"output_residual_stream": 1}, "allowed are true"),
        ({"vllm_xargs": {"output_residual_stream": "2"}}, "allowed are true"),
        ({"extra_args": 3}, "has to be a mapping"),
        ({"extra_args": {"_inspect_lens": {}}}, "reserved"),
        (
            {"inspect_lens": {"edits": [VECTOR | {"positions": [False, False]}]}},
            "selects none of them",
        ),
        (
            {"inspect_lens": {}, "extra_args": {"inspect_lens": {"capture": {}}}},
            "give it once",
        ),
    ],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_word_is_read_or_refused(
    client: httpx.Client, path: str, body: dict[str, Any], message: str
) -> None:
    said: dict[str, Any] = {"prompt": "hello"}
    if "chat" in path:
        said = {"messages": [{"role": "user", "content": "hello"}]}
    refused(client.post(path, json={"model": MODEL, "max_tokens": 2, **said, **body}), message)


def test_a_true_means_all_layers_wherever_it_stands(client: httpx.Client) -> None:
    asked = {"output_residual_stream": True}
    for body in (asked, {"extra_args": asked}, {"vllm_xargs": asked}):
        answer = complete(client, **body)
        assert answer.status_code == 200, answer.text
        assert answer.json()["inspect_lens"]["capture"]["layers"] == list(range(6))
    assert complete(client, vllm_xargs={"output_residual_stream": "true"}).status_code == 200


def test_a_forged_envelope_is_a_400_on_the_route_of_tokens_too(client: httpx.Client) -> None:
    for envelope in ({}, {"reply": "x"}, 3):
        params = {"max_tokens": 2, "extra_args": {"_inspect_lens": envelope}}
        body = {"token_ids": [5, 6, 7], "sampling_params": params}
        answer = client.post("/inference/v1/generate", json=body)
        assert answer.status_code == 400, answer.text


def test_a_large_vector_steers_or_is_refused_by_its_prompt(client: httpx.Client) -> None:
    rows = np.random.default_rng(0).normal(size=(1, 1000, 256)).astype(np.float32)
    frame = zstandard.ZstdCompressor().compress(rows.tobytes())
    tensor = {
        "data": base64.b64encode(frame).decode(),
        "dtype": "float32",
        "shape": list(rows.shape),
        "compression": "zstd",
    }
    vector = {"op": "add", "vector": tensor, "layers": [1], "positions": list(range(1000))}
    few = SteeringVector(activations=rows[:, :2], layer_indices=[1], position_indices=[0, -1])
    answer = complete(client, inspect_lens={"edits": [few.model_dump(mode="json")]})
    assert answer.status_code == 200, answer.text
    assert answer.json()["inspect_lens"]["steer"]["n_tokens"] == 2
    # A thousand positions do not fit this prompt, which is found out after it was read.
    refused(complete(client, inspect_lens={"edits": [vector]}), "positions")
