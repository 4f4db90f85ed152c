"""What acts on all requests, and configurations as models, as far as HTTP shows them."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from inspect_lens._vllm.http.bodies import LensBodies
from inspect_lens._vllm.registered.contents import SERVER_NAME
from inspect_lens._vllm.registered.registry import Registry
from inspect_lens.spec import EngineConfig, ServerConfig, Zero
from tests.kit.facts import engine_facts

EDITS = [Zero(layers=[1])]
JSON = b"application/json"
MULTIPART = b"multipart/form-data; boundary=x"
FIELDS = b'--x\r\nContent-Disposition: form-data; name="model"\r\n\r\nm@c\r\n--x--\r\n'


@dataclass
class Path:
    """As vLLM's `BaseModelPath`."""

    name: str
    model_path: str = "/m"


class Models:
    """As vLLM's `OpenAIServingModels`: one list of names, and what judges them."""

    def __init__(self, *names: str) -> None:
        self.base_model_paths = [Path(name) for name in names]
        self.lora_requests: dict[str, Any] = {}

    def is_base_model(self, name: str) -> bool:
        return any(path.name == name for path in self.base_model_paths)

    @property
    def names(self) -> list[str]:
        return [path.name for path in self.base_model_paths]


class Server:
    """An application whose every route judges the model's name, and answers."""

    def __init__(self, *names: str) -> None:
        self.models = Models(*names)
        self.registry = Registry()
        front = SimpleNamespace(facts=engine_facts(hidden=8), registry=self.registry)
        self.app = LensBodies(self.answer, lambda: front)
        self.state = SimpleNamespace(openai_serving_models=self.models)
        self.asked: Any = None

    async def answer(self, scope: Any, receive: Any, send: Any) -> None:
        from inspect_lens._vllm.http.bodies import SERVED

        try:
            status = 200 if self.models.is_base_model(scope["model"]) else 404
            self.said = ""
        except ValueError as error:
            status, self.said = 400, str(error)
        served = SERVED.get()
        self.asked = None if served is None else served.request
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    def send(self, path: str, model: str, kind: bytes = JSON, **fields: Any) -> Any:
        """Status and headers of the answer."""
        body = FIELDS if kind == MULTIPART else json.dumps({"model": model, **fields}).encode()
        waiting, sent = [{"type": "http.request", "body": body}], []

        async def receive() -> Any:
            return waiting.pop()

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {
            "type": "http", "method": "POST", "path": path, "model": model, "app": self,
            "headers": [(b"content-type", kind)],
        }  # fmt: skip
        asyncio.run(self.app(scope, receive, send))
        return sent[0]["status"], dict(sent[0]["headers"])


@pytest.fixture
def server() -> Server:
    made = Server("m")
    made.registry.add("c", EngineConfig(edits=EDITS))
    return made


@pytest.mark.parametrize(
    "path", ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"]
)
def test_a_configuration_is_chosen_by_the_models_name(server: Server, path: str) -> None:
    status, _ = server.send(path, "m@c")
    assert status == 200
    assert server.asked.configs == ("c",)
    assert server.models.names == ["m", "m@c"]


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/cohere/v2/chat", JSON),
        ("/generative_scoring", JSON),
        ("/v1/systemone", JSON),
        ("/v1/embeddings", JSON),
        ("/v1/audio/transcriptions", MULTIPART),
    ],
)
def test_a_route_that_would_pass_over_a_configuration_refuses_it(
    server: Server, path: str, kind: bytes
) -> None:
    assert server.send(path, "m@c", kind)[0] == 400
    assert "chooses a configuration, which this route would pass over" in server.said
    assert server.send(path, "m", kind)[0] == 200
    assert server.send("/tokenize", "m@c")[0] == 200, "it generates nothing"


def test_a_served_name_is_no_configuration_whatever_is_registered() -> None:
    server = Server("qwen@v1")
    for name in ("v1", "v2"):
        server.registry.add(name, EngineConfig(edits=EDITS))
    assert server.send("/v1/completions", "qwen@v1")[0] == 200
    assert server.asked is None
    assert server.send("/cohere/v2/chat", "qwen@v1")[0] == 200
    assert server.send("/v1/completions", "qwen@v1@v2")[0] == 200
    assert server.asked.configs == ("v2",)


def test_names_of_the_server_and_of_adapters_stay_when_a_configuration_goes() -> None:
    server = Server("m", "m@a")
    server.models.lora_requests["m@b"] = object()
    for name in ("a", "b"):
        server.registry.add(name, EngineConfig(edits=EDITS))
    server.send("/v1/completions", "m")
    assert server.models.names == ["m", "m@a", "m@a@a", "m@a@b"]
    for name in ("a", "b"):
        server.registry.remove(name)
    server.send("/v1/completions", "m")
    assert server.models.names == ["m", "m@a"]


@pytest.mark.parametrize(
    ("path", "kind", "acts"),
    [
        ("/v1/completions", JSON, True),
        ("/v1/responses", JSON, True),
        ("/cohere/v2/chat", JSON, True),
        ("/v1/audio/transcriptions", MULTIPART, True),
        ("/v1/embeddings", JSON, False),
        ("/v1/load_lora_adapter", JSON, False),
        ("/tokenize", JSON, False),
    ],
)
def test_the_header_is_there_where_something_acts(path: str, kind: bytes, acts: bool) -> None:
    server = Server("m")
    assert server.send(path, "m", kind) == (200, {})
    config = ServerConfig(edits=EDITS, may_opt_out=True)
    server.registry.add(SERVER_NAME, config)
    told = {b"x-inspect-lens-server": server.registry.sha256_of(config).encode()} if acts else {}
    assert server.send(path, "m", kind) == (200, told)
    assert server.send(path, "nobody", kind) == (404, {})


def test_the_header_is_not_there_where_it_was_left_out() -> None:
    server = Server("m")
    server.registry.add(SERVER_NAME, ServerConfig(edits=EDITS, may_opt_out=True))
    status, headers = server.send("/v1/responses", "m", inspect_lens={"server": False})
    assert (status, headers) == (200, {})
