"""A name that is listed can be used: every worker knows what it stands for, whoever writes it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import httpx
import numpy as np
import pytest

pytest.importorskip("vllm")
pytest.importorskip("fastapi")

from fastapi import FastAPI

from inspect_lens._settings import Settings
from inspect_lens._vllm.frontend.state import FrontEnd
from inspect_lens._vllm.http.payloads import PayloadStore
from inspect_lens._vllm.http.server import add_routes
from inspect_lens._vllm.registered.contents import (
    WorkerContents,
    hash_at_workers,
    parse_shared,
    read_kept,
)
from inspect_lens._vllm.registered.registry import Registry
from inspect_lens._vllm.registered.shared_names import SharedNames
from inspect_lens.errors import SpecError
from inspect_lens.spec import (
    Add,
    EditBase,
    EngineAutoencoder,
    EngineConfig,
    EngineEdits,
    EngineLens,
    EngineProbe,
    Registrable,
    Zero,
)
from tests.kit.promises import Promise
from tests.kit.waiting import soon

HIDDEN, LAYERS, CLIENTS, ROUNDS = 8, 4, 4, 40
PATH = "/v1/inspect_lens/registry"
MAKE: dict[type, Callable[[int], Any]] = {
    EngineProbe: lambda i: EngineProbe(
        layers=(0,), tensors={"weight": np.full((1, HIDDEN), i + 1, np.float32)}
    ),
    EditBase: lambda i: Add(vector=np.full(HIDDEN, i + 1), layers=[0]),
    EngineEdits: lambda i: EngineEdits(edits=[Zero(layers=[i])]),
    EngineConfig: lambda i: EngineConfig(edits=[Zero(layers=[i])]),
    EngineLens: lambda i: EngineLens(
        kind="jacobian",
        n_layers=LAYERS,
        layers=(0,),
        tensors={"matrix": np.full((1, HIDDEN, HIDDEN), i + 1, np.float32)},
    ),
    EngineAutoencoder: lambda i: EngineAutoencoder(
        kind="relu",
        tensors={
            "encoder": np.full((2, HIDDEN), i + 1, np.float32),
            "bias": np.zeros(2, np.float32),
            "decoder": np.ones((2, HIDDEN), np.float32),
            "decoder_bias": np.zeros(HIDDEN, np.float32),
        },
    ),
}
KEYS = {
    EngineProbe: "probe", EditBase: "edits", EngineEdits: "edits", EngineLens: "lens",
    EngineConfig: "config", EngineAutoencoder: "sae",
}  # fmt: skip

PROMISE = Promise(
    "a listed name is known to all workers",
    surfaces=[kind.__name__ for kind in get_args(Registrable)],
)


class Store:
    """What a worker knows of one kind."""

    def __init__(self) -> None:
        self.known: set[str] = set()

    def add(self, item: Any) -> None:
        self.known.add(str(hash_at_workers(item)))

    def remove(self, sha256: str) -> None:
        self.known.discard(sha256)


class Engine:
    """Workers that hear of things after a while, each in its own."""

    def __init__(self) -> None:
        self.stores = [(Store(), Store()) for _ in range(2)]
        self.kept = [WorkerContents(*stores) for stores in self.stores]

    async def collective_rpc(self, name: str, args: tuple[str, dict[str, Any] | None]) -> list[Any]:
        async def one(kept: WorkerContents) -> bool:
            await asyncio.sleep(random.random() * 2e-3)
            reference, wire = args
            if wire is None:
                kept.remove(reference)
            else:
                kept.add(reference, read_kept(wire))
            await asyncio.sleep(random.random() * 2e-3)
            return True

        return await asyncio.gather(*map(one, self.kept))

    def knows(self, sha256: str) -> bool:
        return all(any(sha256 in store.known for store in stores) for stores in self.stores)

    @property
    def n_known(self) -> int:
        return sum(len(store.known) for stores in self.stores for store in stores)


def served(engine: Engine, registry: Registry | None = None) -> tuple[httpx.AsyncClient, FrontEnd]:
    front, app = FrontEnd(), FastAPI()
    front.registry = registry or front.registry
    app.state.engine_client = engine
    add_routes(app, lambda: front, PayloadStore())
    transport = httpx.ASGITransport(app)
    return httpx.AsyncClient(transport=transport, base_url="http://server"), front


def body(kind: type, i: int) -> dict[str, Any]:
    item = MAKE[kind](i)
    wire = item.model_dump(mode="json")
    return {
        "name": "one",
        KEYS[kind]: wire["edits"] if kind is EngineEdits else wire,
        "replace": True,
    }


async def race(
    kind: type, servers: list[tuple[httpx.AsyncClient, FrontEnd]], engine: Engine
) -> None:
    bodies = [body(kind, i) for i in range(3)]

    async def replaces(client: httpx.AsyncClient, seed: int) -> None:
        choose = random.Random(seed)
        for _ in range(3):
            answer = await client.post(PATH, json=choose.choice(bodies))
            assert answer.status_code == 200, answer.text

    for n in range(ROUNDS):
        clients = [servers[i % len(servers)][0] for i in range(CLIENTS)]
        await asyncio.gather(*(replaces(c, n * CLIENTS + i) for i, c in enumerate(clients)))
        for client, front in servers:
            listed = (await client.get(PATH)).json()["one"]
            assert listed == front.registry.describe()["one"]
            sha256 = hash_at_workers(front.registry._items["one"])
            assert sha256 is None or engine.knows(sha256), f"round {n}"
    await servers[0][0].delete(f"{PATH}/one")
    assert await soon(lambda: engine.n_known == 0), "what no name stands for is forgotten"


@PROMISE.on(*PROMISE.surfaces)
def _(surface: str, request: pytest.FixtureRequest) -> None:
    (kind,) = (kind for kind in MAKE if kind.__name__ == surface)
    engine = Engine()
    asyncio.run(race(kind, [served(engine)], engine))


test_promise = PROMISE.test()


@pytest.fixture
def names(tmp_path: Path) -> Iterator[list[SharedNames]]:
    made = [SharedNames(tmp_path / "names", parse_shared) for _ in range(2)]
    yield made
    for one in made:
        one.close()


@pytest.mark.parametrize("kind", [EngineProbe, EngineLens])
def test_several_api_servers_keep_it_too(kind: type, names: list[SharedNames]) -> None:
    engine, registries = Engine(), [Registry({}, Settings()) for _ in names]
    for registry, own in zip(registries, names, strict=True):
        registry.share(own)
    asyncio.run(race(kind, [served(engine, registry) for registry in registries], engine))


@pytest.mark.parametrize("kind", [EngineProbe, EngineLens])
@pytest.mark.parametrize("where", ["here", "in another API server"])
@pytest.mark.parametrize("how", ["delete", "replace"])
def test_a_request_under_way_keeps_what_it_names(
    kind: type, where: str, how: str, names: list[SharedNames]
) -> None:
    engine, registries = Engine(), [Registry({}, Settings()) for _ in names]
    for registry, own in zip(registries, names, strict=True):
        registry.share(own)
    item = MAKE[kind](0)
    sha256 = hash_at_workers(item)
    assert sha256 is not None
    asks = registries[0 if where == "here" else 1]

    async def run() -> None:
        client, _ = served(engine, registries[0])
        await client.post(PATH, json=body(kind, 0))
        asks.version  # noqa: B018 - hears of it
        let_go = asks.hold((sha256,))
        gone = (
            await client.delete(f"{PATH}/one")
            if how == "delete"
            else await client.post(PATH, json=body(kind, 1))
        )
        assert gone.status_code == 200
        await asyncio.sleep(0.3)
        assert engine.knows(sha256), "it may not have been scheduled yet"
        let_go()
        assert await soon(lambda: not engine.knows(sha256))
        with pytest.raises(SpecError, match="removed or replaced"):
            asks.hold((sha256,))

    asyncio.run(run())


@pytest.mark.parametrize("kind", [EngineProbe, EngineLens])
def test_an_engine_that_comes_later_keeps_what_is_registered_with_it_again(kind: type) -> None:
    """As in a notebook, whose names outlive the engine that they were given for."""
    first, later = Engine(), Engine()

    async def run() -> None:
        client, front = served(first)
        await client.post(PATH, json=body(kind, 0))
        client, _ = served(later, front.registry)
        await client.post(PATH, json=body(kind, 0))
        sha256 = hash_at_workers(MAKE[kind](0))
        assert later.knows(str(sha256))
        await client.delete(f"{PATH}/one")
        assert await soon(lambda: later.n_known == 0)

    asyncio.run(run())


def test_what_workers_have_no_room_for_leaves_nothing_and_the_name_as_it_was() -> None:
    engine = Engine()

    async def run() -> None:
        client, front = served(engine)
        await client.post(PATH, json=body(EngineProbe, 0))
        tell = engine.collective_rpc

        async def full(name: str, args: Any) -> list[Any]:
            answers = await tell(name, args)
            return answers if args[1] is None else [True, "CapacityError: no room"]

        engine.collective_rpc = full  # type: ignore[method-assign]
        answer = await client.post(PATH, json=body(EngineProbe, 1))
        assert answer.status_code == 400
        assert "no room" in answer.text
        assert front.registry.probes["one"].sha256 == MAKE[EngineProbe](0).sha256
        assert engine.n_known == 2, "one content at two workers"

    asyncio.run(run())
