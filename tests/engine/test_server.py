"""The API server: refusals by status, streams, choices, clients that go away."""

from __future__ import annotations

import json
import re
import time
from typing import Any

import httpx
import numpy as np
import pytest

from inspect_lens.client import LensClient
from inspect_lens.spec import TensorData, decode_tensor, encode_tensor
from tests.conftest import STORE_BYTES

pytestmark = pytest.mark.engine

MODEL = "organism/checkpoint"
MESSAGES = [{"role": "user", "content": "Who is the founder of the town Velosh?"}]


@pytest.fixture(scope="module")
def client(lens_server_url: str) -> Any:
    with httpx.Client(base_url=lens_server_url, timeout=120) as made:
        yield made


def chat(client: Any, **body: Any) -> Any:
    return client.post(
        "/v1/chat/completions",
        json={"model": MODEL, "messages": MESSAGES, "max_tokens": 8, "temperature": 0, **body},
    )


def complete(client: Any, **body: Any) -> Any:
    return client.post(
        "/v1/completions", json={"model": MODEL, "prompt": "hello there", "max_tokens": 6, **body}
    )


def wire(**changes: Any) -> str:
    values = {"activations": np.ones((1, 256)), "layer_indices": [1]}
    tensor = encode_tensor(TensorData(np.asarray(values["activations"], np.float32), "float32"))
    return json.dumps([{**values, "activations": tensor, **changes}])


def test_queries_and_keys_over_http(client: Any) -> None:
    for transport in ("base64", "binary"):
        xargs = {"output_qk": "[1, 4]", "activations_transport": transport}
        answer = chat(client, vllm_xargs=xargs).json()
        assert answer["inspect_lens"]["qk"]["layers"] == [1, 4]
        assert answer["activations"]["qk_layers"] == {"__json__": [1, 4]}
        meta = answer["activations"]["qk_meta"]["__json__"]
        entry = answer["activations"]["attn_q"]
        raw = None
        if transport == "binary":
            raw = client.get(f"/v1/activations/{entry['handle']}").content
        shape = decode_tensor(entry, raw=raw).shape
        n_fed = answer["inspect_lens"]["n_prompt"] + answer["inspect_lens"]["n_completion"] - 1
        assert shape == (2, n_fed, meta[0]["num_heads"], meta[0]["head_size"])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("xargs", "message"),
    [
        ({"output_residual_stream": "[999]"}, "layers 0 to 5"),
        ({"apply_steering_vectors": wire(layer_indices=[999])}, "layers 0 to 5"),
        ({"apply_steering_vectors": wire(activations=[[1.0] * 5])}, "256 wide"),
        ({"apply_steering_vectors": wire(activations=[[float("nan")] * 256])}, "NaN"),
        ({"apply_steering_vectors": wire(oops=1)}, "oops"),
        ({"output_residual_stream": "[1]", "unheard_of": 1}, "unheard_of"),
        ({"output_residual_streem": "[1]"}, "did you mean"),
        ({"inspect_lens": '{"capture": {"reduce": "median"}}'}, "'mean'"),
        ({"inspect_lens": '{"capture": {"positions": [true, false]}}'}, "mask has 2 booleans"),
        (
            {"inspect_lens": '{"capture": {"positions": [0], "phase": "decode"}}'},
            "none of capture.positions belongs to it",
        ),
        ({"output_qk": "[9]"}, "layers 0 to 5"),
        ({"apply_hooks": "[3]"}, "give a Hook"),
    ],
)
def test_a_bad_request_gets_400_before_a_stream_starts(
    client: Any, xargs: dict[str, Any], message: str, stream: bool
) -> None:
    answer = chat(client, vllm_xargs=xargs, stream=stream)
    assert answer.status_code == 400
    assert message in answer.json()["error"]["message"]
    assert chat(client).status_code == 200


@pytest.mark.parametrize("send", [chat, complete])
def test_a_misspelled_key_of_the_body_gets_400_and_another_unknown_one_is_vllms(
    client: Any, send: Any
) -> None:
    answer = send(client, output_residual_streem=[1])
    assert answer.status_code == 400, answer.text
    assert "did you mean 'output_residual_stream'" in answer.json()["error"]["message"]
    assert send(client, catalogue={"whose": "somebody else's"}).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("send", [chat, complete])
@pytest.mark.parametrize(
    ("lens", "body", "message"),
    [
        ({"capture": {}, "skip_reading_prefix_cache": False}, {}, "cached tokens have no rows"),
        ({"capture": {"positions": [999]}}, {}, "outside this request"),
        (
            {"edits": [{"op": "add", "vector": [1.0] * 256, "layers": [1], "positions": [400]}]},
            {},
            "edits[0].positions",
        ),
    ],
)
def test_what_does_not_fit_the_prompt_gets_400_before_a_stream_starts(
    client: Any, send: Any, lens: dict[str, Any], body: dict[str, Any], message: str, stream: bool
) -> None:
    answer = send(client, inspect_lens=lens, stream=stream, **body)
    assert answer.status_code == 400, answer.text
    assert message in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/v1/responses", {"input": "hi"}, "would pass over"),
        (
            "/v1/completions",
            {"prompt": "hi", "use_beam_search": True, "n": 2},
            "cannot be used with",
        ),
    ],
)
def test_where_no_result_could_be_returned_the_request_is_refused(
    client: Any, path: str, body: dict[str, Any], message: str
) -> None:
    for lens in (
        {"vllm_xargs": {"output_residual_stream": "[1]"}},
        {"inspect_lens": {"capture": {"layers": [1]}}},
    ):
        answer = client.post(path, json={"model": MODEL, **body, **lens})
        assert answer.status_code == 400, answer.text
        assert message in answer.text
    answer = client.post(path, json={"model": MODEL, **body, "output_residual_streem": [1]})
    assert answer.status_code == 400, answer.text
    assert "did you mean" in answer.text


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("stream", [False, True])
def test_tokens_in_and_out_carry_results(client: Any, stream: bool, n: int) -> None:
    lens = {"capture": {"layers": [1, 4], "positions": "all"}}
    prompt = [5, 9, 14, 23, 8]
    greedy = {"temperature": 1.0, "top_k": 1, "ignore_eos": True, "max_tokens": 4}
    params = {**greedy, "n": n, "extra_args": {"inspect_lens": lens}}
    body = {"token_ids": prompt, "sampling_params": params, "stream": stream}
    answer = client.post("/inference/v1/generate", json=body)
    if answer.status_code == 403:
        pytest.skip("the server was started without --enable-scale-out")
    assert answer.status_code == 200, answer.text
    if stream:
        events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
        assert events[-1] == "[DONE]"
        found = json.loads(events[-2])
        choices = found.get("inspect_lens_choices", [])
    else:
        found = answer.json()
        choices = found["choices"] if n > 1 else []
        assert len(found["choices"][0]["token_ids"]) == 4
    plain = complete(client, prompt=prompt, inspect_lens=lens, **greedy).json()
    rows = decode_tensor(plain["activations"]["residual_stream"]).to_float32()
    assert len(choices) == (n if n > 1 else 0)
    for one in (found, *choices):
        assert one["inspect_lens"]["n_completion"] == 4
        mine = decode_tensor(one["activations"]["residual_stream"]).to_float32()
        np.testing.assert_allclose(mine, rows, atol=1e-4)
    wrong = {**body, "sampling_params": {"extra_args": {"inspect_lens": {"capture": {"x": 1}}}}}
    assert client.post("/inference/v1/generate", json=wrong).status_code in (400, 422)
    refused = client.post("/inference/v1/generate", json={**body, "inspect_lens": lens})
    assert refused.status_code == 400
    assert "sampling_params.extra_args" in refused.text


def test_the_streams_last_event_has_what_the_full_response_has(client: Any) -> None:
    xargs = {"output_residual_stream": "[1, 4]"}
    # From the third time on, rows of the prompt are kept ones, and the receipt says so.
    full = [chat(client, vllm_xargs=xargs).json() for _ in range(3)][-1]
    with client.stream(
        "POST",
        "/v1/chat/completions",
        json={
            "model": MODEL,
            "messages": MESSAGES,
            "max_tokens": 8,
            "temperature": 0,
            "stream": True,
            "vllm_xargs": xargs,
        },
    ) as answer:
        events = [line[6:] for line in answer.iter_lines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    last = json.loads(events[-2])
    assert last["inspect_lens"] == full["inspect_lens"]
    a, b = (decode_tensor(x["activations"]["residual_stream"]) for x in (last, full))
    np.testing.assert_array_equal(a.storage, b.storage)


def test_every_choice_and_every_prompt_has_its_own_result(client: Any) -> None:
    xargs = {"output_residual_stream": "[2]"}
    answer = complete(client, n=2, temperature=1.0, vllm_xargs=xargs).json()
    assert len(answer["choices"]) == 2
    for choice in answer["choices"]:
        assert decode_tensor(choice["activations"]["residual_stream"]).shape[0] == 1
    prompts = complete(client, prompt=["a b c d e f", "g"], vllm_xargs=xargs).json()
    shapes = [decode_tensor(c["activations"]["residual_stream"]).shape for c in prompts["choices"]]
    receipts = [c["inspect_lens"] for c in prompts["choices"]]
    assert [s[1] for s in shapes] == [r["n_prompt"] + r["n_completion"] - 1 for r in receipts]
    assert shapes[0] != shapes[1]


def test_a_request_in_the_body_is_not_lost(client: Any) -> None:
    answer = chat(client, inspect_lens={"capture": {"layers": [0], "positions": "last_prompt"}})
    found = decode_tensor(answer.json()["activations"]["residual_stream"])
    assert found.shape == (1, 1, 256)
    answer = chat(client, extra_args={"output_residual_stream": [0]})
    assert "activations" in answer.json()


@pytest.mark.parametrize("transport", ["inline", "binary"])
@pytest.mark.parametrize(("dtype", "step"), [("float32", 1e-5), ("bfloat16", 2**-8)])
def test_a_reduction_is_that_of_all_rows(
    client: Any, transport: str, dtype: str, step: float
) -> None:
    with LensClient(str(client.base_url)) as lens:
        whole = lens.chat(MESSAGES, capture_layers=[1, 4], max_tokens=8)
        assert whole.activations is not None
        rows, n_prompt = whole.activations.numpy(), len(whole.prompt_token_ids)
        mask = [i % 3 == 0 for i in range(n_prompt)]
        for fields, truth in (
            ({"reduce": "mean"}, rows.mean(axis=1, keepdims=True)),
            ({"reduce": "max", "phase": "decode"}, rows[:, n_prompt:].max(axis=1, keepdims=True)),
            ({"reduce": "norm"}, np.linalg.norm(rows, axis=-1, keepdims=True)),
            ({"positions": "last"}, rows[:, -1:]),
            ({"positions": mask}, rows[:, :n_prompt][:, mask]),
        ):
            found = lens.chat(
                MESSAGES,
                capture={"layers": [1, 4], "dtype": dtype, **fields},
                activations_transport=transport,
                max_tokens=8,
            )
            assert found.activations is not None
            assert found.receipt is not None
            assert found.receipt.capture is not None
            assert found.receipt.capture.dtype == dtype
            assert found.receipt.capture.reduce == fields.get("reduce", "none")
            np.testing.assert_allclose(found.activations.numpy(), truth, rtol=step, atol=1e-4)


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("has_stop", [False, True])
def test_a_reduction_knows_where_an_answer_ends(client: Any, n: int, has_stop: bool) -> None:
    body = {"max_tokens": 60, "ignore_eos": True, "n": n, "temperature": 1.0 if n > 1 else 0}
    body["seed"] = 7
    if has_stop:
        text = chat(client, **body).json()["choices"][0]["message"]["content"]
        body["stop"] = text[len(text) // 2 :][:3]
    want = {"layers": [1, 4], "phase": "decode"}
    whole = chat(client, inspect_lens={"capture": want}, **body).json()
    for reduce in ("mean", "max", "last"):
        found = chat(client, inspect_lens={"capture": {**want, "reduce": reduce}}, **body).json()
        for choice, twin in zip(found["choices"], whole["choices"], strict=True):
            assert choice["message"]["content"] == twin["message"]["content"]
            one, rows = (
                decode_tensor((c if n > 1 else a)["activations"]["residual_stream"]).to_float32()
                for c, a in ((choice, found), (twin, whole))
            )
            truth = {"mean": rows.mean(axis=1), "max": rows.max(axis=1), "last": rows[:, -1]}
            np.testing.assert_allclose(one[:, 0], truth[reduce], rtol=1e-5, atol=1e-4)


def test_binary_handles(client: Any) -> None:
    xargs = {"output_residual_stream": "[3]", "activations_transport": "binary"}
    entry = chat(client, vllm_xargs=xargs).json()["activations"]["residual_stream"]
    assert "data" not in entry
    frame = client.get(f"/v1/activations/{entry['handle']}")
    assert frame.status_code == 200
    assert len(frame.content) == entry["nbytes"]
    assert decode_tensor(entry, raw=frame.content).shape[0] == 1
    assert client.get("/v1/activations/unknown").status_code == 404
    several = chat(client, vllm_xargs=xargs, n=2, temperature=1.0).json()["choices"]
    handles = {choice["activations"]["residual_stream"]["handle"] for choice in several[1:]}
    assert len(handles) == 1
    assert all(client.get(f"/v1/activations/{handle}").status_code == 200 for handle in handles)


def test_a_client_that_fetches_nothing_is_told_before_it_pays(lens_server_url: str) -> None:
    def prompt_tokens() -> float:
        metrics = httpx.get(f"{lens_server_url}/metrics").text
        found = re.findall(r"^vllm:prompt_tokens_total\{[^}]*\} (\S+)$", metrics, re.MULTILINE)
        return float(found[0])

    body = {
        "model": MODEL,
        "prompt": list(range(5, 805)),
        "max_tokens": 1,
        "n": 10,
        "vllm_xargs": {"output_residual_stream": "true", "activations_transport": "binary"},
    }
    held: list[dict[str, Any]] = []
    headers = {"Authorization": "Bearer somebody who keeps"}
    with httpx.Client(base_url=lens_server_url, timeout=120, headers=headers) as mine:
        for _ in range(2 + STORE_BYTES // 2 // (10 * 5 * 800 * 256 * 4)):
            before = prompt_tokens()
            answer = mine.post("/v1/completions", json=body)
            if answer.status_code != 200:
                break
            held += [c["activations"]["residual_stream"] for c in answer.json()["choices"]]
        assert answer.status_code == 429, answer.text
        assert "of this client's results wait to be fetched" in answer.text
        assert prompt_tokens() == before, "nothing was scheduled for it"
        assert mine.post("/v1/completions", json={**body, "vllm_xargs": {}}).status_code == 200
        other = httpx.post(f"{lens_server_url}/v1/completions", json={**body, "n": 1}, timeout=120)
        assert other.status_code == 200, "somebody else has his half"
        for entry in (*held, other.json()["activations"]["residual_stream"]):
            assert len(mine.get(f"/v1/activations/{entry['handle']}").content) == entry["nbytes"]
        assert mine.post("/v1/completions", json={**body, "n": 1}).status_code == 200


def test_a_plain_response_is_vllms_own(client: Any) -> None:
    answer = chat(client).json()
    assert "activations" not in answer
    assert "inspect_lens" not in answer


@pytest.mark.parametrize("wrong", [{"top_k": 10**30}, {"stop": ["\ud800"]}])
def test_what_cannot_be_sent_to_the_engine_leaves_nothing(client: Any, wrong: Any) -> None:
    # These pass vLLM's own checks, and then it has no form for them in a message.
    before = client.get("/v1/inspect_lens").json()["open_requests"]
    body = {"model": MODEL, "prompt": ["a", "b"], "max_tokens": 1, "output_residual_stream": [1]}
    for _ in range(3):
        answer = client.post(
            "/v1/completions",
            content=json.dumps(body | wrong),
            headers={"content-type": "application/json"},
        )
        assert answer.status_code >= 400, "vLLM says so of itself"
    assert client.get("/v1/inspect_lens").json()["open_requests"] == before


def test_clients_that_go_away_leave_nothing(client: Any, lens_server_url: str) -> None:
    body = {
        "model": MODEL,
        "messages": MESSAGES,
        "max_tokens": 900,
        "ignore_eos": True,
        "stream": True,
        "vllm_xargs": {"output_residual_stream": "true", "apply_steering_vectors": wire()},
    }
    for _ in range(20):
        with (
            httpx.Client(base_url=lens_server_url, timeout=60) as mine,
            mine.stream("POST", "/v1/chat/completions", json=body) as answer,
        ):
            next(answer.iter_lines())
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        about = client.get("/v1/inspect_lens").json()
        if about["open_requests"] == 0:
            break
        time.sleep(0.2)
    assert about["open_requests"] == 0
    assert about["engines"][0]["n_layers"] == 6
    assert chat(client).status_code == 200
