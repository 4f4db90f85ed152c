"""Lenses in the registry: names, limits, start, and what API servers share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from inspect_lens import LensRequest
from inspect_lens._settings import Settings
from inspect_lens._vllm.registered.contents import parse_shared, start_items
from inspect_lens._vllm.registered.registry import Registry
from inspect_lens._vllm.registered.shared_names import SharedNames
from inspect_lens.errors import CapacityError, SpecError
from inspect_lens.lens import Lens, LensCard
from inspect_lens.spec import EngineLens, EngineProbe, LensEntry, ResolvedLens

HIDDEN = 8
NBYTES = 2 * HIDDEN * HIDDEN * 4


def made(scale: float = 1.0) -> Lens:
    card = LensCard(name="m/l", kind="jacobian", n_layers=6, layers=(0, 2), hidden=HIDDEN)
    matrix = np.broadcast_to(scale * np.eye(HIDDEN), (2, HIDDEN, HIDDEN))
    return Lens(matrix=matrix.astype(np.float32), card=card)


def lens(scale: float = 1.0) -> EngineLens:
    return made(scale).for_engine()


def probe() -> EngineProbe:
    return EngineProbe(layers=(0,), tensors={"weight": np.ones((1, HIDDEN), np.float32)})


def test_the_devices_have_room_for_so_many() -> None:
    registry = Registry({}, Settings(lens_bytes=2 * NBYTES, registry_bytes=1))
    registry.add("a", lens(1))
    registry.add("again", lens(1))  # takes no room
    registry.add("b", lens(2))
    for replace in (False, True):
        # One that is replaced is on the devices until the new one is.
        with pytest.raises(CapacityError, match="INSPECT_LENS_LENS_BYTES"):
            registry.add("b" if replace else "c", lens(3), replace=replace)
    registry.remove("b")
    registry.add("c", lens(3))


def test_lenses_are_registered_at_start(tmp_path: Path) -> None:
    folder = made().save(tmp_path / "lens")
    items = start_items(f"j={folder}")
    assert items["j"].reference() == lens().reference()
    (folder / "lens.safetensors").write_bytes(b"")
    with pytest.raises(SpecError, match="INSPECT_LENS_REGISTER: j: "):
        start_items(f"j={folder}")


def test_api_servers_share_what_front_ends_keep(tmp_path: Path) -> None:
    one, other = Registry(), Registry()
    shared: list[Any] = [SharedNames(tmp_path / "names", parse_shared) for _ in range(2)]
    one.share(shared[0])
    other.share(shared[1])
    one.add("j", lens())
    one.add("p", probe())
    assert other.version
    assert other.describe() == one.describe()
    resolved = other.resolve(LensRequest(lens={"name": "j"})).lens
    assert isinstance(resolved, ResolvedLens)
    assert isinstance(resolved.entry, LensEntry)
    stored = sum(file.stat().st_size for file in (tmp_path / "names").glob("*.json"))
    assert stored < 2000, "tensors of lenses are with the workers alone"
    other.remove("j")
    assert "j" not in one.describe() or one.version
    assert "j" not in one.describe()
