"""Rows in the events of a stream, right behind their tokens, and the client that reads them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest

from inspect_lens._base.partial import PARTIAL_KEY
from inspect_lens.client import LensClient
from inspect_lens.errors import SpecError
from tests.kit.waiting import until

pytestmark = pytest.mark.engine

PROMPT = "Velosh was founded by"


@pytest.fixture(scope="module")
def client(lens_server_url: str) -> Iterator[LensClient]:
    with LensClient(lens_server_url) as made:
        yield made


def events(url: str, path: str = "/v1/completions", **body: Any) -> list[dict[str, Any]]:
    asked = {"model": "organism/checkpoint", "stream": True, "temperature": 0, **body}
    with httpx.stream("POST", f"{url}{path}", json=asked, timeout=120) as answer:
        assert answer.status_code == 200
        lines = [line[6:] for line in answer.iter_lines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return list(map(json.loads, lines[:-1]))


@pytest.mark.parametrize("transport", ["auto", "inline"])
def test_streamed_rows_lens_and_queries_are_those_of_a_whole_answer(
    client: LensClient, transport: str
) -> None:
    asked = {
        "capture": {"layers": [1, 4], "site": ["attn_out", "resid_post"], "transport": transport},
        "capture_qk": [2],
        "lens": {"layers": [3], "top_k": 2, "positions": "completion"},
        "max_tokens": 9,
        "ignore_eos": True,
    }
    for _ in range(3):  # rows of the prompt are kept ones from the third time on
        whole = client.generate(PROMPT, **asked)
    stream = client.stream(PROMPT, **asked)
    parts = list(stream)
    assert client._gives_here
    kinds = ["rows" if part.activations is not None else "text" for part in parts]
    n_prompt = whole.receipt.n_prompt
    assert kinds == ["text", "rows"] * (len(kinds) // 2)
    n_tokens, seen = 0, list[int]()
    for text, rows in zip(parts[::2], parts[1::2], strict=True):
        n_tokens += len(text.token_ids)  # more than one where vLLM merges them, on a busy machine
        seen += rows.positions["residual_stream"]
        assert seen == list(range(n_prompt + n_tokens - 1)), "each row behind its token"
    assert n_tokens == 9
    output = stream.output
    assert output.text == whole.text == "".join(part.text for part in parts)
    assert output.token_ids == whole.token_ids
    assert output.prompt_token_ids == whole.prompt_token_ids
    assert set(output.activations) == set(whole.activations)
    for name in ("residual_stream", "attn_out", "attn_q", "attn_k", "logit_lens"):
        np.testing.assert_array_equal(output.activations.numpy(name), whole.activations.numpy(name))
        came = [p.activations.numpy(name) for p in parts if p.activations and name in p.activations]
        np.testing.assert_array_equal(np.concatenate(came, axis=1), whole.activations.numpy(name))
    assert output.activations["qk_meta"] == whole.activations["qk_meta"]
    assert output.receipt == whole.receipt


def test_in_a_chat_rows_come_behind_the_tokens_of_their_choice(lens_server_url: str) -> None:
    found = events(
        lens_server_url, "/v1/chat/completions", messages=[{"role": "user", "content": PROMPT}],
        n=2, max_tokens=4, ignore_eos=True, return_token_ids=True, temperature=1.0,
        inspect_lens={"capture": {"layers": [2]}, "stream_results": True},
    )  # fmt: skip
    (last,) = [event for event in found if "inspect_lens" in event]
    n_prompt = last["inspect_lens"]["n_prompt"]
    tokens, rows = [0, 0], [0, 0]
    for event in found:
        for choice in event["choices"]:
            tokens[choice["index"]] += len(choice.get("token_ids") or ())
        for part in event.get(PARTIAL_KEY, ()):
            index = part["index"]
            rows[index] += part["activations"]["residual_stream"]["shape"][1]
            assert tokens[index], "neither behind the role nor behind another choice's tokens"
            assert rows[index] <= n_prompt + tokens[index] - 1, "never before its token"
    assert rows == [n_prompt + 3] * 2


def test_choices_and_prompts_have_their_own_rows(lens_server_url: str) -> None:
    asked = {"capture": {"layers": [2], "positions": "completion"}, "stream_results": True}
    found = events(
        lens_server_url, prompt=["a b c d e f", "g"], n=2, max_tokens=6, ignore_eos=True,
        temperature=1.0, inspect_lens=asked, return_token_ids=True,
    )  # fmt: skip
    tokens: dict[int, int] = {}
    rows: dict[int, list[int]] = {}
    for event in found:
        for choice in event["choices"]:
            tokens[choice["index"]] = tokens.get(choice["index"], 0) + len(choice["token_ids"])
        for part in event.get(PARTIAL_KEY, ()):
            entry = part["activations"]["residual_stream"]
            first = entry["first_position"]
            rows.setdefault(part["index"], []).extend(range(first, first + entry["shape"][1]))
            assert len(rows[part["index"]]) <= tokens[part["index"]] - 1, "never before its token"
    (last,) = [event for event in found if "inspect_lens" in event]
    assert "activations" not in last
    assert set(rows) == {0, 1, 2, 3}
    for choice in last["inspect_lens_choices"]:
        first = choice["inspect_lens"]["n_prompt"]
        assert rows[choice["index"]] == list(range(first, first + 5))


def test_whoever_stops_reading_ends_the_generation_and_leaves_no_rows(
    client: LensClient, lens_server_url: str
) -> None:
    def stored() -> int:
        found: int = httpx.get(f"{lens_server_url}/v1/inspect_lens").json()["stored_bytes"]
        return found

    before = stored()
    with client.stream(PROMPT, capture_layers=[1], max_tokens=900, ignore_eos=True) as stream:
        next(stream)
        assert until(lambda: stored() > before), "rows that wait to be fetched"
    answer = client.generate(PROMPT, capture_layers=[1], max_tokens=2)
    assert answer.receipt.n_completion == 2
    assert until(lambda: stored() <= before)


def test_what_cannot_be_streamed_is_refused_before_the_stream_begins(
    client: LensClient, lens_server_url: str
) -> None:
    with pytest.raises(SpecError, match=r"capture.reduce='mean'.*ready only when the last"):
        client.stream(PROMPT, capture={"layers": [1], "reduce": "mean"}, stream_results=True)
    asked = {"capture": {"layers": [1]}, "stream_results": True}
    for path, body in (
        ("/v1/completions", {"prompt": PROMPT}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": PROMPT}]}),
    ):
        whole = {"model": "organism/checkpoint", "inspect_lens": asked, **body}
        answer = httpx.post(f"{lens_server_url}{path}", json=whole, timeout=60)
        assert answer.status_code == 400
        assert "stream_results: this answer comes as a whole" in answer.text
