"""The store of the binary transport: bounded in bytes and in time, and empty in the end."""

from __future__ import annotations

import contextvars
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from inspect_lens._vllm.http import payloads
from inspect_lens._vllm.http.bodies import LensBodies
from inspect_lens._vllm.http.payloads import PayloadStore
from inspect_lens._vllm.telemetry import CALLER, Caller
from inspect_lens.errors import CapacityError, UnsupportedError
from tests.kit.waiting import until


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """That of the stores: `now` is what it shows."""
    made = SimpleNamespace(now=0.0)
    monkeypatch.setattr(payloads, "time", SimpleNamespace(monotonic=lambda: made.now))
    return made


def test_a_payload_is_there_until_it_is_fetched_or_expires(clock: SimpleNamespace) -> None:
    store = PayloadStore(ttl_s=60)
    handle, other = store.put(b"abc"), store.put(b"def")
    assert (store.get(handle), store.get(handle)) == (b"abc", None)
    clock.now = 61
    assert store.get(other) is None
    assert store.n_bytes == 0


def test_of_many_who_fetch_at_once_one_gets_it() -> None:
    store = PayloadStore()
    handles = [store.put(b"abc") for _ in range(200)]
    with ThreadPoolExecutor(8) as pool:
        got = list(pool.map(store.get, [handle for handle in handles for _ in range(8)]))
    assert sum(data is not None for data in got) == len(handles)


def put(store: PayloadStore, client: str, data: bytes) -> str:
    """Of a client's request."""
    context = contextvars.copy_context()
    context.run(CALLER.set, Caller({"client": (client, 1)}))
    return context.run(store.put, data)


def test_a_client_that_fetches_nothing_costs_nobody_a_result() -> None:
    """420 captures that wait, as one client may leave behind."""
    store = PayloadStore(max_bytes=400, each_bytes=0)
    innocent = put(store, "innocent", b"mine")
    for _ in range(20):
        put(store, "greedy", b"x" * 10)
    for _ in range(400):
        with pytest.raises(CapacityError, match="200 bytes of this client's results wait"):
            put(store, "greedy", b"x" * 10)
    later = put(store, "innocent", b"y" * 100)
    assert store.get(innocent) == b"mine"
    assert store.get(later) == b"y" * 100


def test_a_full_store_takes_no_more_until_something_is_fetched() -> None:
    store = PayloadStore(max_bytes=40, each_bytes=0)
    first = [put(store, client, b"x" * 20) for client in "ab"]
    with pytest.raises(CapacityError, match="of 40 in the binary store"):
        put(store, "c", b"y")
    assert store.get(first[0]) is not None
    assert store.get(put(store, "c", b"y")) == b"y"
    assert store.get(first[1]) is not None


def test_room_comes_back_when_results_expire_or_are_discarded(clock: SimpleNamespace) -> None:
    store = PayloadStore(max_bytes=20, each_bytes=0, ttl_s=60)
    put(store, "a", b"x" * 10)
    with pytest.raises(CapacityError):
        put(store, "a", b"x")
    clock.now = 61
    handle = put(store, "a", b"x" * 10)
    store.discard([handle, "unknown"])
    assert store.get(handle) is None
    assert store.n_bytes == 0
    put(store, "a", b"x" * 10)


def test_what_was_fetched_keeps_nobody_out() -> None:
    store = PayloadStore(max_bytes=20, each_bytes=0)
    store.get(put(store, "a", b"x" * 10))
    put(store, "b", b"x" * 10)
    store.admit(10)
    put(store, "a", b"x" * 10)
    with pytest.raises(CapacityError, match="20 in the binary store"):
        store.admit(1)
    store.admit(0)


def test_more_than_a_share_of_the_store_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INSPECT_LENS_STORE_BYTES", "20")
    with pytest.raises(UnsupportedError, match="raise INSPECT_LENS_STORE_BYTES"):
        PayloadStore().put(b"x" * 11)


def test_nothing_is_held_though_nobody_asks_again() -> None:
    store = PayloadStore(ttl_s=0.1)
    store.get(store.put(b"fetched"))
    store.put(b"forgotten")
    assert until(lambda: store.n_bytes == 0)


def test_clients_are_told_apart_by_their_address_and_key() -> None:
    fastapi = pytest.importorskip("fastapi")
    testclient = pytest.importorskip("fastapi.testclient")
    routes = pytest.importorskip("inspect_lens._vllm.http.server")
    app, store = fastapi.FastAPI(), PayloadStore(max_bytes=40, each_bytes=0)
    routes.add_routes(app, lambda: None, store)
    app.add_middleware(LensBodies, front_end=lambda: None)

    @app.post("/capture")
    async def capture() -> str:
        try:
            return store.put(b"x" * 20)
        except CapacityError:
            return "busy"

    def ask(client: Any, key: str = "", scheme: str = "Bearer") -> str:
        headers = {"Authorization": f"{scheme} {key}"} if key else {}
        return str(client.post("/capture", headers=headers).json())

    with testclient.TestClient(app, client=("10.0.0.1", 1)) as client:
        first = ask(client, "made-up")
        assert ask(client, "another") == "busy", "a server without keys has made none of these"
        assert client.get(f"/v1/activations/{first}").content == b"x" * 20
    authenticate = pytest.importorskip("vllm.entrypoints.serve.middleware.authenticate")
    app.middleware_stack = None
    app.add_middleware(authenticate.AuthenticationMiddleware, tokens=["a", "b"])
    with testclient.TestClient(app, client=("10.0.0.1", 1)) as client:
        first = ask(client, "a")
        assert ask(client, "a") == ask(client, "a", "bEARER") == "busy"
        assert ask(client, "b") not in ("busy", first)
        key = {"Authorization": "Bearer b"}
        assert client.get(f"/v1/activations/{first}", headers=key).content == b"x" * 20
        assert ask(client, "a") != "busy"
        assert client.get("/v1/activations/unknown", headers=key).status_code == 404
    store = PayloadStore(max_bytes=40, each_bytes=0)
    with testclient.TestClient(app, client=("10.0.0.1", 1)) as client:
        assert ask(client) != "busy"
        assert ask(client) == "busy"
    with testclient.TestClient(app, client=("10.0.0.2", 1)) as client:
        assert ask(client) != "busy"


def test_a_mounted_application_knows_its_clients_too() -> None:
    fastapi = pytest.importorskip("fastapi")
    testclient = pytest.importorskip("fastapi.testclient")
    authenticate = pytest.importorskip("vllm.entrypoints.serve.middleware.authenticate")
    app, mounted = fastapi.FastAPI(), fastapi.FastAPI()
    app.mount("/mounted", mounted)

    @mounted.get("/who")
    async def who() -> str:
        return CALLER.get().client

    app.add_middleware(LensBodies, front_end=lambda: None)
    app.add_middleware(authenticate.AuthenticationMiddleware, tokens=["a"])
    with testclient.TestClient(app, client=("10.0.0.1", 1)) as client:
        answer = client.get("/mounted/who", headers={"Authorization": "Bearer a"})
        assert answer.json() == "10.0.0.1 a"


def test_what_a_small_payload_takes_beside_its_bytes_counts_too() -> None:
    """A stream has a handle for each token, whose row may be shorter than what holds it."""
    store = PayloadStore(max_bytes=1 << 20)
    with pytest.raises(UnsupportedError, match="half of the binary store"):
        store.admit(1 << 19)  # as it is told when the payload comes, too late
    row = np.zeros(16, np.uint8)

    def put_all() -> None:
        while True:
            store.put(row.copy().data)

    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        with pytest.raises(CapacityError):
            put_all()
        taken = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert taken <= store.n_bytes <= 1 << 19, "half of it, as of one client"


def test_handles_say_nothing_of_one_another() -> None:
    stores = PayloadStore(), PayloadStore()
    handles = [store.put(b"abc").rpartition("-")[2] for store in stores for _ in range(100)]
    assert len(set(handles)) == len(handles)
    assert all(len(handle) == 48 for handle in handles)
