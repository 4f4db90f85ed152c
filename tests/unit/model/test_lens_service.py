"""Lenses that solvers name: which are the server's, and how others get there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import httpx
import numpy as np
import pytest

from inspect_lens.errors import ArtifactError, CaptureError, SpecError
from inspect_lens.lens import Lens, LensCard
from inspect_lens.model._request import read_lens
from inspect_lens.model._server import ServerNames
from inspect_lens.spec import EngineLens


def made(scale: float = 1.0) -> Lens:
    card = LensCard(name="m/l", kind="jacobian", n_layers=6, layers=(2,), hidden=4)
    return Lens(matrix=scale * np.eye(4)[None], card=card)


class Server:
    def __init__(self, status: int = 200) -> None:
        self.status = status
        self.bodies: list[tuple[str, dict[str, Any]]] = []

    async def __call__(self, path: str, body: dict[str, Any]) -> Any:
        await anyio.sleep(0.01)
        self.bodies.append((path, body))
        return httpx.Response(self.status, text="no room")


def test_names_and_artefacts_are_told_apart(tmp_path: Path) -> None:
    assert read_lens("jacobian-1") == "jacobian-1"
    folder = made().save(tmp_path / "l")
    for given in (str(folder), folder, made()):
        found = read_lens(given)
        assert isinstance(found, Lens)
        assert found.layers == (2,)
    with pytest.raises(ArtifactError, match="was not found"):
        read_lens("nobody/nothing")
    with pytest.raises(SpecError, match="lens="):
        read_lens("not a name")


def test_many_samples_register_a_lens_once() -> None:
    server = Server()
    service = ServerNames(server, "m")
    names: list[str] = []

    async def ask(lens: Lens) -> None:
        names.append(await service.name_of(lens))

    async def main() -> None:
        async with anyio.create_task_group() as tasks:
            for i in range(20):
                tasks.start_soon(ask, made(1.0 + i % 2))

    anyio.run(main)
    assert len(set(names)) == 2
    assert len(server.bodies) == 2
    path, body = server.bodies[0]
    assert path == "/v1/inspect_lens/registry"
    form = EngineLens.model_validate(body["lens"])
    assert body["name"] == f"lens-{form.sha256[:24]}"
    service.forget()
    anyio.run(service.name_of, made())
    assert len(server.bodies) == 3


@pytest.mark.parametrize(
    ("status", "error", "words"),
    [(400, SpecError, "no room"), (429, SpecError, "no room"), (401, CaptureError, "REGISTER")],
)
def test_a_refusal_reaches_every_sample_and_is_tried_again(
    status: int, error: type[Exception], words: str
) -> None:
    server = Server(status)
    service = ServerNames(server, "m")
    for n in (1, 2):
        with pytest.raises(error, match=words):
            anyio.run(service.name_of, made())
        assert len(server.bodies) == n
