"""API servers of one engine know the same names; nobody else does, and nothing is left behind."""

from __future__ import annotations

import asyncio
import resource
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest
from fastapi import FastAPI

from inspect_lens._vllm.http.bodies import LensBodies
from inspect_lens._vllm.http.payloads import PayloadStore
from inspect_lens._vllm.http.server import add_routes
from inspect_lens._vllm.registered import shared_names
from inspect_lens._vllm.registered.contents import SERVER_NAME, compose, parse_shared
from inspect_lens._vllm.registered.registry import Registry
from inspect_lens._vllm.registered.shared_names import SharedNames, folder_of_siblings
from inspect_lens.errors import CapacityError, SpecError
from inspect_lens.spec import (
    EngineConfig,
    EngineProbe,
    LensRequest,
    ServerConfig,
    SteeringVector,
)
from tests.kit.waiting import soon


def probe(value: float) -> EngineProbe:
    return EngineProbe(layers=(1,), tensors={"weight": np.full((1, 8), value)}, threshold=value)


def vector(value: float) -> SteeringVector:
    return SteeringVector(activations=np.full((1, 8), value), layer_indices=[0], scale=2.0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "names"


@pytest.fixture
def two(folder: Path) -> Iterator[tuple[Registry, Registry]]:
    names = [SharedNames(folder, parse_shared) for _ in range(2)]
    first, second = Registry({"start": probe(9.0)}), Registry({"start": probe(9.0)})
    first.share(names[0])
    second.share(names[1])
    yield first, second
    for own in names:
        own.close()


def test_what_one_server_takes_the_other_knows_whole(two: tuple[Registry, Registry]) -> None:
    first, second = two
    assert first.describe() == second.describe()
    first.add("p", probe(1.0))
    second.add("v", vector(3.0))
    assert first.describe() == second.describe()
    assert first.describe().keys() == {"start", "p", "v"}
    request = LensRequest(probes=["p"], edits_named=["v"])
    for registry in two:
        (made,) = compose(registry, request)[0].edits
        assert made.reference() == vector(3.0).reference()
        assert registry.probes["p"].reference() == probe(1.0).reference()
        assert (registry.probes["p"].tensors["weight"].to_float32() == 1.0).all()
        with pytest.raises(SpecError, match="other content"):
            registry.add("p", probe(2.0))
        registry.add("p", probe(1.0))  # the same content is fine


def test_a_server_that_comes_late_knows_what_the_first_ones_know(
    two: tuple[Registry, Registry], folder: Path
) -> None:
    two[0].add("p", probe(1.0))
    two[1].remove("start")
    late = Registry({"start": probe(9.0)})
    names = SharedNames(folder, parse_shared)
    late.share(names)
    assert late.describe().keys() == {"p"}
    names.close()


def test_of_many_at_once_one_takes_a_name(folder: Path) -> None:
    registries = []
    for _ in range(4):
        registries.append(Registry())
        registries[-1].share(SharedNames(folder, parse_shared))
    taken: list[int] = []

    def take(mine: int) -> None:
        for i in range(10):
            try:
                registries[mine].add(f"n{i}", vector(float(mine + 1)))
                taken.append(i)
            except SpecError:
                pass

    threads = [threading.Thread(target=take, args=(mine,)) for mine in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(taken) == list(range(10))
    known = [registry.describe() for registry in registries]
    assert all(one == known[0] for one in known)
    for registry in registries:
        assert registry._shared is not None
        registry._shared.close()
    assert not folder.exists(), "the last one removes it"


def test_siblings_find_the_same_folder_and_strangers_another() -> None:
    ask = (
        "from inspect_lens._vllm.registered.shared_names import folder_of_siblings as f; print(f())"
    )
    told = [
        subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=True)
        for _ in range(2)
    ]
    theirs = {one.stdout for one in told}
    assert len(theirs) == 1
    assert theirs != {f"{folder_of_siblings()}\n"}


def test_a_folder_of_somebody_else_is_not_used(tmp_path: Path) -> None:
    theirs = tmp_path / "names"
    theirs.mkdir(mode=0o777)
    theirs.chmod(0o777)
    with pytest.raises(PermissionError):
        SharedNames(theirs, parse_shared)


def test_a_disk_that_is_full_leaves_a_name_free(two: tuple[Registry, Registry]) -> None:
    first, second = two
    large = EngineProbe(layers=(1,), tensors={"weight": np.random.default_rng(0).random((1, 9999))})
    first.add("v", vector(1.0))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, hard))
    try:
        with pytest.raises(CapacityError, match=r"\(File too large\); free space"):
            first.add("p", large)
        with pytest.raises(CapacityError):
            first.add("v", large, replace=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert first.describe() == second.describe()
    assert "p" not in first.describe()
    assert first.describe()["v"]["ops"] == ["add"]
    assert first._shared is not None
    assert len(list(first._shared.folder.iterdir())) == 3, "the guard, what began, and the vector"
    second.add("p", large)
    assert first.describe()["p"] == second.describe()["p"]
    second.add("v", large, replace=True)
    assert first.describe()["v"] == second.describe()["v"] == first.describe()["p"]
    assert len(list(first._shared.folder.iterdir())) == 4, "what was replaced is gone"


def client_of(registry: Registry) -> httpx.AsyncClient:
    """A client of an API server with these names."""

    class Engine:
        async def collective_rpc(self, name: str, args: object) -> list[bool]:
            return [True]

    front = SimpleNamespace(
        facts=None, registry=registry, check=registry.check, register=registry.add,
        unregister=registry.remove, describe_server=dict,
    )  # fmt: skip
    app = FastAPI()
    app.state.engine_client = Engine()
    add_routes(app, lambda: front, PayloadStore())
    app.add_middleware(LensBodies, front_end=lambda: front)
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server")


NAMES, ALL = "/v1/inspect_lens/registry", "/v1/inspect_lens/server"


@pytest.mark.parametrize("change", [("POST", NAMES), ("DELETE", f"{NAMES}/a"), ("PUT", ALL)])
def test_no_server_stands_still_with_the_disk_of_what_they_share(
    two: tuple[Registry, Registry], change: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INSPECT_LENS_ADMIN_KEY", "s3cret")
    headers = {"Authorization": "Bearer s3cret"}
    is_slow, may_go = threading.Event(), threading.Event()

    def body(name: str) -> dict[str, Any]:
        return {"name": name, "probe": probe(1.0).model_dump(mode="json")}

    def slow(original: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            is_slow.set()
            assert may_go.wait(60), "the event loop waits for this"
            return original(*args, **kwargs)

        return run

    async def run() -> None:
        first, second = map(client_of, two)
        assert (await first.post(NAMES, json=body("a"))).status_code == 200
        # The second one has to read that, while the first one writes something else.
        monkeypatch.setattr(shared_names, "write_atomic", slow(shared_names.write_atomic))
        monkeypatch.setattr(Path, "unlink", slow(Path.unlink))
        sent = body("b") if change[1] == NAMES else {"may_opt_out": True, "probes": ["start"]}
        writing = asyncio.create_task(first.request(*change, json=sent, headers=headers))
        assert await soon(is_slow.is_set)
        assert "a" in (await first.get(NAMES)).json()
        reading = asyncio.create_task(second.get(NAMES))
        assert (await second.get("/health")).status_code == 404
        assert not any(task.done() for task in (reading, writing))
        may_go.set()
        assert (await writing).status_code == 200
        assert {"start", "a"} >= (await reading).json().keys() - {"b"}

    asyncio.run(run())
    assert two[0].describe() == two[1].describe()


def test_what_acts_on_all_requests_is_the_same_at_each_server(
    two: tuple[Registry, Registry],
) -> None:
    first, second = two
    second.add("v", vector(3.0))
    config = ServerConfig(edits_named=[{"name": "v", "scale": 5.0}], may_opt_out=True)
    first.add(SERVER_NAME, config)
    first.add("named", EngineConfig(edits_named=["v"]))
    assert second.server == config
    assert second.configs == ("named",)
    composed, tiers = compose(second, LensRequest(configs=["named"]))
    assert [edit.scale for edit in composed.edits] == [5.0, 2.0]
    assert [one.tier for one in tiers.receipts] == ["server", "named"]
    with pytest.raises(SpecError, match="used by what this server does"):
        second.remove("v")
    second.remove(SERVER_NAME)
    assert first.server is None
    second.remove("named")
    first.remove("v")
