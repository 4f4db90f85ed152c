"""Routes of persistent hooks, over an engine that notes what its workers are told."""

from __future__ import annotations

import asyncio
import gc
import json
import threading
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from inspect_lens._vllm.http.payloads import PayloadStore
from inspect_lens._vllm.http.server import add_routes
from inspect_lens._vllm.registered.persistent_hooks import HookBook, seal_eager
from inspect_lens.errors import CaptureError
from inspect_lens.spec import LensRequest, encode_saved
from tests.kit.facts import engine_facts
from tests.kit.waiting import soon

PEER = json.loads(
    (Path(__file__).parents[3] / "data" / "vllm_lens_1.3.0" / "hooks.json").read_text()
)
FACTS = engine_facts(n_layers=6, hidden=4, max_step_tokens=32, allows_code=True)


class Engine:
    """Stands for an engine with two workers."""

    def __init__(self, book: HookBook | None, refusal: str | None = None) -> None:
        self.told: list[tuple[str, Any]] = []
        self.answer: str | None = None
        self.input_processor = SimpleNamespace(inspect_lens_book=book, inspect_lens_refusal=refusal)

    async def collective_rpc(self, method: str, args: tuple[str, Any]) -> list[str | None]:
        assert method == "inspect_lens_hooks"
        self.told.append(args)
        return [None, self.answer]


def serve(engine: Engine) -> TestClient:
    app = FastAPI()
    app.state.engine_client = engine
    add_routes(app, lambda: None, PayloadStore())
    return TestClient(app)


@pytest.fixture
def book() -> HookBook:
    return HookBook(FACTS, most_bytes=1000)


def test_a_body_of_vllm_lens_registers_and_requests_carry_the_names(book: HookBook) -> None:
    engine = Engine(book)
    client = serve(engine)
    body = PEER["register"] | {"prefetch_params": ["lm_head.weight"]}
    answer = client.post("/v1/hooks/register", json=body)
    assert answer.json() == {"status": "ok", "count": 2}
    assert engine.told[0] == ("prefetch", ["lm_head.weight"])
    action, items = engine.told[1]
    assert action == "register"
    sealed = seal_eager(LensRequest(), book)
    assert sealed is not None
    assert sealed["persistent"] == list(items)
    assert [item["layers"] for item in items.values()] == [[1, 3], [2]]
    assert (sealed["n_layers"], sealed["hash"] is None) == (3, False)
    assert client.post("/v1/hooks/clear").json() == {"status": "ok"}
    assert engine.told[-1] == ("unregister", list(items))
    assert seal_eager(LensRequest(), book) is None


def test_the_routes_are_in_the_schema(book: HookBook) -> None:
    paths = serve(Engine(book)).get("/openapi.json").json()["paths"]
    assert "/v1/hooks/register" in paths
    assert len([path for path in paths if path.startswith("/v1/hooks/")]) == 6


def test_prefetch(book: HookBook) -> None:
    engine = Engine(book)
    client = serve(engine)
    names = ["model.norm.weight"]
    answer = client.post("/v1/hooks/prefetch", json={"params": names})
    assert answer.json() == {"status": "ok", "params": names}
    client.post("/v1/hooks/clear_prefetched")
    assert engine.told == [("prefetch", names), ("clear_prefetched", None)]
    engine.answer = "AttributeError: no pipeline stage has a parameter"
    refused = client.post("/v1/hooks/prefetch", json={"params": names})
    assert refused.status_code == 400
    assert "no pipeline stage" in refused.json()["error"]["message"]


@pytest.mark.parametrize("action", ["register", "collect", "clear", "clear_results", "prefetch"])
def test_a_field_that_an_action_does_not_have_is_refused(book: HookBook, action: str) -> None:
    engine = Engine(book)
    asked = {"register": PEER["register"], "prefetch": {"params": ["a"]}}.get(action, {})
    answer = serve(engine).post(f"/v1/hooks/{action}", json={**asked, "layers": [1]})
    assert answer.status_code == 400
    assert "the body: 'layers' is no field of it; allowed are" in answer.json()["error"]["message"]
    assert not engine.told


@pytest.mark.parametrize(
    ("book_facts", "n_processes", "message"),
    [
        ({"is_speculative": True}, 1, "drafts"),
        ({"layers": (1,)}, 1, "not served"),
        ({}, 2, "--api-server-count 1"),
    ],
)
def test_what_an_engine_cannot_do_is_400(
    book_facts: dict[str, Any], n_processes: int, message: str
) -> None:
    from dataclasses import replace

    book = HookBook(replace(FACTS, **book_facts), most_bytes=10, n_processes=n_processes)
    answer = serve(Engine(book)).post("/v1/hooks/register", json=PEER["register"])
    assert answer.status_code == 400
    assert message in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("refusal", "message"), [(None, "INSPECT_LENS_ALLOW_CODE=1"), ("it is odd", "it is odd")]
)
def test_a_server_that_runs_no_code_says_so(refusal: str | None, message: str) -> None:
    client = serve(Engine(None, refusal))
    for action in ("register", "collect", "clear", "clear_results", "prefetch"):
        answer = client.post(f"/v1/hooks/{action}", json={})
        assert answer.status_code == 400
        assert message in answer.json()["error"]["message"]


def test_hooks_that_a_worker_cannot_read_stay_at_none(book: HookBook) -> None:
    engine = Engine(book)
    engine.answer = "LensError: cannot be read in the server"
    assert serve(engine).post("/v1/hooks/register", json=PEER["register"]).status_code == 400
    (_, items), gone = engine.told
    assert gone == ("unregister", list(items))
    assert not book.hooks


def test_what_hooks_saved_is_spelled_beside_the_event_loop(
    book: HookBook, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_slow, may_go = threading.Event(), threading.Event()
    book.keep("a", {"0": {"n": 1, "x": float("inf")}})
    app = serve(Engine(book)).app

    def slow(value: Any) -> Any:
        is_slow.set()
        assert may_go.wait(60), "the event loop waits for this"
        return encode_saved(value)

    monkeypatch.setattr("inspect_lens._vllm.http.server.encode_saved", slow)

    async def run() -> Any:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            collecting = asyncio.create_task(client.post("/v1/hooks/collect"))
            assert await soon(is_slow.is_set)
            assert (await client.get("/nothing")).status_code == 404
            may_go.set()
            return (await collecting).json()

    saved = {"n": 1, "x": {"__type__": "float", "value": "inf"}}
    assert asyncio.run(run()) == {"results": {"a": {"0": saved}}}


def test_hooks_that_save_nothing_take_no_memory_and_small_values_count() -> None:
    book = HookBook(FACTS, most_bytes=10_000)
    for i in range(2000):
        book.keep(f"edited-{i}", {"0": {}, "1": {}})
    assert not book.results()
    with suppress(CaptureError):
        for i in range(2000):
            book.keep(f"noted-{i}", {"0": {"layer": 1}})
    assert 10 < len(book.results()) < 100
    book.clear_results()
    book.keep("next", {"0": {"layer": 1}})
    assert book.results() == {"next": {"0": {"layer": 1}}}


def test_what_hooks_of_an_engine_saved_goes_with_the_engine() -> None:
    engine = Engine(HookBook(FACTS, most_bytes=1 << 20))
    number = engine.input_processor.inspect_lens_book.number
    assert number in HookBook.books
    del engine
    gc.collect()
    assert number not in HookBook.books
