"""Log-probabilities of known tokens, as a server of vLLM gives them."""

from __future__ import annotations

import anyio
import pytest
from inspect_ai.model import get_model

from inspect_lens.errors import CaptureError, SpecError, UnsupportedError
from inspect_lens.model import token_logprobs
from tests.kit.fake_server import FakeLensServer
from tests.kit.scoring_server import ScoringServer


def ask(server: FakeLensServer, prompt: list[int], completion: list[int]) -> list[float]:
    model = get_model(f"lens/{server.model}", base_url=server.url, memoize=False)
    found = anyio.run(lambda: token_logprobs(model, prompt_token_ids=prompt, token_ids=completion))
    return [float(v) for v in found]


def test_each_token_of_the_completion_the_last_included() -> None:
    with ScoringServer() as server:
        assert ask(server, [7, 8], [9, 10, 11]) == pytest.approx([-2.009, -3.01, -4.011])
        body = server.requests[-1]
    assert body["prompt"] == [7, 8, 9, 10, 11]
    # Which has the server judge the prompt, and asks for nothing that vLLM would not do.
    assert body["vllm_xargs"] == {"skip_reading_prefix_cache": "true"}


def test_an_incomplete_answer_is_an_error_and_not_a_mean_of_the_rest() -> None:
    with ScoringServer() as server:
        server.short = True
        with pytest.raises(CaptureError, match="4 prompt_logprobs for 5 tokens"):
            ask(server, [7, 8], [9, 10, 11])
    with FakeLensServer() as plain, pytest.raises(CaptureError, match="no prompt_logprobs"):
        ask(plain, [7], [8])
    with FakeLensServer() as plain, pytest.raises(SpecError, match="at least one each"):
        ask(plain, [7], [])
    other = get_model("mockllm/model")
    with pytest.raises(UnsupportedError, match="needs a vllm-lens/ model"):
        anyio.run(lambda: token_logprobs(other, prompt_token_ids=[1], token_ids=[2]))
