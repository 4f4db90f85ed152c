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
