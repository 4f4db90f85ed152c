"""What a body asks of the lens is read once, large ones beside the loop, and let go with it."""

from __future__ import annotations

import asyncio
import gc
import json
import threading
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from inspect_lens._vllm.compat import features
from inspect_lens._vllm.http import bodies
from inspect_lens._vllm.http.bodies import SERVED, LensBodies
from inspect_lens.spec import (
    EngineFacts,
    LensRequest,
    as_tensor_data,
    encode_tensor,
)
from tests.kit.facts import engine_facts

PATH = "/v1/completions"
FACTS = engine_facts(hidden=256, bank_rows=4096)


def vector(n: int, seed: int = 0) -> dict[str, Any]:
    rows = np.random.default_rng(seed).normal(size=(1, n, 256)).astype(np.float32)
    return {
        "op": "add", "vector": encode_tensor(as_tensor_data(rows)), "layers": [1],
        "positions": list(range(n)),
    }  # fmt: skip


def send(
    app: Callable[..., Any], body: Any, *, path: str = PATH, method: str = "POST", pieces: int = 1
) -> tuple[int, Any]:
    """Send a body to an ASGI application; status and body of the answer."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    size = max(1, -(-len(data) // pieces))
    parts = [data[i : i + size] for i in range(0, len(data), size)] or [b""]
    waiting = [
        {"type": "http.request", "body": part, "more_body": i + 1 < len(parts)}
        for i, part in enumerate(parts)
    ]
    sent: list[Any] = []

    async def receive() -> Any:
        return waiting.pop(0) if waiting else {"type": "http.disconnect"}

    async def keep(message: Any) -> None:
        sent.append(message)

    headers = [(b"content-type", b"application/json")]
    scope = {"type": "http", "method": method, "path": path, "headers": headers}
    asyncio.run(app(scope, receive, keep))
    return sent[0]["status"], json.loads(sent[1]["body"])


class Server:
    """Reads its body, and what the lens was asked, as vLLM's handlers do."""

    def __init__(self, facts: EngineFacts | None = FACTS) -> None:
        self.app = LensBodies(self, lambda: SimpleNamespace(facts=facts))
        self.asked: list[LensRequest | None] = []
        self.bodies: list[bytes] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body, again = await bodies.whole_body(receive)
        self.bodies.append(body)
        assert (await again())["type"] == "http.request"
        json.loads(body)
        served = SERVED.get()
        self.asked.append(None if served is None else served.request)
        head = {"type": "http.response.start", "status": 200, "headers": []}
        await send(head)
        await send({"type": "http.response.body", "body": b"{}"})


@pytest.mark.parametrize("pieces", [1, 7])
@pytest.mark.parametrize("n", [1, 500])
def test_a_body_is_decoded_once(monkeypatch: pytest.MonkeyPatch, n: int, pieces: int) -> None:
    threads: list[str] = []
    real = bodies.parse_extra_args

    def counted(*args: Any, **kwargs: Any) -> Any:
        threads.append(threading.current_thread().name)
        return real(*args, **kwargs)

    monkeypatch.setattr(bodies, "parse_extra_args", counted)
    server = Server()
    body = {"prompt": "x", "extra_args": {"inspect_lens": {"edits": [vector(n)]}}}
    assert send(server.app, body, pieces=pieces) == (200, {})
    assert json.loads(server.bodies[0]) == body
    assert server.asked[0] is not None
    assert server.asked[0].edits[0].vector.shape == (1, n, 256)
    assert len(threads) == 1
    assert threads[0].startswith("inspect-lens-read"), "compressed tensors are unpacked there"


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-16-be", "utf-32-le"])
def test_a_body_asks_the_same_in_every_encoding_that_vllm_reads(encoding: str) -> None:
    server = Server()
    body = {"prompt": "caf\u00e9", "extra_args": {"inspect_lens": {"capture": {"layers": [1]}}}}
    text = json.dumps(body, ensure_ascii=False)
    assert send(server.app, text.encode(encoding), pieces=3) == (200, {})
    assert json.loads(server.bodies[0]) == body
    assert server.asked[0] is not None


def test_half_of_a_surrogate_pair_hides_no_request() -> None:
    server = Server()
    body = (
        b'{"prompt": "\xed\xa0\x80", "extra_args": {"inspect_lens": {"capture": {"layers": [1]}}}}'
    )
    assert send(server.app, body)[0] == 200
    assert server.asked[0] is not None, "vLLM reads this body, so it is read here, too"


def test_plain_bodies_are_passed_on_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "read_body", lambda *a: pytest.fail("read"))
    server = Server()
    for body in ({"prompt": "x" * 200_000}, {"prompt": "caf\u00e9 <b>"}):
        assert send(server.app, body)[0] == 200
    assert server.asked == [None, None]


def test_what_is_wrong_is_answered_before_the_application_sees_it() -> None:
    server = Server()
    wrong: list[Any] = [
        {"inspect_lens": {"capture": {"layers": ["a"]}}},
        {"extra_args": {"output_residual_stream": 3}},
        {"extra_args": [1], "output_residual_stream": [1]},
        {"inspect_lens": {"edits": [vector(5000)]}},
        b'{"inspect_lens": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        rb'{"extra_args": {"\u006futput_residual_stream": 3}}',
    ]
    for body in wrong:
        status, answer = send(server.app, body)
        assert status == 400
        assert answer["error"]["code"] == 400
    assert not server.asked
    with pytest.raises(json.JSONDecodeError):  # is vLLM's to refuse
        send(server.app, b'{"inspect_lens": ')


def test_a_request_is_let_go_with_its_connection() -> None:
    server = Server()
    body = {"extra_args": {"inspect_lens": {"edits": [vector(3000)]}}}
    send(server.app, body)
    tensor = weakref.ref(server.asked.pop().edits[0].vector)  # type: ignore[union-attr]
    gc.collect()
    assert tensor() is None
    assert server.app._n_bytes == 0
    assert SERVED.get() is None


def test_vectors_under_way_have_a_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "_MOST_TABLES", 1)
    server = Server()
    asked = [{"extra_args": {"inspect_lens": {"edits": [vector(3000, seed)]}}} for seed in (1, 2)]
    statuses: list[int] = []
    gate = asyncio.Event()

    async def slow(scope: Any, receive: Any, send: Any) -> None:
        await gate.wait()
        await Server.__call__(server, scope, receive, send)

    server.app._app = slow

    async def one(body: Any) -> None:
        waiting = [{"type": "http.request", "body": json.dumps(body).encode()}]

        async def receive() -> Any:
            return waiting.pop(0)

        async def keep(message: Any) -> None:
            statuses.append(message.get("status", 0))

        scope = {"type": "http", "method": "POST", "path": PATH, "headers": []}
        await server.app(scope, receive, keep)

    async def both() -> None:
        first = asyncio.create_task(one(asked[0]))
        while not server.app._n_bytes:
            await asyncio.sleep(0.01)
        await one(asked[1])
        assert statuses == [429, 0]
        gate.set()
        await first
        await one(asked[1])

    asyncio.run(both())
    assert statuses == [429, 0, 200, 0, 200, 0]


def test_the_loop_goes_on_while_a_large_body_is_unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    real = bodies.read_body
    goes_on = threading.Event()

    def slow(*args: Any, **kwargs: Any) -> Any:
        assert goes_on.wait(60)
        return real(*args, **kwargs)

    monkeypatch.setattr(bodies, "read_body", slow)
    server = Server()
    data = json.dumps({"extra_args": {"inspect_lens": {"edits": [vector(10)]}}}).encode()

    async def run() -> None:
        async def receive() -> Any:
            return {"type": "http.request", "body": data}

        async def drop(message: Any) -> None:
            pass

        scope = {"type": "http", "method": "POST", "path": PATH, "headers": []}
        task = asyncio.create_task(server.app(scope, receive, drop))
        await asyncio.sleep(0.01)
        assert not task.done()
        goes_on.set()
        await task

    asyncio.run(run())


@pytest.mark.parametrize("word", ["capture", "lens", "_inspect_lens", "steering_vectors"])
def test_words_of_ours_are_refused_on_routes_that_generate(word: str) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    for path in ("/v1/messages", "/inference/v1/generate"):
        status, answer = send(LensBodies(app, lambda: None), {word: 1}, path=path)
        assert (status, word in answer["error"]["message"]) == (400, True)
        plain = {"prompt": f'"{word}"'}
        assert send(LensBodies(app, lambda: None), plain, path=path)[0] == 200
    assert send(LensBodies(app, lambda: None), {word: 1}, path="/v1/embeddings")[0] == 200


CAPTURE = {"capture": {"layers": [1]}}
ASKING: dict[str, Any] = {
    "top": {"inspect_lens": CAPTURE},
    "top, as vllm-lens": {"output_residual_stream": [1]},
    "vllm_xargs": {"vllm_xargs": {"inspect_lens": json.dumps(CAPTURE)}},
    "extra_args": {"extra_args": {"output_residual_stream": [1]}},
    "hidden": rb'{"\u0069nspect_lens": {"capture": [1]}}',
}


@pytest.mark.parametrize("place", ASKING)
@pytest.mark.parametrize("path", [PATH, "/v1/chat/completions", "/v1/messages", "/v1/embeddings"])
@pytest.mark.parametrize("off", ["lens", "http", "engine"])
def test_while_the_lens_is_off_no_body_that_asks_for_it_is_passed_on(
    monkeypatch: pytest.MonkeyPatch, off: Any, path: str, place: str
) -> None:
    monkeypatch.setattr(features._Off, "reasons", {})
    front = SimpleNamespace(facts=None, refusal="it sleeps" if off == "engine" else None)
    if off != "engine":
        features.turn_off(off, "it sleeps")
    server = Server()
    server.app = LensBodies(server, lambda: None if off == "lens" else front)
    status, answer = send(server.app, ASKING[place], path=path)
    assert (status, "it sleeps" in answer["error"]["message"]) == (400, True)
    if off == "lens":
        sampling = {"extra_args": {"inspect_lens": CAPTURE}}
        asked = {"token_ids": [1], "sampling_params": sampling}
        assert send(server.app, asked, path=bodies.TOKENS_PATH)[0] == 400
    assert not server.bodies
    assert send(server.app, {"prompt": "what is inspect_lens?"}, path=path)[0] == 200


def test_beside_vllm_lens_its_keys_are_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(features._Off, "reasons", {"lens": "vllm-lens is there, too"})
    server = Server()
    server.app = LensBodies(server, lambda: None, keys=("inspect_lens",))
    assert send(server.app, ASKING["top, as vllm-lens"])[0] == 200
    assert send(server.app, ASKING["top"])[0] == 400
