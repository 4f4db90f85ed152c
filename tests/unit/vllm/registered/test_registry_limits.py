"""What clients may register: how much, under whose name, and with which key."""

from __future__ import annotations

import asyncio
import json
import threading
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from fastapi import FastAPI
from fastapi.testclient import TestClient

from inspect_lens._engine.readout.readers import ProbeStore
from inspect_lens._settings import Settings
from inspect_lens._vllm.http import server
from inspect_lens._vllm.http.payloads import PayloadStore
from inspect_lens._vllm.http.server import add_routes
from inspect_lens._vllm.registered.contents import at_once, forget_unused
from inspect_lens._vllm.registered.registry import Registry
from inspect_lens.errors import CapacityError, LensError, SpecError, UnsupportedError
from inspect_lens.spec import EngineProbe, SteeringVector
from tests.kit.costs import cost
from tests.kit.waiting import soon

HIDDEN = 8


def probe(scale: float = 1.0, layers: tuple[int, ...] = (0,)) -> EngineProbe:
    return EngineProbe(
        layers=layers, tensors={"weight": np.full((len(layers), HIDDEN), scale, np.float32)}
    )


def vector(scale: float = 1.0) -> SteeringVector:
    return SteeringVector(activations=np.ones((1, HIDDEN)), layer_indices=[0], scale=scale)


@pytest.mark.parametrize(
    ("limits", "error", "setting"),
    [
        ({"registry_names": 2}, CapacityError, "INSPECT_LENS_REGISTRY_NAMES"),
        ({"registry_bytes": 2 * 4 * HIDDEN + 3}, CapacityError, "INSPECT_LENS_REGISTRY_BYTES"),
        ({"probe_columns": 0}, SpecError, "INSPECT_LENS_PROBE_COLUMNS"),
    ],
)
def test_a_limit_is_named_with_its_setting(
    limits: dict[str, int], error: type[LensError], setting: str
) -> None:
    registry = Registry({"first": probe(1)}, Settings(**limits))  # type: ignore[arg-type]
    if error is CapacityError:
        registry.add("second", probe(2))
    with pytest.raises(error, match=setting):
        registry.add("third", probe(3))
    assert "third" not in registry.describe()
    if error is CapacityError:
        registry.add("second", probe(2))  # as it is
        registry.add("second", probe(4), replace=True)
        registry.remove("first")
        registry.add("third", probe(3))


def test_a_name_holds_its_content_until_it_is_replaced() -> None:
    registry = Registry()
    registry.add("a", probe(1))
    with pytest.raises(SpecError, match="replace=true"):
        registry.add("a", probe(2))
    assert registry.probes["a"].sha256 == probe(1).sha256
    registry.add("a", probe(2), replace=True, reference="second")
    assert [sha256 for _, sha256 in registry.take_unused()] == [probe(1).sha256]
    registry.add("b", vector())
    registry.add("b", vector(2), replace=True)
    assert not registry.has_left, "workers keep no vectors"


def test_where_workers_cannot_be_told_nothing_is_forgotten_that_they_hold(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, registry, told = [100.0], Registry(), list[str]()
    monkeypatch.setattr("inspect_lens._vllm.registered.registry.time.monotonic", lambda: now[0])
    for value in range(3):
        registry.leave(f"reference-{value}", probe(value).sha256)

    async def busy(reference: str, _: Any) -> list[bool]:
        told.append(reference)
        if len(told) in range(2, 12):
            raise TimeoutError
        return [True]

    for _ in range(5):  # as the steps of an engine
        at_once(forget_unused(registry, busy))
    assert len(told) == 2, "workers have a moment before they are told again"
    while registry.has_left:
        now[0] += 61.0
        at_once(forget_unused(registry, busy))
    assert len(told) == 13
    assert sorted(set(told)) == [f"reference-{value}" for value in range(3)]
    assert len(caplog.records) == 1
    assert not registry.pause_s, "the next failure is logged again, and waits for a moment only"


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> tuple[TestClient, list[Any]]:
    told: list[Any] = []
    registry = Registry({}, Settings(registry_names=2))

    class Engine:
        async def collective_rpc(self, name: str, args: Any) -> list[Any]:
            told.append(args[1])
            return [True]

    front = SimpleNamespace(
        facts=None,
        registry=registry,
        check=registry.check,
        register=registry.add,
        unregister=registry.remove,
    )
    app = FastAPI()
    app.state.engine_client = Engine()
    add_routes(app, lambda: front, PayloadStore())
    return TestClient(app), told


def body(name: str, scale: float = 1.0, **more: Any) -> dict[str, Any]:
    return {"name": name, "probe": probe(scale).model_dump(mode="json"), **more}


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-32-be"])
def test_our_routes_read_the_encodings_of_json_that_vllm_reads(
    served: tuple[TestClient, list[Any]], encoding: str
) -> None:
    text = json.dumps(body("a")).encode(encoding)
    assert served[0].post("/v1/inspect_lens/registry", content=text).json()["name"] == "a"


def test_what_is_refused_reaches_no_worker(served: tuple[TestClient, list[Any]]) -> None:
    client, told = served
    path = "/v1/inspect_lens/registry"
    assert client.post(path, json=body("a")).status_code == 200
    assert client.post(path, json=body("a", 2)).status_code == 400
    assert client.post(path, json=body("a", 2, replace="yes")).status_code == 400
    assert len(told) == 1
    assert client.post(path, json=body("a", 2, replace=True)).status_code == 200
    assert [wire is None for wire in told] == [False, False, True]
    assert client.post(path, json=body("b")).status_code == 200
    full = client.post(path, json=body("c"))
    assert full.status_code == 429
    assert "INSPECT_LENS_REGISTRY_NAMES" in full.json()["error"]["message"]


def test_what_workers_could_not_be_told_is_told_again(monkeypatch: pytest.MonkeyPatch) -> None:
    registry, told = Registry(), list[bool]()

    class Busy:
        async def collective_rpc(self, name: str, args: Any) -> list[bool]:
            told.append(args[1] is None)
            if told[-1] and told.count(True) < 3:
                raise TimeoutError
            return [True]

    front = SimpleNamespace(
        facts=None, registry=registry, check=registry.check, register=registry.add,
        unregister=registry.remove,
    )  # fmt: skip
    app = FastAPI()
    app.state.engine_client = Busy()
    add_routes(app, lambda: front, PayloadStore())
    monkeypatch.setattr(server, "_LOOK_S", 0.01)

    async def run() -> None:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            path = "/v1/inspect_lens/registry"
            assert (await client.post(path, json=body("a"))).status_code == 200
            assert (await client.delete(f"{path}/a")).status_code == 200
            assert await soon(lambda: not registry.has_left)

    asyncio.run(run())
    assert told == [False, True, True, True]


def test_a_name_whose_client_has_gone_is_whole() -> None:
    registry, is_adding, may_go = Registry(), threading.Event(), threading.Event()
    held: dict[str, Any] = {}

    class Engine:
        async def collective_rpc(self, name: str, args: Any) -> list[bool]:
            reference, item = args
            held[reference] = item
            return [True]

    def add(*args: Any, **kwargs: Any) -> None:
        is_adding.set()
        assert may_go.wait(60)
        registry.add(*args, **kwargs)

    front = SimpleNamespace(facts=None, registry=registry, check=registry.check, register=add)
    app = FastAPI()
    app.state.engine_client = Engine()
    add_routes(app, lambda: front, PayloadStore())

    async def run() -> None:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            asking = asyncio.create_task(client.post("/v1/inspect_lens/registry", json=body("a")))
            assert await soon(is_adding.is_set)
            asking.cancel()
            with suppress(asyncio.CancelledError):
                await asking
            may_go.set()
            assert await soon(lambda: "a" in registry.describe())

    asyncio.run(run())
    assert all(held[reference] is not None for reference in registry._references.values())
    assert not registry.has_left


WRITES = [
    ("post", "/v1/inspect_lens/registry"),
    ("delete", "/v1/inspect_lens/registry/a"),
    *(
        ("post", f"/v1/hooks/{name}")
        for name in ("register", "clear", "clear_results", "prefetch", "clear_prefetched")
    ),
]


@pytest.mark.parametrize(("method", "path"), WRITES)
def test_who_writes_brings_the_key(
    served: tuple[TestClient, list[Any]], monkeypatch: pytest.MonkeyPatch, method: str, path: str
) -> None:
    client, told = served
    call = getattr(client, method)
    monkeypatch.setenv("INSPECT_LENS_REGISTRY_KEY", "s3cret")
    for wrong in ("", "s3cret", "Bearer", "Bearer s3cre", "Bearer s3crets", "Basic s3cret"):
        answer = call(path, headers={"Authorization": wrong})
        assert answer.status_code == 401
        assert "s3cret" not in answer.text
    assert not told
    assert call(path, headers={"Authorization": "Bearer s3cret"}).status_code != 401
    assert client.get("/v1/inspect_lens/registry").status_code == 200, "reading is free"
    monkeypatch.delenv("INSPECT_LENS_REGISTRY_KEY")
    assert call(path).status_code != 401


def test_without_an_operators_key_nobody_changes_what_acts_on_all_requests(
    served: tuple[TestClient, list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("INSPECT_LENS_ADMIN_KEY", raising=False)
    answer = served[0].put("/v1/inspect_lens/server", json={}, headers={"Authorization": "Bearer "})
    assert answer.status_code == 401
    assert "has none, so nobody can; start it with INSPECT_LENS_ADMIN_KEY" in answer.text


def test_weights_on_the_device_have_a_budget() -> None:
    one = 4 * HIDDEN
    store = ProbeStore(torch.device("cpu"), kept_bytes=10 * one, most_bytes=2 * one)
    probes = [probe(scale) for scale in (1, 2, 3)]
    for item in probes:
        store.add(item)
    names = [item.sha256 for item in probes]
    taps = probes[0].taps
    with pytest.raises(UnsupportedError, match="INSPECT_LENS_PROBE_BYTES"):
        store.readout(tuple(names), taps)
    held = [store.readout((name,), taps) for name in names[:2]]
    with pytest.raises(CapacityError, match="running requests"):
        store.readout((names[2],), taps)
    held.pop()
    assert store.readout((names[2],), taps).nbytes == one, "what nobody uses makes room"
    assert store.nbytes <= 2 * one


def test_a_request_that_holds_what_it_uses_looks_at_no_other_name() -> None:
    one = probe()
    registry = Registry({f"p{i}": one for i in range(4000)})
    with cost() as held:
        for _ in range(200):
            registry.hold((one.sha256,))()
    assert held.is_at_most(0.02)  # to look at all of them takes ten times as long
