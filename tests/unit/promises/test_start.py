"""vLLM starts, whatever of ours is refused or goes wrong, and requests for the lens hear why.

Surfaces are what our code calls while an engine starts, read from its source: each of these names
raises once, in the place where vLLM would hear of it.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("vllm")

from inspect_lens._settings import Settings, variable
from inspect_lens._vllm import engine_core as scheduling
from inspect_lens._vllm import plugin
from inspect_lens._vllm.compat import features
from inspect_lens._vllm.compat.features import off
from inspect_lens._vllm.frontend import state
from inspect_lens._vllm.http import server
from inspect_lens._vllm.worker import worker as worker_module
from inspect_lens._vllm.worker.worker import refusal_here
from inspect_lens.errors import LensError, UnsupportedError
from tests.kit.promises import Promise
from tests.unit.vllm.compat.test_facts import config

HIDDEN = 8


def called(function: Any, module: Any) -> list[str]:
    """Names of a module that a function of it calls."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    names = {node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call)
             if isinstance(node.func, ast.Name)}  # fmt: skip
    return sorted(name for name in names if name in vars(module))


def imported(function: Any) -> dict[str, str]:
    """Module of each name that a function of the plug-in imports and calls."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    names = {node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call)
             if isinstance(node.func, ast.Name)}  # fmt: skip
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    return {a.name: f"inspect_lens._vllm.{n.module}" for n in nodes for a in n.names
            if a.name in names}  # fmt: skip


def wrong_settings() -> list[str]:
    typed = [f for f in Settings.__dataclass_fields__.values() if not isinstance(f.default, str)]
    own = ("disable", "required", "parent")  # a switch each, read by itself
    found = [f"{variable(f.name)}=nonsense" for f in typed if f.name not in own]
    return [
        *found,
        "INSPECT_LENS_LAYERZ=1",
        "INSPECT_LENS_LAYERS=99",
        "INSPECT_LENS_SITES=nowhere",
        "INSPECT_LENS_REGISTER=p=/nowhere",
        "INSPECT_LENS_SINKS={",
        "INSPECT_LENS_DISABLE=no",
    ]


_HARMLESS = {
    # Errors, and what the boundary itself is made of.
    *("Settings", "Start", "CompatError", "UnsupportedError", "SpecError", "off", "reason_of"),
    *(
        "turn_off",
        "turn_off_engine",
        "when_off",
        "ref",
        "is_off",
        "is_required",
        "TypeError",
        "ValueError",
    ),
    # What only engines come to that have queries, lenses, or the other runner.
    *("attention_facts", "check_engine_lens", "EngineLens", "_know", "start_reference"),
    # In a handler that runs later, or with a boundary of its own.
    *("install_when_serving",),
}


def surfaces() -> dict[str, tuple[str, str]]:
    """By surface: the process, and the name that raises there."""
    front = state.FrontEnd
    places = {
        "worker": called(worker_module._install, worker_module),
        "front-end": [
            *called(front.learn, state),
            *called(front._share, state),
            *called(front._learn, state),
        ],
        "engine core": [*called(scheduling._guard, scheduling), "refusal"],
        "api server": [n for n in called(server._routers, server) if n.startswith("add_")],
        "plug-in": sorted(imported(plugin._install)),
        "pass": ["determine_available_memory", "compiled", "check_taps"],
        "setting": wrong_settings(),
    }
    return {
        f"{where}: {name}": (where, name)
        for where, names in places.items()
        for name in names
        if name not in _HARMLESS
    }


SURFACES = surfaces()
PROMISE = Promise(
    "vLLM starts without the lens, and requests hear the reason", surfaces=[*SURFACES]
)


def of(*places: str) -> list[str]:
    return [surface for surface, (where, _) in SURFACES.items() if where in places]


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in Settings.__dataclass_fields__:
        monkeypatch.delenv(variable(name), raising=False)
    monkeypatch.setattr(features._Off, "reasons", {})
    monkeypatch.setattr(state._Holder, "front_end", None)


class Attention(nn.Module):
    """Passes for vLLM's."""


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.self_attn = Attention()
        self.linear = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.linear(hidden_states)


class Runner:
    """As much of the V1 model runner as the lens wraps."""

    is_compiled = False

    def __init__(self, engine: Any) -> None:
        self.vllm_config = engine
        self.device = torch.device("cuda")
        self.input_ids = SimpleNamespace(gpu=torch.zeros(16, dtype=torch.int32))
        self.model = nn.ModuleDict({"layers": nn.ModuleList(Layer() for _ in range(4))})
        self.model.requires_grad_(requires_grad=False)
        self._update_states = self._prepare_inputs = self._model_forward = lambda *a, **k: None
        self.execute_model = lambda *a, **k: None

    def get_model(self) -> nn.Module:
        return self.model

    def _dummy_run(self, num_tokens: int, **options: Any) -> None:
        run = torch.compile(self.forward, backend="eager") if self.is_compiled else self.forward
        run(torch.ones(num_tokens, HIDDEN))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        for layer in self.model["layers"]:
            rows = layer(rows)
        return rows


class Worker:
    device = torch.device("cpu")

    def __init__(self, engine: Any) -> None:
        self.vllm_config = engine
        self.model_runner = Runner(engine)
        self.passes: list[str] = []

    def load_model(self) -> str:
        return "loaded"

    def determine_available_memory(self) -> int:
        self.passes.append("determine_available_memory")
        self.model_runner._dummy_run(2)
        return 5

    def compile_or_warm_up_model(self) -> float:
        self.passes.append("compile_or_warm_up_model")
        self.model_runner._dummy_run(2)
        return 0.5

    @property
    def hooks(self) -> int:
        modules = self.model_runner.model.modules()
        return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in modules)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Any:
    # Classes that are made of the real one have to be there before another stands for it.
    import vllm.model_executor.layers.attention
    import vllm.model_executor.models.utils
    import vllm.v1.worker.gpu_model_runner  # noqa: F401
    from vllm.model_executor.layers import attention_layer_base

    monkeypatch.setattr(attention_layer_base, "AttentionLayerBase", Attention)
    for name in ("tp_rank", "tp_size"):
        monkeypatch.setattr(worker_module, name, lambda n=int(name == "tp_size"): n)
    monkeypatch.setattr(worker_module, "stages_here", lambda most_rows: None)
    monkeypatch.setattr(worker_module, "attach_hooks", lambda *args: None)
    return configured()


def configured() -> Any:
    made = config(model_config__dtype=torch.float32)
    made.additional_config, made.compilation_config.mode = {}, None
    made.compilation_config.cudagraph_mode = SimpleNamespace(name="NONE")
    made.compilation_config.cudagraph_capture_sizes = []
    return made


def loaded(engine: Any) -> Worker:
    worker = Worker(engine)
    load = worker_module.wrap_load_model(Worker.load_model)
    assert load(worker) == "loaded"
    assert worker.determine_available_memory() == 5
    assert worker.compile_or_warm_up_model() == 0.5
    return worker


def planted(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError("planted")


def is_off(worker: Worker, reason: str) -> None:
    assert reason in (refusal_here(worker) or "")
    assert worker.hooks == 0
    assert worker.model_runner.inspect_lens is None
    assert worker.vllm_config.additional_config == {}


def test_the_worker_of_these_tests_has_the_lens_where_nothing_goes_wrong(engine: Any) -> None:
    worker = loaded(engine)
    assert off(engine) is None
    assert worker.hooks == 8 - 3, "a tap behind each block, and one before the first"
    assert worker.model_runner.inspect_lens is not None
    worker.model_runner.inspect_lens.close()


@PROMISE.on(*of("worker"))
def _(surface: str, request: pytest.FixtureRequest) -> None:
    engine, monkeypatch = request.getfixturevalue("engine"), request.getfixturevalue("monkeypatch")
    name = SURFACES[surface][1]
    monkeypatch.setattr(worker_module, name, planted)
    is_off(loaded(engine), "planted")
    monkeypatch.setenv("INSPECT_LENS_REQUIRED", "1")
    with pytest.raises(RuntimeError, match="planted"):
        loaded(configured())


@PROMISE.on(*of("pass"))
def _(surface: str, request: pytest.FixtureRequest) -> None:
    engine, monkeypatch = request.getfixturevalue("engine"), request.getfixturevalue("monkeypatch")
    name = SURFACES[surface][1]
    if name == "check_taps":
        monkeypatch.setattr(worker_module, name, planted)
    else:
        # A tap that raises where the model is run, or traced by the compiler, for the first time.
        monkeypatch.setattr(worker_module, "tap", planted)
        monkeypatch.setattr(Runner, "is_compiled", name == "compiled")
    is_off(worker := loaded(engine), "planted")
    assert worker.passes.count("determine_available_memory") == (1 if name == "check_taps" else 2)


@PROMISE.on(*of("front-end"))
def _(surface: str, request: pytest.FixtureRequest) -> None:
    monkeypatch, name = request.getfixturevalue("monkeypatch"), SURFACES[surface][1]
    engine = config()
    if name in ("SharedNames", "folder_of_siblings"):
        engine.parallel_config._api_process_count = 2
    if name == "HookBook":
        monkeypatch.setenv("INSPECT_LENS_ALLOW_CODE", "1")
    monkeypatch.setattr(state, name, planted)
    check_front_end(engine, "planted")


def check_front_end(engine: Any, reason: str) -> None:
    """The engine of this front-end starts, serves plain requests, and refuses others by reason."""
    from inspect_lens._vllm.frontend.wrappers import _input_processor_init

    class Processor:
        def __init__(self, vllm_config: Any) -> None:
            self.model_config = vllm_config.model_config

    _input_processor_init(Processor.__init__)(processor := Processor.__new__(Processor), engine)
    from inspect_lens._vllm.frontend.admission import compiled_of

    assert compiled_of(processor, SimpleNamespace(extra_args={"kv_hint": 1})) is None
    asking = SimpleNamespace(extra_args={"output_residual_stream": [1]})
    with pytest.raises(LensError) as error:
        compiled_of(processor, asking)
    assert reason in str(error.value)


@PROMISE.on(*of("engine core"))
def _(surface: str, request: pytest.FixtureRequest) -> None:
    monkeypatch, name = request.getfixturevalue("monkeypatch"), SURFACES[surface][1]
    monkeypatch.setattr(scheduling, "behaviours_of", lambda *args: {"a": "blocks"})
    monkeypatch.setattr(scheduling, "loads_again", lambda *args: False)
    monkeypatch.setattr(scheduling, name, planted)
    scheduler, engine = SimpleNamespace(connector=object()), config()
    scheduling._scheduler_init(lambda self, vllm_config: None)(scheduler, engine)
    assert "planted" in (off(engine) or "")


@PROMISE.on(*of("api server"))
def _(surface: str, request: pytest.FixtureRequest) -> None:
    monkeypatch, name = request.getfixturevalue("monkeypatch"), SURFACES[surface][1]
    monkeypatch.setattr(server, name, planted)
    apps: list[Any] = []
    app = SimpleNamespace(
        get=lambda path, **options: lambda route: route,
        post=lambda path, **options: lambda route: route,
        delete=lambda path, **options: lambda route: route,
        add_middleware=lambda *args, **options: None,
    )
    server._routers((), apps.append)(app)
    assert apps == [app]
    assert "planted" in (features.is_off("http") or "")


@PROMISE.on(*of("plug-in"))
def _(surface: str, request: pytest.FixtureRequest) -> None:
    monkeypatch, name = request.getfixturevalue("monkeypatch"), SURFACES[surface][1]
    monkeypatch.setattr(f"{imported(plugin._install)[name]}.{name}", planted)
    monkeypatch.setattr("inspect_lens._vllm.frontend.admission.wrap", lambda *args: None)
    plugin.register()
    assert "planted" in (features.is_off("lens") or "")
    monkeypatch.setenv("INSPECT_LENS_REQUIRED", "1")
    with pytest.raises(RuntimeError, match="planted"):
        plugin.register()


@PROMISE.on(*of("setting"))
def _(surface: str, request: pytest.FixtureRequest) -> None:
    engine, monkeypatch = request.getfixturevalue("engine"), request.getfixturevalue("monkeypatch")
    name, _, value = SURFACES[surface][1].partition("=")
    monkeypatch.setenv(name, value)
    if name != "INSPECT_LENS_SINKS":  # read by front-ends alone
        is_off(loaded(engine), name)
    check_front_end(config(), name)
    plugin.register()
    assert features.is_off("lens") is None, "each engine hears it"


test_promise = PROMISE.test()


def test_a_front_end_hears_of_its_workers_before_the_first_request() -> None:
    front, engine = state.front_end(), config()
    processor = type("Processor", (), {})()
    front.learn(processor, engine)
    assert processor.inspect_lens_facts is not None
    client = SimpleNamespace(vllm_config=engine)
    calls: list[str] = []

    def utility(answer: Any) -> Callable[..., Any]:
        def call(self: Any, method: str, *args: Any, **kwargs: Any) -> Any:
            calls.append(method)
            if method == "collective_rpc" and isinstance(answer, Exception):
                raise answer
            return answer if method == "collective_rpc" else ("generate",)

        return functools.partial(state._call_utility(call), client)

    assert utility([None, None])("get_supported_tasks") == ("generate",)
    assert calls == ["get_supported_tasks", "collective_rpc"]
    assert front.facts is not None
    assert utility([None, "no layers"])("get_supported_tasks") == ("generate",)
    assert front.engines == ["no layers"]
    assert processor.inspect_lens_facts is None
    assert processor.inspect_lens_refusal == "no layers"
    other = config()
    front.learn(type("Processor", (), {})(), other)
    client.vllm_config = other
    utility(Exception("no such method"))("get_supported_tasks")
    assert "without inspect-lens" in (off(other) or "")


def test_who_wants_the_stop_gets_it_for_an_engine_that_is_refused(
    monkeypatch: pytest.MonkeyPatch, engine: Any
) -> None:
    monkeypatch.setenv("INSPECT_LENS_REQUIRED", "1")
    engine.model_config.runner_type = "pooling"
    with pytest.raises(UnsupportedError, match="does not generate text"):
        loaded(engine)
