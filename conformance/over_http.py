"""A backend that is a running API server, whatever is behind it."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

from inspect_lens.spec import as_tensor_data, decode_tensor, encode_tensor
from tests.kit.api_server import preemptions
from tests.kit.child import ROOT

from .offline import run_inspect
from .protocol import Answer, Ask, Engine, FloatArray, NotSupported, Profile, Usage, Vector

__all__ = ["OverHttp", "read_response"]

TIMEOUT_S = 300.0


class OverHttp:
    """One server that somebody else started, with the options of one profile."""

    def __init__(self, url: str, model: Path, *, profile: Profile, inspect_path: str = "") -> None:
        self.name, self.version = "http", ""
        self.environment: dict[str, Any] = {}
        self.max_ranks = 1
        self._url, self._model, self._profile = url.rstrip("/"), model, profile
        self._inspect_path = inspect_path

    @contextlib.contextmanager
    def engine(self, profile: Profile, *, tensor_parallel: int = 1) -> Iterator[Engine]:
        """The server, if it was started with the options of this profile."""
        if profile != self._profile or tensor_parallel != 1:
            raise NotSupported(
                f"not run: needs a server with the options of `--print-server {profile}`"
            )
        with httpx.Client(base_url=self._url, timeout=TIMEOUT_S) as client:
            self.environment = {"vllm": client.get("/version").json().get("version", "")}
            about = client.get("/v1/inspect_lens")
            if about.status_code == 200:
                self.name, self.version = "inspect-lens over HTTP", about.json()["version"]
            models = client.get("/v1/models").json()["data"]
            yield HttpEngine(client, models[0]["id"])

    @contextlib.contextmanager
    def server(self) -> Iterator[str]:
        """The server; it stays, and re-scoring is pointed to where nobody listens."""
        yield self._url

    def rescore(self, command: Sequence[str]) -> dict[str, Any]:
        """Run the Inspect child with the provider that is installed here."""
        with httpx.Client(base_url=self._url, timeout=TIMEOUT_S) as client:
            served = client.get("/v1/models").json()["data"][0]["id"]
        path = [
            self._inspect_path, str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", ""),
        ]  # fmt: skip
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, path)),
            "CONFORMANCE_BACKEND": "inspect-lens",
            "CONFORMANCE_MODEL": served,
            "VLLM_BASE_URL": "http://127.0.0.1:9/v1",
            "VLLM_API_KEY": "none",
        }
        return run_inspect(command, environment)


class HttpEngine:
    """The protocol over `/v1/completions` with `vllm_xargs`."""

    def __init__(self, client: httpx.Client, model: str) -> None:
        self._client, self._model = client, model
        self._salts = itertools.count()

    def _body(self, ask: Ask) -> dict[str, Any]:
        xargs: dict[str, str] = {}
        if ask.capture is not None:
            xargs["output_residual_stream"] = json.dumps(list(ask.capture))
        if ask.vectors:
            xargs["apply_steering_vectors"] = json.dumps([_wire(v) for v in ask.vectors])
        if ask.hook_layer is not None:
            raise NotSupported("custom hooks are code and are not sent over HTTP by this suite")
        body: dict[str, Any] = {
            "model": self._model,
            "prompt": list(ask.prompt),
            "max_tokens": ask.max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
        }
        if ask.logprobs is not None:
            body["logprobs"] = ask.logprobs
        if ask.salt is not None:
            body["cache_salt"] = ask.salt
        return body | ({"vllm_xargs": xargs} if xargs else {})

    def _one(self, ask: Ask) -> Answer:
        response = self._client.post("/v1/completions", json=self._body(ask))
        if response.status_code != 200:
            return Answer(error=response.text[:2000], status=response.status_code)
        return read_response(response.json())

    def generate(self, asks: Sequence[Ask], *, together: bool = True) -> list[Answer]:
        """Answer requests, each over a connection of its own when together."""
        if not together:
            return [self._one(ask) for ask in asks]
        with ThreadPoolExecutor(max_workers=max(1, len(asks))) as pool:
            return list(pool.map(self._one, asks))

    def abort(self, asks: Sequence[Ask], *, concurrent: int) -> int:
        """Close the connection after the first event of each stream."""
        cut = itertools.count()
        lock = threading.Lock()

        def one(ask: Ask) -> None:
            body = {**self._body(ask), "stream": True}
            with (
                httpx.Client(base_url=self._client.base_url, timeout=TIMEOUT_S) as mine,
                mine.stream("POST", "/v1/completions", json=body) as answer,
            ):
                for line in answer.iter_lines():
                    if line.startswith("data: ") and line != "data: [DONE]":
                        with lock:
                            next(cut)
                        return

        with ThreadPoolExecutor(max_workers=concurrent) as pool:
            list(pool.map(one, asks))
        return next(cut)

    def reset_prefix_cache(self) -> bool:
        """Ask for it; servers offer this route only in development mode."""
        return self._client.post("/reset_prefix_cache").status_code == 200

    def preemptions(self) -> int:
        """Count as vLLM does, from `/metrics`."""
        return preemptions(self._client.get("/metrics").text)

    def leftovers(self) -> Mapping[str, int]:
        """Requests in flight as the server counts them."""
        about = self._client.get("/v1/inspect_lens")
        if about.status_code != 200:
            return {}
        return {"open_requests": int(about.json()["open_requests"])}

    def usage(self) -> Usage | None:
        """A server's processes are not seen from here."""
        return None


def _wire(vector: Vector) -> dict[str, Any]:
    """A vector as every server of the protocol reads it; values are sent as they are, NaN too."""
    return {
        "activations": encode_tensor(as_tensor_data(vector.values)),
        "layer_indices": list(vector.layers),
        "scale": vector.scale,
        "norm_match": vector.norm_match,
        "position_indices": None if vector.positions is None else list(vector.positions),
    }


def read_response(body: Mapping[str, Any]) -> Answer:
    """Read one completion with its activations, beside the choice or beside the response.

    Args:
        body: the JSON of `/v1/completions`.
    """
    choice = body["choices"][0]
    encoded = (choice.get("activations") or body.get("activations") or {}).get("residual_stream")
    rows: FloatArray | None = None
    if encoded is not None:
        rows = decode_tensor(encoded).to_float32()
    steps = (choice.get("logprobs") or {}).get("top_logprobs")
    details = (body.get("usage") or {}).get("prompt_tokens_details") or {}
    return Answer(
        token_ids=tuple(choice["token_ids"]),
        logprobs=None
        if steps is None
        else tuple({int(k.removeprefix("token_id:")): v for k, v in s.items()} for s in steps),
        rows=rows,
        cached_tokens=details.get("cached_tokens"),
    )
