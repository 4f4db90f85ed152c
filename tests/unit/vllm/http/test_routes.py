"""Routes beside chat and completions: tokens in and out, and those without room for results."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")
pytest.importorskip("fastapi")

from fastapi import FastAPI, Request
from fastapi.testclient import TestClient

from inspect_lens._vllm.http.bodies import LensBodies
from inspect_lens._vllm.http.responses import _WRAPPERS
from inspect_lens.errors import SpecError, UnsupportedError


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


@pytest.mark.parametrize(
    "name", ["transcription_params", "transcription_beam", "translation_params", "translation_beam"]
)
def test_audio_routes_refuse_lens_requests(name: str) -> None:
    made = _WRAPPERS[name](lambda self: "vLLM's own")

    def asked(xargs: Any, **beside: Any) -> Any:
        return made(SimpleNamespace(vllm_xargs=xargs, model_extra=beside))

    assert asked(None) == asked({"top_k": 5}) == "vLLM's own"
    assert made(SimpleNamespace(model_extra=None)) == "vLLM's own"  # releases without vllm_xargs
    with pytest.raises(UnsupportedError, match="/v1/audio/trans"):
        asked({"output_residual_stream": "[1]"})
    with pytest.raises(UnsupportedError, match="/v1/audio/trans"):
        asked(None, inspect_lens='{"capture": {}}')
    with pytest.raises(SpecError, match="did you mean"):
        asked(None, output_residual_streem="[1]")


def outputs_of(*results: dict[str, Any]) -> AsyncIterator[Any]:
    async def outputs() -> AsyncIterator[Any]:
        choices = [
            SimpleNamespace(index=i, **({"inspect_lens_json": result} if result else {}))
            for i, result in enumerate(results)
        ]
        yield SimpleNamespace(outputs=choices)

    return outputs()


def tokens_response(n: int) -> Any:
    from vllm.entrypoints.scale_out.token_in_token_out import protocol

    return protocol.GenerateTokensResponse(
        request_id="r",
        choices=[protocol.GenerateTokensChoice(index=i, token_ids=[1, 2]) for i in range(n)],
    )


@pytest.mark.parametrize("n", [1, 2])
def test_a_response_of_tokens_carries_results(n: int) -> None:
    from vllm.entrypoints.scale_out.token_in_token_out.protocol import GenerateTokensResponse

    async def vllms(self: Any, request: Any, generator: Any) -> Any:
        assert [output async for output in generator]
        return tokens_response(n)

    full = _WRAPPERS["tokens_full"](vllms)
    found = [{"inspect_lens": {"choice": i}, "activations": {"a": i}} for i in range(n)]
    answer = asyncio.run(full(None, None, outputs_of(*found)))
    assert isinstance(answer, GenerateTokensResponse), "the route looks at its type"
    body = json.loads(json.dumps(answer.model_dump()))
    plain = tokens_response(n).model_dump()
    assert body["inspect_lens"] == {"choice": 0}
    assert {k: v for k, v in body.items() if k in plain and k not in ("created", "choices")} == {
        k: v for k, v in plain.items() if k not in ("created", "choices")
    }
    for i, choice in enumerate(body["choices"]):
        assert choice["token_ids"] == [1, 2]
        assert ("activations" in choice) == (n > 1)
        assert n == 1 or choice["activations"] == {"a": i}
    untouched = asyncio.run(full(None, None, outputs_of(*[{}] * n)))
    assert type(untouched) is GenerateTokensResponse


def test_a_stream_of_tokens_ends_with_results() -> None:
    async def vllms(self: Any, request: Any, generator: Any) -> AsyncIterator[str]:
        async for _ in generator:
            yield 'data: {"choices": []}\n\n'
        yield "data: [DONE]\n\n"

    async def run() -> list[str]:
        stream = _WRAPPERS["tokens_stream"](vllms)
        results = outputs_of({"inspect_lens": {"n": 1}}, {"inspect_lens": {"n": 2}})
        return [chunk async for chunk in stream(None, None, results)]

    *_, last, done = asyncio.run(run())
    assert done == "data: [DONE]\n\n"
    event = json.loads(last.removeprefix("data: "))
    assert event["inspect_lens"] == {"n": 1}
    assert [c["inspect_lens"]["n"] for c in event["inspect_lens_choices"]] == [1, 2]


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
