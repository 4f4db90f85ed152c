"""Routes beside chat and completions: tokens in and out, and those without room for results."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fastapi import FastAPI, Request
from fastapi.testclient import TestClient
from starlette.routing import Mount, Route

from inspect_lens._base.partial import PARTIAL_KEY, Partial
from inspect_lens._vllm.frontend import wrappers
from inspect_lens._vllm.http import bodies
from inspect_lens._vllm.http.bodies import (
    SERVED,
    TOKENS_PATH,
    Answer,
    Body,
    LensBodies,
    Part,
    check_unread,
    payloads,
    read_body,
)
from inspect_lens._vllm.http.payloads import handle_entries
from inspect_lens._vllm.http.server import add_routes, put_last
from inspect_lens.errors import SpecError, UnsupportedError
from inspect_lens.spec import CaptureSpec, LensRequest, TensorData


@pytest.fixture(scope="module")
def client() -> TestClient:
    app = FastAPI()

    async def echo(request: Request) -> Any:
        return {"got": json.loads(await request.body())}

    echo.__annotations__["request"] = Request
    app.add_api_route("/{path:path}", echo, methods=["POST"])
    app.add_middleware(LensBodies, front_end=lambda: None)
    return TestClient(app)


@pytest.mark.parametrize(
    ("path", "body", "named"),
    [
        ("/v1/messages", {"output_residual_stream": [1]}, "output_residual_stream"),
        ("/v1/messages", {"vllm_xargs": {"inspect_lens": "{}"}}, "vllm_xargs.inspect_lens"),
        ("/v1/embeddings", {"extra_args": {"output_qk": True}}, "extra_args.output_qk"),
        ("/behind/a/proxy/classify", {"apply_hooks": []}, "/v1/chat/completions"),
        ("/inference/v1/generate", {"inspect_lens": {}}, "sampling_params.extra_args"),
    ],
)
def test_keys_that_a_route_would_drop_are_refused_by_name(
    client: TestClient, path: str, body: dict[str, Any], named: str
) -> None:
    answer = client.post(path, json=body)
    assert answer.status_code == 400
    assert named in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", {"input": "what does output_residual_stream do?"}),
        ("/v1/embeddings", {"input": "x" * 200_000, "nested": {"inspect_lens": 1}}),
        ("/v1/embeddings", ["output_qk"]),
        ("/v1/chat/completions", {"inspect_lens": {}}),
        ("/behind/a/proxy/v1/completions", {"inspect_lens": {}}),
        ("/tokenize", {"prompt": "hi", "inspect_lens": {}}),
        ("/v1/inspect_lens/registry", {"inspect_lens": {}}),
        ("/v1/hooks/register", {"apply_hooks": []}),
        (
            "/inference/v1/generate",
            {"sampling_params": {"extra_args": {"inspect_lens": {"capture": {}}}}},
        ),
    ],
)
def test_other_bodies_reach_their_routes_whole(client: TestClient, path: str, body: Any) -> None:
    answer = client.post(path, json=body)
    assert answer.status_code == 200
    assert answer.json() == {"got": body}


@pytest.mark.parametrize("takes_all", ["/{path:path}", ""])
def test_requests_for_vllms_routes_do_not_pass_over_ours(takes_all: str) -> None:
    """But what takes all paths, as the files of a page do, comes behind ours."""
    app = FastAPI()

    def vllms() -> str:
        return "vLLM's"

    add_routes(app, lambda: None, payloads)
    app.add_api_route("/v1/completions", vllms, methods=["POST"])
    if takes_all:
        app.add_api_route(takes_all, vllms, methods=["GET"])
    app.router.routes.append(Mount("/metrics", vllms))
    app.add_middleware(LensBodies, front_end=lambda: None, begin=put_last)
    ours = {"/v1/inspect_lens/registry", "/v1/activations/{handle}", "/v1/hooks/collect"}
    with TestClient(app) as client:
        paths = [route.path for route in app.routes if isinstance(route, Route)]
        assert paths.index("/v1/completions") < min(map(paths.index, ours))
        assert client.get("/v1/activations/none").status_code == 404
        assert ours <= set(client.get("/openapi.json").json()["paths"])


def unread(xargs: Any, **beside: Any) -> None:
    check_unread(SimpleNamespace(vllm_xargs=xargs, model_extra=beside))


def test_bodies_that_no_route_has_read_are_refused_where_they_ask() -> None:
    """As `vllm run-batch` has them, and forms with audio."""
    unread(None)
    unread({"top_k": 5})
    check_unread(SimpleNamespace(model_extra=None))  # releases without vllm_xargs
    with pytest.raises(UnsupportedError, match="output_residual_stream"):
        unread({"output_residual_stream": "[1]"})
    with pytest.raises(UnsupportedError, match="/v1/chat/completions"):
        unread(None, inspect_lens='{"capture": {}}')
    with pytest.raises(SpecError, match="did you mean"):
        unread(None, output_residual_streem="[1]")
    served = SERVED.set(Body())
    try:
        unread({"output_residual_stream": "[1]"})
    finally:
        SERVED.reset(served)


CAPTURE = {"inspect_lens": {"capture": {"layers": [0]}}}


def answer(
    kind: bytes, parts: list[bytes], results: list[dict[str, Any]], *, status: int = 200
) -> list[Any]:
    """What a client gets where an application sends some parts, and has results."""
    sent: list[Any] = []

    async def keep(message: Any) -> None:
        sent.append(message)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        body = SERVED.get()
        assert body is not None
        params = SimpleNamespace(extra_args={"output_qk": [1], "kv": 1}, n=len(results) or 1)
        first = body.begin(params)
        assert params.extra_args == {
            "kv": 1,
            "kv_transfer_params": {"a": 1},
            "inspect_lens": body.request,
        }
        await send({"type": "http.response.start", "status": status, "headers": [
            (b"content-type", kind), (b"content-length", b"%d" % len(b"".join(parts))),
        ]})  # fmt: skip
        choices = [
            SimpleNamespace(
                index=i,
                inspect_lens_json=result,
                inspect_lens_partial_json=[Partial({"p": [0.5]}).to_json()],
            )
            for i, result in enumerate(results)
        ]
        for i, part in enumerate(parts):
            if i == len(parts) - 1:
                body.take(SimpleNamespace(outputs=choices), first)
            more = i + 1 < len(parts)
            await send({"type": "http.response.body", "body": part, "more_body": more})

    asked = {
        "prompt": "x",
        "stream": True,
        **CAPTURE,
        "extra_args": {"kv_transfer_params": {"a": 1}},
    }

    async def receive() -> Any:
        return {"type": "http.request", "body": json.dumps(asked).encode()}

    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}
    asyncio.run(LensBodies(app, front_end=lambda: None)(scope, receive, keep))
    assert SERVED.get() is None
    return sent


@pytest.mark.parametrize("n", [1, 2])
def test_a_response_carries_results(n: int) -> None:
    results = [{"inspect_lens": {"choice": i}, "activations": {"a": i}} for i in range(n)]
    plain = {"id": "r", "choices": [{"index": i, "text": "é"} for i in range(n)]}
    data = json.dumps(plain).encode()
    start, message = answer(b"application/json", [data[:9], data[9:]], results)
    assert dict(start["headers"])[b"content-length"] == b"%d" % len(message["body"])
    body = json.loads(message["body"])
    assert (body["id"], body["inspect_lens"], body["activations"]) == ("r", {"choice": 0}, {"a": 0})
    for i, choice in enumerate(body["choices"]):
        assert choice["text"] == "é"
        assert ("activations" in choice) == (n > 1)
        assert n == 1 or choice["activations"] == {"a": i}


@pytest.mark.parametrize("kind", [b"application/json", b"text/event-stream"])
@pytest.mark.parametrize("n", [1, 2])
def test_rows_of_many_bytes_do_not_hold_up_the_loop_while_they_are_sent(
    n: int, kind: bytes
) -> None:
    results: list[dict[str, Any]] = [
        {
            "inspect_lens": {"choice": i},
            "activations": {"a": {"data": "AbC/" * (1 << 20), "shape": [i]}, "b": {"handle": "h"}},
        }
        for i in range(n)
    ]
    plain = {"id": "r", "choices": [{"index": i, "text": "é"} for i in range(n)]}
    is_stream = kind != b"application/json"
    parts = [b"data: 1\n\n", b"data: [DONE]\n\n"] if is_stream else [json.dumps(plain).encode()]
    start, *messages = answer(kind, parts, results)
    assert max(len(message["body"]) for message in messages) <= 1 << 20
    *before, last = [message.get("more_body", False) for message in messages]
    assert all(before)
    assert not last
    body = b"".join(message["body"] for message in messages)
    if is_stream:
        told = read(events_of(messages)[-2])
        choices = told.get("inspect_lens_choices", [])
    else:
        assert dict(start["headers"])[b"content-length"] == b"%d" % len(body)
        told = json.loads(body)
        assert told["id"] == "r"
        assert [choice["text"] for choice in told["choices"]] == ["é"] * n
        choices = told["choices"] if n > 1 else []
    assert {key: told[key] for key in results[0]} == results[0]
    assert [{key: one[key] for key in results[0]} for one in choices] == results * (n > 1)


@pytest.mark.parametrize("status", [200, 400])
def test_an_answer_without_results_is_vllms_own(status: int) -> None:
    data = b'{"error":  {"code": 400}}'
    results = [] if status == 200 else [{"inspect_lens": {}}]
    start, *parts = answer(b"application/json", [data], results, status=status)
    assert start["status"] == status
    assert b"".join(part["body"] for part in parts) == data


def events_of(messages: list[Any]) -> list[bytes]:
    """Of a stream, however they share messages."""
    text = b"".join(message.get("body", b"") for message in messages)
    return [event + b"\n\n" for event in text.split(b"\n\n")[:-1]]


def read(event: bytes) -> Any:
    return json.loads(event.removeprefix(b"data: "))


def test_a_stream_ends_with_results_and_has_scores_behind_their_tokens() -> None:
    parts = [b'data: {"choices": []}\n\n', b"data: 1\n\n", b"data: [DONE]\n\n"]
    results = [{"inspect_lens": {"n": 1}}, {"inspect_lens": {"n": 2}}]
    messages = answer(b"text/event-stream; charset=utf-8", parts, results)
    first, second, left, last, done = events_of(messages)
    assert [first, second, done] == parts
    assert not messages[-1]["more_body"]
    # Scores of tokens that no event was about are not lost.
    assert [one["index"] for one in read(left)[PARTIAL_KEY]] == [0, 1]
    assert (read(last)["object"], read(last)["inspect_lens"]) == ("text_completion", {"n": 1})
    assert [c["inspect_lens"]["n"] for c in read(last)["inspect_lens_choices"]] == [1, 2]
    *_, scores = events_of(answer(b"text/event-stream", parts[:2], [{}]))
    assert read(scores)[PARTIAL_KEY] == [{"index": 0, "probes": {"p": [0.5]}}]


def told_in(body: Body, parts: list[bytes]) -> list[Any]:
    """Scores of the events of a stream, and choices of those that vLLM sends."""
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def run() -> None:
        answer = Answer(send, body)
        head = [(b"content-type", b"text/event-stream")]
        await answer({"type": "http.response.start", "status": 200, "headers": head})
        for part in (*parts, b"data: [DONE]\n\n"):
            await answer({"type": "http.response.body", "body": part, "more_body": True})

    asyncio.run(run())
    *events, done = events_of(sent)
    assert done == b"data: [DONE]\n\n"
    return [
        [one["probes"]["p"][0] for one in event[PARTIAL_KEY]]
        if PARTIAL_KEY in event
        else event["choices"][0]["index"]
        for event in map(read, events)
    ]


def piece(score: float) -> list[bytes]:
    return Partial({"p": [score]}).to_json()


def scored(*scores: tuple[int, float], n_prompts: int) -> Body:
    """A body of whose choices scores have come."""
    body = Body(kind="text_completion")
    for _ in range(n_prompts):
        body.begin(SimpleNamespace(extra_args=None, n=2 // n_prompts))
    body.parts = [Part(i, [piece(score)]) for i, score in scores]
    return body


def test_scores_of_several_prompts_come_behind_their_own_tokens() -> None:
    """vLLM takes outputs of all prompts ahead, and sends their events one by one."""
    told = told_in(
        scored((0, 0.0), (1, 1.0), (1, 1.1), n_prompts=2),
        [
            b'data: {"choices": [{"index": 1, "text": "data: [DONE]"}]}\n\n',
            b'data: {"choices": [{"index": 0, "text": "a"}]}\n\n',
            b'data: {"choices": [{"index": 1, "text": "b"}]}\n\n',
        ],
    )
    assert told == [1, [1.0], 0, [0.0], 1, [1.1]]


def test_parts_of_several_prompts_keep_to_their_outputs_where_some_carry_nothing() -> None:
    """Outputs are taken ahead: the part of the third one is not sent with the first token."""
    body = scored(n_prompts=2)
    for score in (0.0, None, 0.2):
        choice = SimpleNamespace(index=0, inspect_lens_running=None)
        if score is not None:
            choice.inspect_lens_partial_json = [Partial({"p": [score]}).to_json()]
        body.take(SimpleNamespace(outputs=[choice]), 1)
    event = b'data: {"choices": [{"index": 1, "text": "a"}]}\n\n'
    assert told_in(body, [event] * 3) == [1, [0.0], 1, 1, [0.2]]


def test_pieces_of_a_large_part_have_events_of_their_own() -> None:
    body = scored((0, 0.0), (0, 0.2), n_prompts=1)
    body.parts[0].pieces.append(piece(0.1))
    event = b'data: {"choices": [{"index": 0, "text": "a"}]}\n\n'
    assert told_in(body, [event]) == [0, [0.0], [0.1], [0.2]]


def test_scores_of_a_chat_come_behind_the_tokens_of_their_choice_and_not_behind_its_role() -> None:
    told = told_in(
        scored((0, 0.0), (1, 1.0), (1, 1.1), n_prompts=1),
        [
            b'data: {"choices": [{"index": %d, "delta": %b, "finish_reason": null}]}\n\n' % said
            for said in (
                (0, b'{"role": "assistant", "content": ""}'),
                (1, b'{"role": "assistant", "content": ""}'),
                (1, b'{"content": "a"}'),
                (0, b'{"content": ""}'),
            )
        ],
    )
    assert told == [0, 1, 1, [1.0, 1.1], 0, [0.0]]


@pytest.mark.parametrize("stream", [b"true", b"false"])
@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages", "/v1/chat/completions"])
def test_only_streams_of_completions_have_events_of_ours(
    path: str, stream: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = b'{"model": "m@c", "messages": [], "stream": %b}' % stream
    body = read_body(path, text, None, configs={"m@c": "c"})
    assert body is not None
    has_events = path == "/v1/chat/completions" and stream == b"true"
    written: list[Partial] = []
    monkeypatch.setattr(wrappers, "part_as_json", lambda part, _: written.append(part) or [b"{}"])
    one = SimpleNamespace(index=0, inspect_lens_partial=Partial({"p": [1.0]}))
    wrappers._encode(SimpleNamespace(outputs=[one]), body)
    assert bool(written) is has_events, "nobody writes what nobody gets"
    choice = SimpleNamespace(index=0, inspect_lens_partial_json=[Partial({"p": [1.0]}).to_json()])
    body.take(SimpleNamespace(outputs=[choice]), 0)
    assert bool(body.parts) is has_events


@pytest.mark.parametrize("is_broken_off", [False, True])
def test_rows_of_a_stream_wait_to_be_fetched_unless_it_is_broken_off(is_broken_off: bool) -> None:
    rows = Partial(
        tensors={"residual_stream": TensorData(np.ones((1, 2, 8), np.float32), "float32")},
        positions={"residual_stream": range(2)},
        transport="binary",
    )
    sent: list[bytes] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        body = SERVED.get()
        assert body is not None
        first = body.begin(SimpleNamespace(extra_args=None, n=1))
        await send({"type": "http.response.start", "status": 200, "headers": [
            (b"content-type", b"text/event-stream")]})  # fmt: skip
        one = SimpleNamespace(index=0, inspect_lens_partial=rows)
        wrappers._encode(SimpleNamespace(outputs=[one]), body)
        body.take(SimpleNamespace(outputs=[one]), first)
        token = b'data: {"choices": [{"index": 0}]}\n\n'
        for data in (token, *([] if is_broken_off else [b"data: [DONE]\n\n"])):
            await send({"type": "http.response.body", "body": data, "more_body": True})
        assert payloads.n_bytes

    async def receive() -> Any:
        lens = CAPTURE["inspect_lens"] | {"stream_results": True}
        asked = {"prompt": "x", "stream": True, "inspect_lens": lens}
        return {"type": "http.request", "body": json.dumps(asked).encode()}

    async def keep(message: Any) -> None:
        sent.append(message.get("body", b""))

    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}
    asyncio.run(LensBodies(app, front_end=lambda: None)(scope, receive, keep))
    (handle,) = re.findall(rb'"handle": ?"([^"]+)"', b"".join(sent))
    assert (payloads.get(handle.decode()) is None) is is_broken_off
    assert not payloads.n_bytes


@pytest.mark.parametrize("ends", ["sent", "failed", "left", "left meanwhile"])
def test_rows_of_an_answer_wait_to_be_fetched_unless_it_is_not_sent(
    ends: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of several prompts one may fail when another has its rows; and its client may leave."""
    one = SimpleNamespace(
        index=0,
        inspect_lens=SimpleNamespace(model_dump=lambda mode: {}),
        inspect_lens_tensors={
            "residual_stream": TensorData(np.ones((1, 2, 8), np.float32), "float32")
        },
        inspect_lens_transport="binary",
    )
    late: list[Callable[[], None]] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        body = SERVED.get()
        assert body is not None
        first = body.begin(SimpleNamespace(extra_args=None, n=1))
        encode = partial(wrappers._encode, SimpleNamespace(outputs=[one]), body)
        if ends == "left":  # before a thread is at it
            late.append(encode)
            return
        if ends == "left meanwhile":

            def keep_and_leave(*args: Any) -> Any:
                entries = handle_entries(*args)
                body.forget()
                return entries

            monkeypatch.setattr(bodies, "handle_entries", keep_and_leave)
            encode()
            return
        encode()
        body.take(SimpleNamespace(outputs=[one]), first)
        assert payloads.n_bytes
        if ends == "failed":
            raise RuntimeError("the other prompt")
        await send({"type": "http.response.start", "status": 200, "headers": [
            (b"content-type", b"application/json")]})  # fmt: skip
        await send({"type": "http.response.body", "body": b'{"choices": [{}]}'})

    async def receive() -> Any:
        asked = json.dumps({"prompt": "x", **CAPTURE}).encode()
        return {"type": "http.request", "body": asked}

    async def drop(message: Any) -> None:
        pass

    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}
    with pytest.raises(RuntimeError) if ends == "failed" else nullcontext():
        asyncio.run(LensBodies(app, front_end=lambda: None)(scope, receive, drop))
    for encode in late:
        encode()
    entry = one.inspect_lens_json["activations"]["residual_stream"]
    assert (payloads.get(entry["handle"]) is not None) is (ends == "sent")
    assert not payloads.n_bytes


def test_a_response_that_cannot_have_its_results_is_an_error() -> None:
    start, message = answer(b"application/json", [b"[1]"], [{"inspect_lens": {}}])
    assert start["status"] == 500
    assert "a fault of inspect_lens" in json.loads(message["body"])["error"]["message"]


def test_beams_have_no_results() -> None:
    body = json.dumps({"prompt": "x", "use_beam_search": True, **CAPTURE}).encode()
    with pytest.raises(UnsupportedError, match=r"use_beam_search cannot be used with inspect_lens"):
        read_body("/v1/completions", body, None)
    plain = b'{"prompt": "\\u0041", "use_beam_search": true}'
    found = read_body("/v1/completions", plain, None)
    assert found is not None
    assert found.request is None


@pytest.mark.parametrize("keys", [[], ["first", "second"]], ids=["open", "keys"])
def test_invocations_ask_for_a_key_where_the_lens_is_asked(keys: list[str]) -> None:
    """vLLM guards `/v1` and `/inference` with `--api-key`, and not this route."""
    authenticate = pytest.importorskip("vllm.entrypoints.serve.middleware.authenticate")
    app = FastAPI()

    async def served(request: Request) -> Any:
        return {}

    served.__annotations__["request"] = Request
    app.add_api_route("/invocations", served, methods=["POST"])
    app.add_middleware(LensBodies, front_end=lambda: SimpleNamespace(facts=None))
    if keys:
        app.add_middleware(authenticate.AuthenticationMiddleware, tokens=keys)
    client = TestClient(app)
    lens = {"prompt": "a", "output_residual_stream": [1]}
    without = client.post("/invocations", json=lens)
    assert without.status_code == (401 if keys else 200)
    wrong = client.post("/invocations", json=lens, headers={"authorization": "Bearer other"})
    assert wrong.status_code == (401 if keys else 200)
    right = client.post("/invocations", json=lens, headers={"authorization": "Bearer second"})
    assert right.status_code == 200
    assert client.post("/invocations", json={"prompt": "a"}).status_code == 200


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"inspect_lenss": {}}, "the body: unknown key 'inspect_lenss'; did you mean 'inspect_le"),
        ({"output_residual": [1]}, "the body: unknown key 'output_residual'; did you mean"),
        ({"sampling_params": {"inspect_lens": {}}}, "pass over sampling_params.inspect_lens; put"),
        ({"sampling_params": {"aply_hooks": ""}}, "sampling_params: unknown key 'aply_hooks'; did"),
        ({"sampling_params": {"extra_arg": {"inspect_lens": {}}}}, "did you mean 'extra_args'"),
        ({"sampling_params": {"capture": {}}}, "sampling_params.capture: nobody reads it there"),
    ],
)
def test_what_is_nearly_a_key_of_ours_is_not_lost_on_the_route_of_token_ids(
    fields: dict[str, Any], message: str
) -> None:
    pytest.importorskip("vllm")
    came: list[Any] = []
    sent: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        came.append(scope)

    async def keep(message: Any) -> None:
        sent.append(message)

    def post(asked: dict[str, Any]) -> None:
        body = json.dumps({"token_ids": [1, 2], **asked}).encode()

        async def receive() -> Any:
            return {"type": "http.request", "body": body}

        scope = {"type": "http", "method": "POST", "path": TOKENS_PATH, "headers": []}
        asyncio.run(LensBodies(app, front_end=lambda: None)(scope, receive, keep))

    post({"sampling_params": {"max_tokens": 2, "extra_args": {"kv_transfer_params": {}}}})
    assert len(came) == 1
    post(fields)
    assert len(came) == 1
    assert sent[0]["status"] == 400
    assert message in json.loads(sent[1]["body"])["error"]["message"]


def test_what_vllm_reads_on_the_route_of_token_ids_is_not_taken_for_a_key_of_ours() -> None:
    """`output_kind` is nearly one of ours, and skipping the cache is a parameter of both."""
    pytest.importorskip("vllm")
    asked = {
        "token_ids": [1, 2],
        "sampling_params": {
            "skip_reading_prefix_cache": True,
            "output_kind": 1,
            "extra_args": {"output_residual_stream": [1]},
        },
    }
    body = read_body(TOKENS_PATH, json.dumps(asked).encode(), None)
    assert body is not None
    assert body.request == LensRequest(capture=CaptureSpec(layers=[1]))
