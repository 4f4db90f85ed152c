"""The logit lens over HTTP: in the response or beside it, and refusals by status."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from inspect_lens.client import LensClient
from tests.engine.test_server import MESSAGES, chat, client

__all__ = ["client"]

pytestmark = pytest.mark.engine


def test_a_logit_lens_over_http(client: Any, lens_server_url: str) -> None:
    found = []
    for transport in ("inline", "binary"):
        lens = {"layers": [1, 5], "top_k": 2, "tokens": [5], "transport": transport}
        answer = chat(client, vllm_xargs={"inspect_lens": json.dumps({"lens": lens})}).json()
        receipt = answer["inspect_lens"]["lens"]
        n_fed = answer["usage"]["total_tokens"] - 1
        assert (receipt["layers"], receipt["n_positions"]) == ([1, 5], n_fed)
        assert answer["activations"]["logit_lens"]["shape"] == [2, n_fed, 6]
        with LensClient(lens_server_url) as lens_client:
            output = lens_client.chat(
                MESSAGES, max_tokens=8, lens=lens, activations_transport=transport
            )
        assert output.receipt is not None
        assert output.receipt.lens is not None
        found.append(output.receipt.lens.result(output.activations))
        n_prompt = len(output.prompt_token_ids)
        assert found[-1].token_ids[n_prompt - 1 :, 1, 0].tolist() == output.token_ids
    for field in ("token_ids", "logprobs", "target_logprobs", "target_ranks"):
        np.testing.assert_array_equal(getattr(found[0], field), getattr(found[1], field))


@pytest.mark.parametrize(
    ("lens", "words"),
    [
        ({"layers": [6]}, "has layers 0 to 5"),
        ({"top_k": 101}, "allowed are 0 to 100"),
        ({"tokens": [10**6]}, "has ids 0 to"),
        ({"tokens": ["two words and more"]}, "tokens of this model"),
        ({"layer": 1}, "lens.layer"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_wrong_lens_is_a_bad_request(
    client: Any, lens: dict[str, Any], words: str, stream: bool
) -> None:
    asked = json.dumps({"lens": lens})
    answer = chat(client, vllm_xargs={"inspect_lens": asked}, stream=stream)
    assert answer.status_code == 400
    assert words in answer.text
