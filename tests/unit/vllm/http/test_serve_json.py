"""What a response says of tensors, and the memory of those that wait to be fetched."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from inspect_lens._engine.collect.result_memory import ResultMemory
from inspect_lens._vllm.http import bodies, server
from inspect_lens._vllm.http import payloads as payloads_module
from inspect_lens._vllm.http.payloads import (
    PayloadStore,
    fetch_payload,
    handle_entries,
    takes_any_buffer,
)
from inspect_lens.spec import TensorData, decode_tensor
from tests.kit.waiting import until

WIDTH, MOST = 64, 32


@pytest.fixture
def memory() -> ResultMemory:
    return ResultMemory(0)


def in_slab(memory: ResultMemory, count: int) -> TensorData:
    """(1, count, width) of rows that lie in memory for 32 of them."""
    slab = memory.take(MOST, 2 * WIDTH)
    rows = slab.array(np.dtype("<u2"), (1, MOST, WIDTH))
    rows[...] = np.arange(MOST * WIDTH, dtype=np.uint16).reshape(rows.shape)
    return TensorData(rows[:, :count], "bfloat16")


def entry_of(tensor: TensorData, transport: str) -> Any:
    completion = SimpleNamespace(
        inspect_lens=SimpleNamespace(model_dump=lambda mode: {}),
        inspect_lens_tensors={"residual_stream": tensor},
        inspect_lens_transport=transport,
    )
    return bodies.as_json(completion, [])["activations"]["residual_stream"]


def test_what_explains_tensors_is_told_where_these_have_gone_out_before() -> None:
    completion = SimpleNamespace(
        inspect_lens=SimpleNamespace(model_dump=lambda mode: {}),
        inspect_lens_tensors={},
        inspect_lens_plain={"qk_layers": [2]},
        inspect_lens_transport="inline",
    )
    assert bodies.as_json(completion, [])["activations"] == {"qk_layers": {"__json__": [2]}}


@pytest.mark.parametrize("count", [1, 25, 26, MOST])
def test_rows_are_copied_where_they_wait_and_keep_much_more_memory(
    memory: ResultMemory, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    monkeypatch.setattr(payloads_module, "_LOOK_S", 60.0)  # it looks when it is told to
    tensor, store = in_slab(memory, count), PayloadStore()
    for n_looks in range(3):
        entry = handle_entries({"rows": tensor}, store)["rows"]
        for _ in range(n_looks):
            store._wake()
        data = store.get(entry["handle"])
        assert isinstance(data, memoryview)
        is_where_it_was = np.shares_memory(np.frombuffer(data, np.uint8), tensor.storage)
        assert is_where_it_was == (n_looks < 2 or count >= 26)
        np.testing.assert_array_equal(decode_tensor(entry, raw=data).storage, tensor.storage)
        assert entry["nbytes"] == len(data) == tensor.nbytes
        assert store.n_bytes == 0


def test_the_store_looks_on_where_there_was_no_memory_and_no_thread(
    memory: ResultMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed: list[str] = []

    def none(rows: Any) -> Any:
        failed.append("copy")
        raise MemoryError

    def no_thread(thread: threading.Thread) -> None:
        failed.append("thread")
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(payloads_module, "_LOOK_S", 0.01)
    monkeypatch.setattr(payloads_module, "own_memory", none)
    told: list[int] = []
    store = PayloadStore(ttl_s=2.0, on_change=lambda n, *_: told.append(n))
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", no_thread)
        handle_entries({"rows": in_slab(memory, 1)}, store)
    handle_entries({"rows": in_slab(memory, 1)}, store)
    assert until(lambda: store.n_bytes == 0 and told[-1:] == [0])
    assert failed[0] == "thread"
    assert "copy" in failed


def test_memory_is_kept_until_the_store_lets_go_of_it(memory: ResultMemory) -> None:
    tensor = in_slab(memory, MOST)
    entry = entry_of(tensor, "binary")
    expected = tensor.storage.copy()
    del tensor
    assert not memory._returned
    other = in_slab(memory, MOST)
    other.storage[...] = 0
    data = bodies.payloads.get(entry["handle"])
    assert data is not None
    np.testing.assert_array_equal(decode_tensor(entry, raw=data).storage, expected)
    del data
    assert len(memory._returned) == 1


def test_a_route_gives_out_the_bytes_themselves(memory: ResultMemory) -> None:
    from fastapi import FastAPI
    from fastapi.testclient import TestClient

    app = FastAPI()
    server._routers((), lambda app: None)(app)
    tensor = in_slab(memory, MOST)
    entry = entry_of(tensor, "binary")
    found = asyncio.run(fetch_payload(entry["handle"], bodies.payloads))
    entry = entry_of(tensor, "binary")
    path = f"/v1/activations/{entry['handle']}"
    answer = TestClient(app).get(path)
    assert answer.status_code == 200
    assert answer.headers["content-length"] == str(entry["nbytes"])
    assert answer.content == tensor.storage.tobytes()
    assert TestClient(app).get(path).status_code == 410
    assert takes_any_buffer(app)
    assert isinstance(found, memoryview)


@pytest.mark.parametrize("kind", ["function", "class of others"])
def test_middleware_that_looks_into_bodies_sees_bytes(memory: ResultMemory, kind: str) -> None:
    from fastapi import FastAPI
    from fastapi.testclient import TestClient

    app = FastAPI()
    server._routers((), lambda app: None)(app)
    seen: list[type] = []
    if kind == "function":

        @app.middleware("http")
        async def look(request: Any, call_next: Any) -> Any:
            response = await call_next(request)
            parts = [part async for part in response.body_iterator]
            seen.extend(type(part) for part in parts if len(part))

            async def again() -> Any:
                for part in parts:
                    yield part

            response.body_iterator = again()
            return response
    else:

        class Look:
            def __init__(self, app: Any) -> None:
                self.app = app

            async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
                async def watched(message: Any) -> None:
                    seen.extend([type(message["body"])] if message.get("body") else [])
                    await send(message)

                await self.app(scope, receive, watched)

        app.add_middleware(Look)
    tensor = in_slab(memory, MOST)
    entry = entry_of(tensor, "binary")
    answer = TestClient(app).get(f"/v1/activations/{entry['handle']}")
    assert answer.content == tensor.storage.tobytes()
    assert set(seen) == {bytes}
