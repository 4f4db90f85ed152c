"""Every private name of vLLM that inspect_lens replaces, in one table, and how it is replaced.

`verify` checks all of it first, and refuses a vLLM that lacks a name; `wrap` replaces one, once.
Another plug-in that takes the same request keys is refused, too: what both would serve, neither
does right.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any, Literal

from inspect_lens.errors import CompatError

Process = Literal["front-end", "engine", "worker", "api-server"]
_SCHED = "vllm.v1.core.sched.scheduler:Scheduler"
_MANY = "from here on it may feed many tokens in a step"


@dataclass(frozen=True)
class Monkeypatch:
    """One name of vLLM that is wrapped."""

    name: str
    """How the code here calls it."""
    target: str
    """`module:Class.method`."""
    parameters: tuple[str, ...]
    """Leading parameters that the wrapper relies on."""
    process: Process
    reason: str
    """Why it is needed, and so when it may go."""
    keywords: tuple[str, ...] = ()
    """Further parameters, anywhere, that the wrapper sets."""
    copies: tuple[str, ...] = ()
    """Modules that import the target by its name, and so would keep the original."""


PATCHES: tuple[Monkeypatch, ...] = (
    Monkeypatch(
        "load_model",
        "vllm.v1.worker.gpu_worker:Worker.load_model",
        ("self",),
        "worker",
        "taps must be in the model when the profile run traces it; inherited by CPU workers",
    ),
    Monkeypatch(
        "scheduler_init",
        f"{_SCHED}.__init__",
        ("self", "vllm_config"),
        "engine",
        "a KV connector brings no tokens whose rows are wanted, and no blocks of other steering; "
        "an engine ends with the process that started it",
    ),
    Monkeypatch(
        "schedule", f"{_SCHED}.schedule", ("self",), "engine", "rows of a step fit the buffer"
    ),
    Monkeypatch("scheduler_add", f"{_SCHED}.add_request", ("self", "request"), "engine", _MANY),
    Monkeypatch(
        "scheduler_preempt", f"{_SCHED}._preempt_request", ("self", "request"), "engine", _MANY
    ),
    Monkeypatch(
        "collective_rpc",
        "vllm.v1.engine.core:EngineCore.collective_rpc",
        ("self", "method", "timeout", "args"),
        "engine",
        "parameters that were prefetched for hooks go with the weights",
    ),
    Monkeypatch(
        "cached_blocks",
        "vllm.v1.core.kv_cache_manager:KVCacheManager.get_computed_blocks",
        ("self", "request"),
        "engine",
        "a captured prompt reads the prefix cache as far as its rows are known from before",
    ),
    Monkeypatch(
        "block_keys",
        "vllm.v1.core.kv_cache_utils:generate_block_hash_extra_keys",
        ("request", "start_token_idx", "end_token_idx", "start_mm_idx"),
        "engine",
        "steering has blocks of its own from the first edited token on, and not before",
        copies=("vllm.v1.core.block_pool", "vllm.v1.simple_kv_offload.manager"),
    ),
    Monkeypatch(
        "input_processor_init",
        "vllm.v1.engine.input_processor:InputProcessor.__init__",
        ("self", "vllm_config"),
        "front-end",
        "the one place where every front-end learns its engine's configuration",
    ),
    Monkeypatch(
        "process_inputs",
        "vllm.v1.engine.input_processor:InputProcessor.process_inputs",
        ("self", "request_id", "prompt", "params"),
        "front-end",
        "knows the prompt's length; sets the cache salt and the reply address",
    ),
    Monkeypatch(
        "add_request",
        "vllm.v1.engine.output_processor:OutputProcessor.add_request",
        ("self", "request", "prompt", "parent_req", "request_index", "queue"),
        "front-end",
        "the internal id of each choice, before the engine can answer",
    ),
    Monkeypatch(
        "abort_requests",
        "vllm.v1.engine.output_processor:OutputProcessor.abort_requests",
        ("self", "request_ids", "internal"),
        "front-end",
        "an aborted request takes no results",
    ),
    Monkeypatch(
        "new_completion_output",
        "vllm.v1.engine.output_processor:RequestState._new_completion_output",
        ("self", "token_ids", "finish_reason", "stop_reason"),
        "front-end",
        "ties a choice to its internal id and its number of sampled tokens",
    ),
    Monkeypatch(
        "output_add",
        "vllm.outputs:RequestOutput.add",
        ("self", "next_output", "aggregate"),
        "front-end",
        "vLLM merges outputs that a slow reader has not taken; the ticket must not be lost",
    ),
    Monkeypatch(
        "engine_step",
        "vllm.v1.engine.llm_engine:LLMEngine.step",
        ("self",),
        "front-end",
        "offline results",
    ),
    Monkeypatch(
        "engine_add_request",
        "vllm.v1.engine.llm_engine:LLMEngine.add_request",
        ("self", "request_id", "prompt", "params"),
        "front-end",
        "forgets a request that fails on its way to the engine, for which others would wait",
    ),
    Monkeypatch(
        "beam_search",
        "vllm.entrypoints.llm:LLM.beam_search",
        ("self", "prompts", "params"),
        "front-end",
        "refuses beams where something acts on all requests: each token is a request of its own",
    ),
    Monkeypatch(
        "run_engine",
        "vllm.entrypoints.llm:LLM._run_engine",
        ("self",),
        "front-end",
        "raises a failed request's error once the batch is done, so that no request is left",
    ),
    Monkeypatch(
        "call_utility",
        "vllm.v1.engine.core_client:SyncMPClient.call_utility",
        ("self", "method"),
        "front-end",
        "rows kept beside the prefix cache go with it",
    ),
    Monkeypatch(
        "call_utility_async",
        "vllm.v1.engine.core_client:AsyncMPClient._call_utility_async",
        ("self", "method"),
        "front-end",
        "rows kept beside the prefix cache go with it",
    ),
    Monkeypatch(
        "async_generate",
        "vllm.v1.engine.async_llm:AsyncLLM.generate",
        ("self", "prompt", "sampling_params", "request_id"),
        "front-end",
        "online results",
    ),
)

_OPENAI = "vllm.entrypoints.openai"
_SPEECH = "vllm.entrypoints.speech_to_text"
_READING = {
    "chat": f"{_OPENAI}.chat_completion.protocol:ChatCompletionRequest",
    "completion": f"{_OPENAI}.completion.protocol:CompletionRequest",
    "responses": f"{_OPENAI}.responses.protocol:ResponsesRequest",
    "transcription": f"{_SPEECH}.transcription.protocol:TranscriptionRequest",
    "translation": f"{_SPEECH}.translation.protocol:TranslationRequest",
}
_METHODS = {"params": "to_sampling_params", "beam": "to_beam_search_params"}

SERVER_PATCHES: tuple[Monkeypatch, ...] = (
    Monkeypatch(
        "routers",
        "vllm.entrypoints.serve:register_vllm_serve_api_routers",
        ("app",),
        "api-server",
        "adds our routes, and what reads bodies and puts results into answers",
    ),
    *(
        Monkeypatch(
            f"{kind}_{name}",
            f"{target}.{method}",
            ("self",),
            "api-server",
            "refuses lens requests that come by no route that returns results",
        )
        for kind, target in _READING.items()
        for name, method in _METHODS.items()
        if (kind, name) != ("responses", "beam")
    ),
)

EAGER_PATCHES: tuple[Monkeypatch, ...] = (
    Monkeypatch(
        "forward_context",
        "vllm.forward_context:create_forward_context",
        ("attn_metadata", "vllm_config"),
        "worker",
        "a step with hooks calls the model as it was before compilation",
        ("skip_compiled",),
    ),
    Monkeypatch(
        "dispatch_v2",
        "vllm.v1.worker.gpu.model_runner:dispatch_cg_and_sync_dp",
        ("cudagraph_manager", "num_reqs", "num_tokens"),
        "worker",
        "a step with hooks or an autoencoder replays no graph; the V2 runner",
        ("need_eager",),
    ),
    Monkeypatch(
        "dispatch_v1",
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner._determine_batch_execution_and_padding",
        ("self", "num_tokens", "num_reqs"),
        "worker",
        "a step with hooks or an autoencoder replays no graph; the V1 runner",
        ("force_eager",),
    ),
)

_MARK = "__inspect_lens_original__"


@functools.cache
def vllm_version() -> str:
    return str(importlib.import_module("vllm").__version__)


def has_rust_front_end() -> bool:
    """Whether requests come by vLLM's front-end in Rust, which loads no plug-ins."""
    return bool(importlib.import_module("vllm.envs").VLLM_USE_RUST_FRONTEND)


def is_engine_apart() -> bool:
    """Whether engines run in processes of their own, which is vLLM's default."""
    return bool(importlib.import_module("vllm.envs").VLLM_ENABLE_V1_MULTIPROCESSING)


def allowed_plugins() -> list[str] | None:
    """Names of the plug-ins that vLLM loads; None where it loads all."""
    allowed: list[str] | None = importlib.import_module("vllm.envs").VLLM_PLUGINS
    return allowed


def is_in_process(engine: Any) -> bool:
    """Whether an `LLMEngine` steps in its caller's process, and so only when it is told to.

    vLLM gives it the executor then and only then (VLLM_ENABLE_V1_MULTIPROCESSING=0).
    """
    return hasattr(engine, "model_executor")


def monkeypatch(name: str) -> Monkeypatch:
    """Look one up by its name here."""
    for item in PATCHES + SERVER_PATCHES + EAGER_PATCHES:
        if item.name == name:
            return item
    raise KeyError(name)


def resolve(item: Monkeypatch) -> tuple[Any, str, Callable[..., Any]]:
    module, _, path = item.target.partition(":")
    try:
        owner: Any = importlib.import_module(module)
        *parents, attribute = path.split(".")
        for part in parents:
            owner = getattr(owner, part)
        current = getattr(owner, attribute)
    except (ImportError, AttributeError) as error:
        raise CompatError(
            f"vLLM {vllm_version()} has no {item.target} ({error}), which inspect_lens needs: "
            f"{item.reason}. Install a vLLM that docs/reference/compatibility.md lists, or set "
            "INSPECT_LENS_DISABLE=1 to run without the lens"
        ) from error
    return owner, attribute, getattr(current, _MARK, current)


def verify(items: tuple[Monkeypatch, ...]) -> None:
    """Check that every target exists with the parameters that its wrapper relies on."""
    for item in items:
        _, _, original = resolve(item)
        names = tuple(inspect.signature(original).parameters)
        found = names[: len(item.parameters)]
        if found != item.parameters or not set(item.keywords) <= set(names):
            raise CompatError(
                f"vLLM {vllm_version()}: {item.target} takes {names} and inspect_lens knows it "
                f"with {item.parameters + item.keywords}. Install a vLLM that "
                "docs/reference/compatibility.md lists, or set INSPECT_LENS_DISABLE=1 to run "
                "without the lens"
            )


def wrap(item: Monkeypatch, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace a target by `make(original)`, once."""
    owner, attribute, original = resolve(item)
    if hasattr(getattr(owner, attribute), _MARK):
        return
    wrapper = functools.wraps(original)(make(original))
    setattr(wrapper, _MARK, original)
    setattr(owner, attribute, wrapper)
    for name in item.copies:
        if getattr(module := sys.modules.get(name), attribute, None) is original:
            setattr(module, attribute, wrapper)


def add_method(item: Monkeypatch, name: str, function: Callable[..., Any]) -> None:
    """Add a method of ours to the class that holds a target; RPCs find it by name."""
    owner, _, _ = resolve(item)
    setattr(owner, name, function)


class RivalError(CompatError):
    """Another plug-in takes the same keys: to go on would answer requests wrongly."""


def refuse_rivals() -> None:
    """Refuse to run beside vllm-lens.

    vLLM imports all its plug-ins before it calls one, so whichever is called here sees the others.
    """
    # One that could not be imported is not loaded.
    if others := [name for name, module in rivals(allowed_plugins()) if module in sys.modules]:
        names = ",".join(others)
        raise RivalError(
            f"inspect_lens: vLLM also loads vllm-lens (plug-in {names}), which takes the same "
            "request keys and forces eager mode. Choose one: VLLM_PLUGINS=inspect_lens, or "
            f"VLLM_PLUGINS={names} (with what else you load, separated by commas), or uninstall "
            "vllm-lens"
        )


def rivals(allowed: list[str] | None) -> list[tuple[str, str]]:
    """Plug-ins of vllm-lens that vLLM would load."""
    return [
        (plugin.name, plugin.module)
        for plugin in entry_points(group="vllm.general_plugins")
        if plugin.module.partition(".")[0] == "vllm_lens"
        and (allowed is None or plugin.name in allowed)
    ]
