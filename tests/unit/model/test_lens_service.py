"""Lenses and autoencoders that tasks name: which are the server's, and how others get there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import httpx
import numpy as np
import pytest

from inspect_lens.errors import ArtifactError, CaptureError, SpecError
from inspect_lens.lens import Lens, LensCard
from inspect_lens.model._request import name_of_lens, resolve_edits
from inspect_lens.model._server import ServerNames
from inspect_lens.sae import SparseAutoencoder
from inspect_lens.solver import with_lens
from inspect_lens.spec import EngineAutoencoder, EngineLens, LensRequest, Splice
from tests.kit.fake_server import FakeLensServer

from .conftest import GetModel, RunEval


def made(scale: float = 1.0) -> Lens:
    card = LensCard(name="m/l", kind="jacobian", n_layers=6, layers=(2,), hidden=4)
    return Lens(matrix=scale * np.eye(4, dtype=np.float32)[None], card=card)


def autoencoder(scale: float = 1.0) -> SparseAutoencoder:
    eye, zeros = np.eye(8, dtype=np.float32), np.zeros(8, dtype=np.float32)
    return SparseAutoencoder(
        weight=scale * eye, bias=zeros, decoder=eye, decoder_bias=zeros,
        hook="blocks.2.hook_resid_post",
    )  # fmt: skip


def reading(scale: float = 1.0) -> LensRequest:
    return LensRequest(lens={"layers": [2], "name": name_of_lens(made(scale))})


def splicing(scale: float = 1.0) -> LensRequest:
    return LensRequest(edits=[autoencoder(scale).splice()])


class Server:
    def __init__(self, status: int = 200) -> None:
        self.status = status
        self.bodies: list[tuple[str, dict[str, Any]]] = []

    async def __call__(self, path: str, body: dict[str, Any]) -> Any:
        await anyio.sleep(0.01)
        self.bodies.append((path, body))
        return httpx.Response(self.status, text="no room")


def test_names_and_artefacts_are_told_apart(tmp_path: Path) -> None:
    assert name_of_lens("jacobian-1") == "jacobian-1"
    folder = made().save(tmp_path / "l")
    assert len({name_of_lens(given) for given in (str(folder), folder, made())}) == 1
    with pytest.raises(ArtifactError, match="was not found"):
        name_of_lens("nobody/nothing")
    with pytest.raises(SpecError, match="lens="):
        name_of_lens("not a name")


def test_files_of_autoencoders_are_named_by_what_they_hold(tmp_path: Path) -> None:
    sae, path = autoencoder(), tmp_path / "params.npz"

    def write(scale: float) -> None:
        eye, zeros = np.eye(8), np.zeros(8)
        np.savez(path, W_enc=scale * eye, b_enc=zeros, threshold=zeros, W_dec=eye, b_dec=zeros)

    write(1.0)
    edit = {"op": "splice", "layers": [1], "latents": {"3": 0.0}}
    named = {
        resolve_edits(edit | {"sae": given})["sae"]
        for given in (str(path), path, str(tmp_path), str(path))
    }
    write(2.0)
    again = resolve_edits(edit | {"sae": str(path)})["sae"]
    assert len(named) == 1
    assert again not in named
    assert resolve_edits(edit | {"sae": "mine"})["sae"] == "mine"
    # Of an autoencoder that knows its place, the edit need not say it.
    found = resolve_edits({"op": "splice", "sae": sae})
    assert Splice.model_validate(found) == sae.splice()
    with pytest.raises(ArtifactError, match=r"where: cannot be read .* cfg\.json and"):
        resolve_edits(edit | {"sae": "no/where"})


@pytest.mark.parametrize(
    ("ask", "field", "form"),
    [(reading, "lens", EngineLens), (splicing, "sae", EngineAutoencoder)],
)
def test_many_samples_register_weights_once(ask: Any, field: str, form: Any) -> None:
    server = Server()
    service = ServerNames(server, "m")
    requests = [ask(1.0), ask(2.0)]

    async def main() -> None:
        async with anyio.create_task_group() as tasks:
            for i in range(20):
                tasks.start_soon(service.serve, requests[i % 2])

    anyio.run(main)
    assert len(server.bodies) == 2
    for path, body in server.bodies:
        assert path == "/v1/inspect_lens/registry"
        sent = form.model_validate(body[field])
        assert body["name"].endswith(f"-{sent.sha256[:24]}")
        assert body["name"] in str(requests)
    service.forget()
    anyio.run(service.serve, requests[0])
    assert len(server.bodies) == 3


@pytest.mark.parametrize("ask", [reading, splicing])
@pytest.mark.parametrize(
    ("status", "error", "words"),
    [
        (400, SpecError, "m does not take it: no room"),
        (429, SpecError, "no room"),
        (404, SpecError, "without inspect-lens"),
        (401, SpecError, "set VLLM_API_KEY to that key"),
        (500, CaptureError, "REGISTER"),
    ],
)
def test_a_refusal_reaches_every_sample_and_is_tried_again(
    ask: Any, status: int, error: type[Exception], words: str
) -> None:
    server = Server(status)
    service = ServerNames(server, "m")
    for n in (1, 2):
        with pytest.raises(error, match=words):
            anyio.run(service.serve, ask())
        assert len(server.bodies) == n


def test_an_eval_registers_its_autoencoder_and_again_at_a_new_server(
    server: FakeLensServer, model_of: GetModel, run_eval: RunEval
) -> None:
    edit, model = autoencoder().splice(latents={3: 0.0}, error_term=True), model_of(server)
    for _ in range(2):
        log = run_eval(server, model=model, solver=with_lens(edits=edit))
        assert log.status == "success"
        assert list(server.weights) == [edit.sae]
        server.weights.clear()  # as where somebody has started it again


def test_a_server_that_refuses_an_autoencoder_fails_the_eval_with_its_reason(
    server: FakeLensServer, run_eval: RunEval
) -> None:
    server.refuses_weights = "lenses and autoencoders: 4 of 5 bytes; INSPECT_LENS_LENS_BYTES"
    log = run_eval(server, solver=with_lens(edits=autoencoder().splice()))
    assert log.error is not None
    assert "autoencoder (width 8, 8 latents)" in log.error.message
    assert "INSPECT_LENS_LENS_BYTES" in log.error.message
    assert server.requests == []  # nothing was answered without it
