from __future__ import annotations

import contextlib
import json
import secrets
import socket
import tempfile
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from inspect_lens._base.partial import Partial
from inspect_lens._base.same_host import serve_here
from inspect_lens.client import (
    LensClient,
    VLLMLensClient,
    events_of,
    json_of,
    lines_of,
    request_of,
)
from inspect_lens.errors import CaptureError, LensError, SpecError
from inspect_lens.spec import (
    Ablate,
    CaptureReceipt,
    CaptureSpec,
    Hook,
    QKSpec,
    Receipt,
    SteeringVector,
    TensorData,
    encode_tensor,
    parse_extra_args,
)
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


def test_a_server_that_is_not_there_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
    for call in (
        lambda client: client.generate(PROMPT),
        lambda client: client.clear_hooks(),
    ):
        with (
            LensClient(f"{url}/v1") as client,
            pytest.raises(LensError, match=f"no server answers at {url}.*start one there"),
        ):
            call(client)


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
    assert json.loads(server.requests[-1]["vllm_xargs"]["inspect_lens"])["edits"]
    client.generate(PROMPT, steering_vectors=[vector.model_dump(mode="json")])
    (sent,) = json.loads(server.requests[-1]["vllm_xargs"]["apply_steering_vectors"])
    assert sent["scale"] == 2.0


PROBES: dict[str, Any] = {"probes": [{"name": "lies", "alarm": "stop"}]}


def test_steering_and_probes_that_a_server_passes_over_are_an_error(
    server: FakeLensServer, plain: FakeLensServer, peer: FakeLensServer
) -> None:
    vector = SteeringVector(activations=np.ones((1, 8)), layer_indices=[1])
    prompt_only = SteeringVector(activations=np.ones((1, 8)), layer_indices=[1], phase="prefill")
    named = {"vllm_xargs": {"inspect_lens": json.dumps({"edits_named": ["v"]})}}
    edits = {"vllm_xargs": {"inspect_lens": json.dumps({"edits_named": ["e"]})}}
    both, one = (plain, peer), (plain,)  # what vllm-lens serves, too, is in order there
    asked: list[tuple[tuple[FakeLensServer, ...], dict[str, Any], str]] = [
        (one, {"steering_vectors": [vector]}, "steering vectors among them.: the server answered"),
        (both, {"steering_vectors": [prompt_only]}, "steering vectors among them.: the server"),
        (both, named, r"edits_named \['v'\]: the server answered without steering"),
        (both, edits, r"edits_named \['e'\]: the server answered without steering"),
        (both, {"extra_args": {"inspect_lens": PROBES}}, r"probes \['lies'\]: the server"),
        (both, {"inspect_lens": PROBES}, r"probes \['lies'\]: the server answered without"),
        (one, {"vllm_xargs": {"output_residual_stream": "[1]"}}, "activations: asked for"),
    ]
    server.probe_scores["lies"] = 2.0
    for servers, arguments, message in asked:
        for ignores in servers:
            client = LensClient(ignores.url)
            with pytest.raises(CaptureError, match=message):
                client.generate(PROMPT, **arguments)
            with pytest.raises(CaptureError, match=message):
                client.chat([{"role": "user", "content": PROMPT}], **arguments)
        assert LensClient(server.url).generate(PROMPT, **arguments).receipt is not None
    # vllm-lens steers and gives no receipt; it is known by its routes, which are asked for once.
    client, n_asked = LensClient(peer.url), peer.read.count("/openapi.json")
    for _ in range(2):
        steered = client.generate(PROMPT, steering_vectors=[vector])
        assert steered.text.startswith("steered")
        assert steered.receipt is None
    assert peer.read.count("/openapi.json") == 1 + n_asked


def test_a_server_that_ran_no_hooks_is_an_error(plain: FakeLensServer) -> None:
    with pytest.raises(CaptureError, match="hooks were sent"):
        LensClient(plain.url).generate(PROMPT, hooks=[Hook(fn=print, layer_indices=[1])])


def test_a_server_of_this_host_gives_tensors_beside_its_answer(
    server: FakeLensServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    far = LensClient(server.url).generate(PROMPT, capture_layers=[1])
    server.results = name = secrets.token_hex(8)  # names of servers never come again
    unserved = LensClient(server.url).generate(PROMPT, capture_layers=[1])
    serve_here(name, lambda handle: server.handles.pop(handle, None))
    client = LensClient(server.url)
    for asked in ({"capture_layers": [1]}, {"inspect_lens": {"capture": {"layers": [1]}}}):
        near = client.generate(PROMPT, **asked)
        np.testing.assert_array_equal(far.activations.numpy(), near.activations.numpy())
        assert "handle" in near.raw["activations"]["residual_stream"]
    assert not server.handles
    assert not any(path.startswith("/v1/activations") for path in server.read)
    for output in (far, unserved):
        assert "data" in output.raw["activations"]["residual_stream"]


@pytest.mark.parametrize("asked", [{"capture_layers": [1]}, {"capture": {"layers": [1]}}])
def test_base64_leaves_no_tensors_in_a_server_however_the_rows_are_asked_for(
    server: FakeLensServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: dict[str, Any]
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    server.results = name = secrets.token_hex(8)
    serve_here(name, lambda handle: server.handles.pop(handle, None))
    client = LensClient(server.url)
    inline = client.generate(PROMPT, **asked, activations_transport="base64")
    assert "data" in inline.raw["activations"]["residual_stream"]


def test_transport_of_a_lens_has_the_names_of_the_argument() -> None:
    asked = request_of(None, None, "base64", None, None, None, [1])
    assert asked is not None
    assert asked.lens is not None
    assert asked.lens.transport == "inline"
    with pytest.raises(SpecError, match="activations_transport='bsae64'; allowed are base64"):
        request_of(None, None, "bsae64", None, None, None, [1])


@pytest.mark.parametrize(
    ("given", "layers", "heads"),
    [
        (0, (0,), None),
        (np.asarray([2, 1]), (1, 2), None),
        ([(3, 1), (0, 2)], "all", ((0, 2), (3, 1))),
        (np.asarray([[3, 1], [0, 2]]), "all", ((0, 2), (3, 1))),
        (list(np.asarray([[3, 1]])), "all", ((3, 1),)),
    ],
)
def test_layers_or_heads_of_queries_and_keys_come_in_any_list(
    given: Any, layers: Any, heads: Any
) -> None:
    asked = request_of(None, None, None, None, None, given, None)
    assert asked is not None
    assert asked.qk == QKSpec(layers=layers, heads=heads)


def test_of_several_choices_no_tensors_stay_in_a_server_of_this_host(
    server: FakeLensServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    server.results = name = secrets.token_hex(8)
    serve_here(name, lambda handle: server.handles.pop(handle, None))
    client = LensClient(server.url)
    client.generate(PROMPT, capture_layers=[1], n=2)
    client.chat([{"role": "user", "content": PROMPT}], capture_layers=[1], n=2)
    for body in server.requests[-2:]:
        assert body["vllm_xargs"] == {"output_residual_stream": "[1]"}
    assert not server.handles
    near = client.generate(PROMPT, capture_layers=[1], n=1)
    assert "handle" in near.raw["activations"]["residual_stream"]


def test_of_several_prompts_no_tensors_stay_in_a_server(
    server: FakeLensServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of their results only the first one's are given to the caller."""
    client = LensClient(server.url)
    assert client.model == server.model
    monkeypatch.setattr(client, "_gives_here", True)
    sent: list[Any] = []

    def answer(http: Any, method: str, path: str, body: Any = None, **_: Any) -> Any:
        sent.append(body)
        raise CaptureError("enough")

    monkeypatch.setattr("inspect_lens.client.answer_of", answer)
    for prompt in (["one", "two"], [[1, 2], [3]], ["one"], [1, 2, 3], "one"):
        with pytest.raises(CaptureError, match="enough"):
            client.generate(prompt, capture_layers=[1])  # type: ignore[arg-type]
    asked = [body["vllm_xargs"].get("activations_transport") for body in sent]
    assert asked == [None, None, "binary", "binary", "binary"]


def test_a_client_whose_results_are_elsewhere_has_them_in_its_answers_from_then_on(
    server: FakeLensServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    server.results = name = secrets.token_hex(8)
    serve_here(name, lambda handle: None)
    client = LensClient(server.url)
    with pytest.raises(
        CaptureError, match=r"no longer has its result; .* Later calls of this client have tensors"
    ):
        client.generate(PROMPT, capture_layers=[1])
    later = client.generate(PROMPT, capture_layers=[1])
    assert "data" in later.raw["activations"]["residual_stream"]


def test_queries_and_keys_come_with_what_explains_them(server: FakeLensServer) -> None:
    for transport in (None, "binary"):
        out = LensClient(server.url).generate(
            PROMPT, capture_qk=[1, 2], activations_transport=transport
        )
        found = out.activations
        assert found is not None
        assert set(found) == {"attn_q", "attn_k", "qk_layers", "qk_meta"}
        assert found["attn_q"].shape[2:] == (2, 4)
        assert found["attn_k"].shape[2:] == (1, 4)
        assert found["qk_layers"] == [1, 2]
        assert found["qk_meta"][0] == {"scale": 0.5}


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
    with FakeLensServer(expire_handles=True) as expired, pytest.raises(CaptureError, match="410;"):
        LensClient(expired.url).generate(PROMPT, capture_layers=[1], activations_transport="binary")
    with FakeLensServer(api_key="secret") as closed:
        with pytest.raises(LensError, match="refuses the key"):
            LensClient(closed.url).generate(PROMPT)
        assert LensClient(closed.url, api_key="secret").generate(PROMPT).text


def test_a_users_key_that_may_not_register_is_told_apart_from_a_wrong_one() -> None:
    asked = httpx.Request("POST", "http://server/v1/inspect_lens/registry")
    ours = {"error": {"message": "this server asks for a key to change what is registered"}}
    with pytest.raises(SpecError, match="a key to change what is registered"):
        json_of(httpx.Response(401, json=ours, request=asked))
    with pytest.raises(SpecError, match="pass one of that server"):
        json_of(httpx.Response(401, json={"error": "Unauthorized"}, request=asked))


def streaming_client(events: list[dict[str, Any]], asked: list[Any]) -> LensClient:
    """A client of a server that answers with these events."""
    lines = [f"data: {json.dumps(event)}\n\n" for event in events]

    def answer(request: httpx.Request) -> httpx.Response:
        if request.method == "GET":
            return httpx.Response(404)  # from another host
        asked.append(json.loads(request.content))
        head = {"content-type": "text/event-stream"}
        return httpx.Response(200, headers=head, text="".join([*lines, "data: [DONE]\n\n"]))

    made = LensClient("http://server", model="m")
    made._http = httpx.Client(transport=httpx.MockTransport(answer), base_url="http://server")
    return made


def streamed_events(n_said: int) -> list[dict[str, Any]]:
    """A stream of two tokens, and a receipt that tells of rows of so many."""
    rows = np.arange(12, dtype=np.float32).reshape(1, 3, 4)
    found: list[dict[str, Any]] = []
    for text, first, n in ((" a", 0, 2), (" b", 2, 1)):
        tensor = TensorData(rows[:, first : first + n], "float32")
        part = Partial({"p": [0.5]}, {"residual_stream": tensor}, {"residual_stream": range(n)})
        found += [
            {"choices": [{"index": 0, "text": text, "token_ids": [len(found)]}]},
            {
                "choices": [],
                "inspect_lens_partial": [{"index": 0, **json.loads(b"".join(part.to_json()))}],
            },
        ]
    capture = CaptureReceipt(layers=(2,), n_positions=n_said, dtype="float32", rows=n_said)
    receipt = Receipt(
        n_prompt=2, n_completion=2, capture=capture, cache_salted=False, paths=("eager",),
        engine="inspect_lens", version="0", vllm_version="0",
    )  # fmt: skip
    return [*found, {"choices": [], "inspect_lens": receipt.model_dump(mode="json")}]


def test_a_stream_is_read_part_by_part_and_is_the_whole_answer_at_its_end() -> None:
    asked: list[Any] = []
    with streaming_client(streamed_events(3), asked) as client:
        stream = client.stream(PROMPT, capture_layers=[2])
        with pytest.raises(LensError, match="not been read to its end"):
            _ = stream.output
        parts = list(stream)
    assert [(part.text, part.activations is not None) for part in parts] == [
        (" a", False), ("", True), (" b", False), ("", True),
    ]  # fmt: skip
    assert [list(part.scores) for part in parts] == [[], ["p"], [], ["p"]]
    assert stream.output.text == " a b"
    assert stream.output.activations is not None
    expected = np.arange(12, dtype=np.float32).reshape(1, 3, 4)
    np.testing.assert_array_equal(stream.output.activations.numpy(), expected)
    (body,) = asked
    assert body["stream"] is True
    assert json.loads(body["vllm_xargs"]["inspect_lens"])["stream_results"] is True


@pytest.mark.parametrize(
    ("arguments", "here", "transport"),
    [
        ({}, True, "binary"),
        ({"n": 2}, True, "binary"),
        ({}, False, "auto"),
        ({"capture": {"layers": [2], "transport": "inline"}}, True, "inline"),
        ({"stream_results": False}, True, "binary"),
        # Of two choices the second one's would stay at the server.
        ({"n": 2, "stream_results": False}, True, "auto"),
    ],
)
def test_a_stream_of_this_host_fetches_its_rows(
    arguments: dict[str, Any], here: bool, transport: str
) -> None:
    asked: list[Any] = []
    given = {"capture": [2]} | arguments
    with streaming_client([], asked) as client, contextlib.suppress(CaptureError):
        client._gives_here = here
        list(client.stream(PROMPT, **given))
    request = parse_extra_args(asked[0]["vllm_xargs"])
    assert request is not None
    assert request.capture is not None
    assert request.capture.transport == transport


def test_a_stream_may_leave_its_rows_to_the_end() -> None:
    asked: list[Any] = []
    *_, last = streamed_events(3)
    tensor = encode_tensor(TensorData(np.ones((1, 3, 4), dtype=np.float32), "float32"))
    events = [last | {"activations": {"residual_stream": tensor}}]
    with streaming_client(events, asked) as client:
        turns = [{"role": "user", "content": "tell me"}]
        stream = client.stream(messages=turns, capture_layers=[2], stream_results=False)
        assert not list(stream)
    assert stream.output.activations is not None
    assert stream.output.activations.numpy().shape == (1, 3, 4)
    assert asked[0]["vllm_xargs"] == {"output_residual_stream": "[2]"}


@pytest.mark.parametrize(
    ("arguments", "streams"),
    [
        ({}, False),
        ({"steering_vectors": [SteeringVector(activations=np.ones((1, 8)), layer_indices=[1])]},
         False),
        ({"sink": "x"}, False),
        ({"hooks": [Hook(fn=print, layer_indices=[1])]}, False),
        ({"inspect_lens": {"probes": ["p"]}}, False),
        ({"capture": {"layers": [1], "reduce": "mean"}}, False),
        ({"capture": {"layers": [1], "transport": "binary"}}, True),
        ({"lens": [1]}, True),
        ({"inspect_lens": {"edits_named": ["e"]}}, True),
        ({"inspect_lens": {"configs": ["c"]}}, True),
    ],
)  # fmt: skip
def test_rows_are_asked_for_with_their_tokens_where_they_can_come_so(
    arguments: dict[str, Any], streams: bool
) -> None:
    asked: list[Any] = []
    with streaming_client([], asked) as client:
        with contextlib.suppress(CaptureError):  # nothing came
            list(client.stream(PROMPT, **arguments))
        sent = json.loads(asked[0].get("vllm_xargs", {}).get("inspect_lens", "{}"))
        assert sent.get("stream_results", False) is streams
        if not streams:
            with pytest.raises(SpecError, match="stream_results"):
                client.stream(PROMPT, stream_results=True, **arguments)


def test_a_stream_that_lacks_a_site_is_no_answer() -> None:
    *events, last = streamed_events(3)
    last["inspect_lens"]["capture"]["site"] = ["attn_out", "resid_post"]
    with streaming_client([*events, last], []) as client:
        capture = {"layers": [2], "site": ["attn_out", "resid_post"]}
        with pytest.raises(CaptureError, match=r"rows of 0, 3 tokens came, .* tells of 3"):
            list(client.stream(PROMPT, capture=capture))


@pytest.mark.parametrize("n_said", [2, 4])
def test_a_stream_that_lacks_rows_is_no_answer(n_said: int) -> None:
    with streaming_client(streamed_events(n_said), []) as client:
        stream = client.stream(PROMPT, capture_layers=[2])
        with pytest.raises(CaptureError, match=f"rows of 3 tokens came, .* tells of {n_said}"):
            list(stream)
        events = streamed_events(3)[:-1]
    with streaming_client(events, []) as client, pytest.raises(CaptureError):
        list(client.stream(PROMPT, capture_layers=[2]))


@pytest.mark.parametrize(
    ("arguments", "field"),
    [({"capture_layers": [2]}, "capture"), ({"capture_qk": [2]}, "qk"), ({"lens": [2]}, "lens")],
)
def test_a_stream_of_a_server_without_the_plugin_is_no_answer(
    arguments: dict[str, Any], field: str
) -> None:
    plain = [{"choices": [{"index": 0, "text": " a", "token_ids": [1]}]}]
    with streaming_client(plain, []) as client, pytest.raises(CaptureError, match=rf"^{field}\b"):
        list(client.stream(PROMPT, **arguments))


@pytest.mark.parametrize(
    "part",
    [
        {"gates": [{"layer": "x"}]},
        {"activations": {"residual_stream": {"data": "?"}}},
        {"activations": ["residual_stream"]},
    ],
)
def test_a_part_that_cannot_be_read_is_an_error_of_ours(part: dict[str, Any]) -> None:
    events = [{"choices": [], "inspect_lens_partial": [{"index": 0, **part}]}]
    with streaming_client(events, []) as client, pytest.raises(CaptureError):
        list(client.stream(PROMPT, capture_layers=[2]))


def test_a_stream_is_of_a_prompt_or_a_chat() -> None:
    with LensClient("http://server", model="m") as client:
        for given in ({}, {"prompt": "x", "messages": []}):
            with pytest.raises(SpecError, match="prompt and messages: give one"):
                client.stream(**given)


def test_one_may_stand_without_its_list() -> None:
    """In every field that has several; a generator is a list, and a text is no list of letters."""
    key = "0" * 64
    hook, edit = Hook(fn=print, layer_indices=[1]), Ablate(direction=np.ones(8), layers=[1])
    fields: dict[str, Any] = {
        "hooks": hook, "edits": edit, "edits_named": "e", "probes": "p", "configs": "c",
    }  # fmt: skip
    for name, one in fields.items():
        for given in (one, [one], iter([one])):
            request = request_of(*[None] * 7, options={name: given})
            assert len(getattr(request, name)) == 1, name
        assert request_of(*[None] * 7, options={name: []}) is None
    assert request_of(3, *[None] * 6).capture.layers == (3,)
    assert request_of(*[None] * 7, open_gates=key).open_gates == (key,)
    with pytest.raises(SpecError, match="open_gates"):
        request_of(*[None] * 7, open_gates="one")


@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\x85", "\u4e66"])
@pytest.mark.parametrize("size", [1, 7, 4096])
def test_a_line_of_a_stream_ends_at_a_line_feed_and_nowhere_else(separator: str, size: int) -> None:
    # pydantic, which writes the server's events, leaves these characters as they are.
    event = json.dumps({"text": f"a{separator}b"}, ensure_ascii=False)
    body = f"data: {event}\r\n\r\ndata: {event}\n\ndata: [DONE]".encode()
    parts = [body[i : i + size] for i in range(0, len(body), size)]

    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, content=iter(parts))

    with httpx.Client(base_url="http://x", transport=httpx.MockTransport(answer)) as http:
        found = list(events_of(lines_of(http, "/v1/completions", {})))
    assert found == [{"text": f"a{separator}b"}] * 2
