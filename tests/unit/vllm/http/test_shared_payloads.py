"""A handle may be fetched from any API server of an engine."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")
pytest.importorskip("fastapi")

from fastapi import FastAPI
from fastapi.testclient import TestClient

from inspect_lens._vllm.http import bodies, server
from inspect_lens._vllm.http.payloads import PayloadStore, ask_sibling, serve_siblings

SIZE = 3_000_000

SIBLING = f"""
import sys
from pathlib import Path
from inspect_lens._vllm.http.payloads import PayloadStore
from inspect_lens._vllm.http.payloads import serve_siblings
store = PayloadStore(ttl_s=float(sys.argv[2]))
serve_siblings(Path(sys.argv[1]), store)
print(store.put(bytes(range(250)) * {SIZE // 250}), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    deep = tmp_path / ("a-folder-with-a-long-name" * 5)  # longer than paths of sockets may be
    deep.mkdir()
    return deep


def sibling(folder: Path, ttl_s: float) -> Any:
    return subprocess.Popen(
        [sys.executable, "-c", SIBLING, str(folder), str(ttl_s)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ,
    )


@pytest.fixture
def client(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TestClient]:
    monkeypatch.setattr(server._Front, "end", SimpleNamespace(siblings=folder))
    app = FastAPI()
    server._routers((), lambda app: None)(app)
    with TestClient(app) as made:
        yield made


@pytest.mark.parametrize(("ttl_s", "status"), [(60.0, 200), (0.0, 410)])
def test_a_handle_of_another_process_is_fetched_from_there(
    client: TestClient, folder: Path, ttl_s: float, status: int
) -> None:
    with sibling(folder, ttl_s) as other:
        handle = other.stdout.readline().strip()
        answer = client.get(f"/v1/activations/{handle}")
        assert answer.status_code == status
        if status == 200:
            assert answer.content == bytes(range(250)) * (SIZE // 250)
        assert client.get(f"/v1/activations/{handle}").status_code == 410, "once"
        unknown = client.get(f"/v1/activations/{handle.partition('-')[0]}-x")
        assert unknown.status_code == 410
        other.stdin.close()
    assert client.get(f"/v1/activations/{handle}").status_code == 404, "it has ended"


@pytest.mark.parametrize("handle", ["unknown", "..-x", "%2e%2e-x", "a" * 300, "é-x", "."])
def test_a_handle_that_nobody_made_gets_404(client: TestClient, handle: str) -> None:
    assert client.get(f"/v1/activations/{handle}").status_code == 404


def test_a_server_alone_asks_nobody(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server._Front, "end", SimpleNamespace(siblings=None))
    assert client.get("/v1/activations/ab12-x").status_code == 404
    handle = bodies.payloads.put(b"mine")
    assert client.get(f"/v1/activations/{handle}").content == b"mine"


def test_a_large_payload_arrives_whole(folder: Path) -> None:
    store = PayloadStore()
    serve_siblings(folder, store)
    data = os.urandom(40_000_000)
    assert ask_sibling(folder, store.put(data)) == data
