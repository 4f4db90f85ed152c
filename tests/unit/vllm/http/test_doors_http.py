"""A fault where responses are written or bodies read hurts no request without the lens."""

# ruff: noqa: F811
from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest

from inspect_lens._vllm.http import bodies, server
from inspect_lens.errors import CaptureError
from inspect_lens.spec import LENS_KEYS
from tests.unit.vllm.worker.test_doors_worker import one_fault as fault  # noqa: F401
from tests.unit.vllm.worker.test_doors_worker import raising

OURS: dict[str, Any] = {"output_residual_stream": [0]}


def test_bodies_without_the_lens_are_read(
    monkeypatch: pytest.MonkeyPatch,
    fault: BaseException,
) -> None:
    monkeypatch.setattr(server, "check_unread", raising(fault))
    read = server._reading(LENS_KEYS, lambda self: "vLLM's own")
    assert read(SimpleNamespace(vllm_xargs=None, model_extra={"x": 1})) == "vLLM's own"
    for asked in ({"extra_args": OURS}, OURS):
        with pytest.raises(CaptureError, match=type(fault).__name__):
            read(SimpleNamespace(vllm_xargs=None, model_extra=asked))


def test_bodies_on_other_routes_are_passed_on(
    monkeypatch: pytest.MonkeyPatch,
    fault: BaseException,
) -> None:
    monkeypatch.setattr(bodies, "read_body", raising(fault))
    came: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        came.append(await receive())

    headers = [(b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": "/v1/embeddings", "headers": headers}

    async def post(body: dict[str, Any]) -> None:
        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": json.dumps(body).encode()}

        async def send(message: Any) -> None:
            raise AssertionError(message)

        await bodies.LensBodies(app, lambda: None)(scope, receive, send)

    asyncio.run(post({"input": "x"}))
    assert len(came) == 1
    with pytest.raises(CaptureError, match=type(fault).__name__):
        asyncio.run(post(OURS))
