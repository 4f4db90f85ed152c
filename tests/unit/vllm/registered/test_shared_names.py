"""API servers of one engine know the same names; nobody else does, and nothing is left behind."""

from __future__ import annotations

import resource
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

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
