"""A body that cannot be served is a 400 that names the field, at once, on every route of ours."""

from __future__ import annotations

import asyncio
import json
import typing
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import BaseModel

pytest.importorskip("vllm")
pytest.importorskip("fastapi")

from fastapi import FastAPI
from fastapi.testclient import TestClient

from inspect_lens._patching.sweep import _Body
from inspect_lens._vllm.http import bodies
from inspect_lens._vllm.http.bodies import TOKENS_PATH, LensBodies
from inspect_lens._vllm.http.payloads import PayloadStore
from inspect_lens._vllm.http.server import add_routes
from inspect_lens._vllm.registered.persistent_hooks import HookBook
from inspect_lens.errors import UnsupportedError
from inspect_lens.spec import (
    EDITS,
    EditBase,
    EngineAutoencoder,
    EngineConfig,
    EngineEdits,
    EngineLens,
    EngineProbe,
    Hook,
    LensRequest,
    ServerConfig,
    Zero,
)
from inspect_lens.spec._values import MOST_OF, TENSORS
from tests.kit.costs import cost
from tests.kit.facts import engine_facts
from tests.kit.promises import Promise

WIDTH = 4
AT_ONCE_S = 0.5
FACTS = engine_facts(hidden=WIDTH, bank_rows=4096)
REGISTRY = "/v1/inspect_lens/registry"
SWEEP = "/v1/inspect_lens/patch_sweep"
SERVER = "/v1/inspect_lens/server"
KEY = "the-operator"
ROOTS: dict[str, dict[str, type[BaseModel]]] = {
    REGISTRY: {
        "probe": EngineProbe,
        "edits": EngineEdits,
        "lens": EngineLens,
        "sae": EngineAutoencoder,
        "config": EngineConfig,
    },
    SERVER: {"": ServerConfig},
    SWEEP: {"": _Body},
    "/v1/hooks/register": {"hooks": Hook},
}
"""What bodies of our own routes hold; those of vLLM's hold a `LensRequest`."""


METHODS = {SERVER: "PUT"}
"""Of routes; POST of others."""


@pytest.fixture(autouse=True)
def admin_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INSPECT_LENS_ADMIN_KEY", KEY)


@pytest.fixture(autouse=True, scope="module")
def imported() -> None:
    """A server has imported all of vLLM before its first body; `AT_ONCE_S` is of bodies alone."""
    for route in bodies._SERVED:
        answer(f"POST {route}", "", LensRequest, {"capture": 5})


def client() -> TestClient:
    return TestClient(APP, headers={"Authorization": f"Bearer {KEY}"})


class Accepting:
    """A front-end and an engine that take whatever was judged to be right."""

    facts = FACTS
    engines: tuple[Any, ...] = ()
    registry = SimpleNamespace(describe=dict, has_left=False)
    inspect_lens_book = HookBook(FACTS, most_bytes=1 << 20)

    @property
    def input_processor(self) -> Any:
        return self

    def check(self, *args: Any, **options: Any) -> None:
        raise UnsupportedError("accepted")

    compile = register = unregister = check

    def describe(self) -> dict[str, Any]:
        return {}

    describe_server = describe

    async def collective_rpc(self, *args: Any, **options: Any) -> list[Any]:
        raise UnsupportedError("accepted")


def _app() -> FastAPI:
    app = FastAPI()
    app.state.engine_client = Accepting()
    add_routes(app, Accepting, PayloadStore())
    return app


APP = _app()
OWN = {
    f"{method} {route.path}"
    for route in APP.routes
    for method in getattr(route, "methods", None) or ()
    if route.path.startswith(("/v1/inspect_lens", "/v1/hooks", "/v1/activations"))
}


def _kinds(annotation: Any) -> Iterator[Any]:
    yield typing.get_origin(annotation) or annotation
    for inner in typing.get_args(annotation):
        if not isinstance(inner, str | int | float | type(...)):
            yield from _kinds(inner)


def models(root: type[BaseModel]) -> dict[str, type[BaseModel]]:
    """A model and all below it, by name."""
    found: dict[str, type[BaseModel]] = {}
    waiting: list[type[BaseModel]] = [root]
    while waiting:
        model = waiting.pop()
        if model.__name__ in found:
            continue
        found[model.__name__] = model
        for field in model.model_fields.values():
            waiting += [
                kind
                for kind in _kinds(field.annotation)
                if isinstance(kind, type) and issubclass(kind, BaseModel)
            ]
    return found


EDIT_NAMES = {model.__name__ for model in EDITS.values()}
INSIDE: dict[str, Any] = {
    "LensRequest": lambda part: part,
    "CaptureSpec": lambda part: {"capture": part},
    "TokenMatch": lambda part: {"capture": {"positions": part}},
    "EditsUse": lambda part: {"edits_named": [part]},
    "ProbeUse": lambda part: {"probes": [part]},
    "Hook": lambda part: {"hooks": [part]},
    "QKSpec": lambda part: {"qk": part},
    "LogitLens": lambda part: {"lens": part},
    "SinkUse": lambda part: {"sink": part},
    "Gate": lambda part: {"edits": [{"op": "zero", "layers": [1], "when": part}]},
    "Rule": lambda part: {"edits": [{"op": "zero", "layers": [1], "when": {"all": [part]}}]},
    "Schedule": lambda part: {
        "edits": [{"op": "zero", "layers": [1], "positions": "completion", "schedule": part}]
    },
}
"""Where in a request a model stands."""
ROW = [1.0] + [0.0] * (WIDTH - 1)
RIGHT: dict[str, dict[str, Any]] = {
    "EditsUse": {"name": "e"},
    "ProbeUse": {"name": "p"},
    "SinkUse": {"name": "s"},
    "Hook": {"fn": {"cloudpickle": "gAROLg=="}, "layer_indices": [1]},
    "Gate": {"direction": ROW, "layer": 1},
    "Rule": {"any": [{"direction": ROW, "layer": 1}]},
    "Schedule": {"half_life": 2.0},
    "EngineProbe": {"layers": [1], "tensors": {"weight": [ROW]}},
    "EngineLens": {
        "kind": "jacobian",
        "n_layers": 4,
        "layers": [1],
        "tensors": {"matrix": [[ROW] * 4]},
    },
    "EngineAutoencoder": {
        "kind": "relu",
        "tensors": {"encoder": [ROW], "bias": [0.0], "decoder": [ROW], "decoder_bias": ROW},
    },
    "EngineEdits": {"edits": [{"op": "zero", "layers": [1]}]},
    "EngineConfig": {"edits": [{"op": "zero", "layers": [1]}]},
    "ServerConfig": {"edits": [{"op": "zero", "layers": [1]}]},
    "TokenMatch": {"pattern": "a"},
    "_Body": {"clean": [1, 2], "corrupted": [1, 3], "answer": 5},
}
"""Fields that a model needs."""


OTHER = ROW[::-1]
RIGHT_EDITS: dict[str, dict[str, Any]] = {
    "Clamp": {"max": 1.0},
    "Insert": {"instead_of": OTHER},
    "Latents": {"value": [1.0]},
    "Rotate": {"degrees": 10, "plane": [ROW, OTHER]},
    "Scale": {"factor": 0.5},
    "Splice": {"sae": "a"},
    "Swap": {"second": OTHER},
}


def right(model: type[BaseModel]) -> dict[str, Any]:
    """A part of a request, so far right that it is read to the end."""
    if model.__name__ not in EDIT_NAMES:
        return dict(RIGHT.get(model.__name__, {}))
    made: dict[str, Any] = {"op": model.model_fields["op"].default, "layers": [1]}
    made |= RIGHT_EDITS.get(model.__name__, {})
    for name, axes in getattr(model, "tensor_fields", {}).items():
        if model.model_fields[name].is_required() and name not in made:
            made[name] = [ROW] if axes == 2 else ROW
    return made


def lists(model: type[BaseModel]) -> set[str]:
    """Fields of a model that hold lists or mappings."""
    return {
        name
        for name, field in model.model_fields.items()
        if {list, tuple, dict} & {k for k in _kinds(field.annotation) if isinstance(k, type)}
    }


def _surfaces() -> Iterator[tuple[str, str, type[BaseModel], str]]:
    for route in bodies._SERVED:
        # All have one reader; parts of a request are sent to one of them.
        every = models(LensRequest) if route == bodies._SERVED[0] else {"": LensRequest}
        for model in every.values():
            for name in model.model_fields:
                # What all edits have is one class's.
                if model is Zero or not (
                    issubclass(model, EditBase) and name in EditBase.model_fields
                ):
                    yield f"POST {route}", "", model, name
    for route, roots in ROOTS.items():
        for key, root in roots.items():
            for name in root.model_fields:
                yield f"{METHODS.get(route, 'POST')} {route}", key, root, name


SURFACES = {
    f"{route} {key}{'.' if key else ''}{model.__name__}.{name}": (route, key, model, name)
    for route, key, model, name in _surfaces()
}
NAMED_IN_PATH = {"DELETE /v1/inspect_lens/registry/{name}", "GET /v1/activations/{handle}"}
WITHOUT_FIELDS = {
    "GET /v1/inspect_lens",
    "GET /v1/inspect_lens/registry",
    f"GET {SERVER}",
    f"DELETE {SERVER}",
    "POST /v1/hooks/collect",
    "POST /v1/hooks/clear",
    "POST /v1/hooks/clear_results",
    "POST /v1/hooks/clear_prefetched",
}
NAMES = {"POST /v1/hooks/prefetch"}
WHOLE = {f"{METHODS.get(route, 'POST')} {route}" for route in ROOTS}
PROMISE = Promise(
    "a body that cannot be served is a 400 that names the field, at once",
    surfaces={*SURFACES, *OWN},
)

ELSEWHERE = ("accepted", "the body cannot be read:", "INSPECT_LENS_ALLOW_CODE")
"""Of what was judged to be right, or is no JSON."""
NAMED_OTHERWISE = {
    "Hook.fn",
    "Insert.concept",
    "Latents.encoder",
    "Swap.first",
    "EngineLens.n_layers",
}
"""Two fields that do not fit together, and names of vllm-lens."""
MANY = 1 << 14
DEEP: list[Any] = []
for _ in range(60):
    DEEP = [DEEP]
WRONG: list[Any] = [
    {"a": 1}, [{}], [[]], [None], -5, 10**400, 1e308, "x" * 100_000, "\ud800", True, None, DEEP,
    [1] * MANY, [{}] * MANY, {str(i): 1 for i in range(MANY)}, ["a"] * 5000,
]  # fmt: skip


def post(path: str, text: str) -> tuple[int, str]:
    """Status and message of our middleware's answer; 200 where vLLM would get the body."""
    waiting = [{"type": "http.request", "body": text.encode()}]
    sent: list[Any] = []

    async def receive() -> Any:
        return waiting.pop()

    async def send(message: Any) -> None:
        sent.append(message)

    async def taken(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200})
        await send({"type": "http.response.body", "body": b"{}"})

    app = LensBodies(taken, front_end=lambda: SimpleNamespace(facts=FACTS))
    scope = {"type": "http", "method": "POST", "path": path, "headers": []}
    asyncio.run(app(scope, receive, send))
    status = int(sent[0]["status"])
    return status, "" if status == 200 else json.loads(sent[1]["body"])["error"]["message"]


def answer(route: str, key: str, model: type[BaseModel], part: Any) -> tuple[int, str]:
    method, _, path = route.partition(" ")
    if path not in ROOTS:
        where = INSIDE.get(model.__name__)
        if model.__name__ in EDIT_NAMES:
            where = lambda edit: {"edits": [edit]}  # noqa: E731
        assert where is not None, f"{model.__name__}: nobody says where in a request it stands"
        lens = {"inspect_lens": where(part)}
        wrapped: Any = {"prompt": "a", **lens}
        if path == TOKENS_PATH:
            wrapped = {"token_ids": [1], "sampling_params": {"extra_args": lens}}
        return post(path, json.dumps(wrapped))
    body = {"name": "n", key: [part] if key == "hooks" else part} if key else part
    if key == "hooks":
        del body["name"]
    found = client().request(method, path, content=json.dumps(body))
    return found.status_code, found.json()["error"]["message"]


@PROMISE.on(*SURFACES)
def _(surface: str, request: pytest.FixtureRequest) -> None:
    route, key, model, name = SURFACES[surface]
    n_refused = 0
    for value in WRONG:
        part = right(model) | {name: value}
        with cost() as found:
            status, message = answer(route, key, model, part)
        case = f"{surface}={str(value)[:50]}: {status} {message[:300]}"
        assert found.is_at_most(AT_ONCE_S), f"{case} after {found.seconds:.2f} s"
        assert status in (200, 400), case
        assert len(message) < 5000, case
        if status != 400 or any(words in message for words in ELSEWHERE):
            continue
        n_refused += 1
        assert name in message or f"{model.__name__}.{name}" in NAMED_OTHERWISE, case
    assert n_refused >= 3, "it is judged"


@PROMISE.on(*WHOLE)
def _(surface: str, request: pytest.FixtureRequest) -> None:
    """What is no body at all, or is one of far too much."""
    method, _, route = surface.partition(" ")
    large = "[" + "1," * (1 << 20)
    for text in ("", "[", "[]", "7", '"x"', "{}", "nul", '{"a":' * 5000, large, "\udcff"):
        with cost() as took:
            content = text.encode("utf-8", "surrogateescape")
            found = client().request(method, route, content=content)
        assert took.is_at_most(AT_ONCE_S)
        assert found.status_code == 400, text[:50]
        assert found.json()["error"]["message"]


@PROMISE.on(*NAMES)
def _(surface: str, request: pytest.FixtureRequest) -> None:
    for value in (None, "x", [1], [[]], ["a"] * 5000, {"a": 1}):
        found = TestClient(APP).post(surface.removeprefix("POST "), json={"params": value})
        assert found.status_code == 400
        assert "params" in found.json()["error"]["message"]


@PROMISE.on(*WITHOUT_FIELDS)
def _(surface: str, request: pytest.FixtureRequest) -> None:
    method, _, path = surface.partition(" ")
    assert client().request(method, path).status_code in (200, 400)


@PROMISE.on(*NAMED_IN_PATH)
def _(surface: str, request: pytest.FixtureRequest) -> None:
    method, _, path = surface.partition(" ")
    for name in ("%00", "a" * 5000, "..%2f..", "%F0%9F", "é"):
        found = TestClient(APP).request(method, path.partition("{")[0] + name)
        assert found.status_code in (400, 404, 405, 410), name
        assert len(found.text) < 6000


test_promise = PROMISE.test()

LISTS = {
    name
    for root in (LensRequest, EngineProbe, EngineEdits, EngineLens, ServerConfig, _Body)
    for model in models(root).values()
    for name in lists(model)
}


@pytest.mark.parametrize("name", sorted(LISTS))
def test_every_list_of_a_request_has_a_limit(name: str) -> None:
    """Found in the models, so that a new one fails until it stands in the table."""
    assert name in MOST_OF or name in TENSORS
