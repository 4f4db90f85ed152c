"""Every name of vLLM that is used without being wrapped, and what is off where one is missing.

With `monkeypatches.py` this is all that we rely on. Names are looked up in vLLM's source, so
that a front-end need not import what only workers do. A name that is missing turns its feature off:
one line in the log, HTTP 400 with the reason for a request that needs it, nothing else.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from inspect_lens._engine.protocol.processes import as_exception, ends_process
from inspect_lens._settings import flag, is_lens_required
from inspect_lens._vllm.telemetry import refused
from inspect_lens.errors import CaptureError, CompatError, LensError, UnsupportedError

from .monkeypatches import EAGER_PATCHES, PATCHES, SERVER_PATCHES, Monkeypatch
from .quantisation import PLAIN, PLAIN_IN_ONE_MODEL

if TYPE_CHECKING:
    from inspect_lens._engine.step.stepper import Stepper

logger = logging.getLogger("vllm.inspect_lens")

Feature = Literal[
    "lens", "http", "hooks", "splice", "qk", "logits", "parameters", "busy", "sweeps", "connectors",
    "traces", "models",
]  # fmt: skip

FEATURES: dict[Feature, str] = {
    "lens": "captures, steering and probes",
    "http": "lens requests over HTTP",
    "hooks": "custom hooks",
    "splice": "whole autoencoders",
    "qk": "queries and keys",
    "logits": "the logit lens",
    "parameters": "parameters of the model for hooks",
    "busy": "HTTP 429 where buffers are full",
    "sweeps": "patch sweeps in a server",
    "connectors": "engines with a KV connector",
    "traces": "spans for OpenTelemetry",
    "models": "configurations as models of a server",
}


@dataclass(frozen=True)
class UsedName:
    """A name of vLLM that is imported, called or read."""

    target: str
    """`module:name`, or `module:Class.name` for a method or a field."""
    feature: Feature
    """What is off without it."""


_LAYERS = "vllm.model_executor.layers"
_USED: tuple[tuple[Feature, str, str], ...] = (
    # Methods of a runner object that `RunnerV1`, `RunnerV2` and the start-up check wrap or call.
    ("lens", "vllm.v1.worker.gpu_model_runner:GPUModelRunner.", "_update_states _prepare_inputs "
     "_model_forward execute_model _dummy_run get_model intermediate_tensors input_ids kv_caches "
     "input_batch kv_cache_config _bookkeeping_sync discard_request_mask vllm_config"),
    ("lens", "vllm.v1.worker.gpu.model_runner:GPUModelRunner.", "execute_model _dummy_run "
     "get_model model_state intermediate_tensors input_buffers kv_caches cudagraph_manager "
     "kv_cache_config vllm_config"),
    ("lens", "vllm.v1.worker.gpu.model_states.interface:ModelState.", "add_request remove_request "
     "preprocess_state prepare_inputs"),
    ("lens", "vllm.v1.worker.gpu.cudagraph_utils:", "ModelCudaGraphManager.run_fullgraph "
     "ModelCudaGraphManager.run_pw_graph BatchExecutionDescriptor.cg_mode"),
    ("lens", "vllm.v1.worker.gpu_worker:Worker.", "compile_or_warm_up_model "
     "determine_available_memory model_runner vllm_config device"),
    ("lens", "vllm.v1.utils:", "CpuGpuBuffer.gpu CpuGpuBuffer.np"),
    # Fields of a batch, and of a step.
    ("lens", "vllm.v1.worker.gpu_input_batch:InputBatch.", "req_ids num_computed_tokens_cpu "
     "block_table generators"),
    ("lens", "vllm.v1.worker.gpu.input_batch:", "InputBatch.req_ids InputBatch.query_start_loc_np "
     "InputBatch.num_scheduled_tokens InputBatch.num_computed_tokens_np InputBatch.input_ids "
     "InputBatch.is_padding InputBuffers.input_ids"),
    ("lens", "vllm.v1.core.sched.output:", "SchedulerOutput.scheduled_new_reqs "
     "SchedulerOutput.num_scheduled_tokens SchedulerOutput.finished_req_ids "
     "SchedulerOutput.scheduled_spec_decode_tokens NewRequestData.req_id "
     "NewRequestData.sampling_params"),
    ("lens", "vllm.forward_context:", "get_forward_context ForwardContext.cudagraph_runtime_mode "
     "ForwardContext.skip_compiled ForwardContext.is_padding"),
    # Of a request's output.
    ("lens", "vllm.v1.engine.detokenizer:IncrementalDetokenizer.", "update num_output_tokens "
     "get_next_output_text"),
    ("lens", "vllm.v1.engine.detokenizer:BaseIncrementalDetokenizer.", "output_token_ids"),
    ("lens", "vllm.v1.engine.output_processor:", "OutputProcessor.request_states "
     "RequestState.queue RequestState.num_cached_tokens RequestState.detokenizer "
     "RequestState.stream_interval"),
    # Of a request on its way to an engine, and of who sends it.
    ("lens", "vllm.v1.engine:EngineCoreRequest.", "request_id external_req_id sampling_params "
     "prompt_token_ids cache_salt lora_request mm_features"),
    ("lens", "vllm.sampling_params:", "SamplingParams.extra_args SamplingParams.output_kind "
     "SamplingParams.skip_clone SamplingParams.min_tokens SamplingParams.max_tokens "
     "SamplingParams.ignore_eos SamplingParams.stop SamplingParams.stop_token_ids "
     "SamplingParams.stream_interval SamplingParams.prompt_logprobs "
     "SamplingParams.skip_reading_prefix_cache SamplingParams.trace_decode_token_ids "
     "RequestOutputKind.FINAL_ONLY"),
    ("lens", "vllm.lora.request:", "LoRARequest.lora_int_id"),
    ("lens", "vllm.v1.engine.core_client:", "DPLBAsyncMPClient.reqs_in_flight "
     "MPClient.vllm_config"),
    ("lens", "vllm.v1.engine.async_llm:AsyncLLM.", "output_processor abort engine_core "
     "input_processor"),
    ("lens", "vllm.v1.engine.llm_engine:LLMEngine.", "abort_request engine_core input_processor "
     "model_executor"),
    ("lens", "vllm.v1.engine.input_processor:InputProcessor.", "model_config"),
    ("logits", "vllm.v1.engine.input_processor:InputProcessor.", "tokenizer"),
    # Of a scheduler, and of its queues and requests.
    ("lens", "vllm.v1.core.sched.scheduler:Scheduler.", "waiting running connector vllm_config "
     "finished_req_ids max_num_running_reqs max_num_scheduled_tokens"),
    ("lens", "vllm.v1.core.sched.request_queue:", "PriorityRequestQueue._heap "
     "RequestQueue.remove_requests RequestQueue.prepend_requests"),
    ("lens", "vllm.v1.request:Request.", "request_id sampling_params num_tokens is_finished "
     "num_computed_tokens"),
    ("lens", "vllm.v1.core.kv_cache_coordinator:", "KVCacheCoordinator.find_longest_cache_hit"),
    # Of an engine's configuration.
    ("lens", "vllm.config.vllm:VllmConfig.", "model_config parallel_config scheduler_config "
     "cache_config compilation_config device_config speculative_config kv_transfer_config "
     "lora_config additional_config shutdown_timeout"),
    ("lens", "vllm.config.model:ModelConfig.", "model tokenizer dtype quantization hf_config "
     "hf_text_config max_model_len runner_type is_encoder_decoder is_hybrid use_mla "
     "get_hidden_size get_head_size get_num_attention_heads get_total_num_kv_heads"),
    ("lens", "vllm.config.parallel:ParallelConfig.", "nnodes master_addr tensor_parallel_size "
     "pipeline_parallel_size prefill_context_parallel_size distributed_executor_backend enable_dbo "
     "data_parallel_size data_parallel_size_local data_parallel_rank_local data_parallel_backend "
     "data_parallel_external_lb data_parallel_hybrid_lb data_parallel_master_ip "
     "_api_process_count"),
    ("lens", "vllm.config.scheduler:SchedulerConfig.", "max_num_batched_tokens max_num_seqs "
     "async_scheduling enable_chunked_prefill disable_chunked_mm_input scheduler_cls "
     "stream_interval"),
    ("lens", "vllm.config.cache:CacheConfig.", "cache_dtype block_size enable_prefix_caching "
     "kv_sharing_fast_prefill mamba_cache_mode"),
    ("lens", "vllm.config.compilation:", "CompilationConfig.mode "
     "CompilationConfig.cudagraph_mode CompilationConfig.cudagraph_capture_sizes "
     "CompilationMode.NONE CUDAGraphMode.NONE CUDAGraphMode.FULL CUDAGraphMode.PIECEWISE"),
    ("lens", "vllm.config.speculative:", "SpeculativeConfig.num_speculative_tokens"),
    ("lens", "vllm.config.device:", "DeviceConfig.device_type"),
    ("lens", "vllm.config.lora:", "LoRAConfig.max_loras"),
    ("connectors", "vllm.config.kv_transfer:KVTransferConfig.", "kv_connector "
     "kv_connector_module_path kv_connector_extra_config kv_load_failure_policy"),
    ("lens", "vllm.v1.executor.abstract:", "Executor.uses_ray"),
    # Of an API server's engine, which a sweep asks itself.
    ("sweeps", "vllm.sampling_params:", "SamplingParams SamplingParams.logprob_token_ids"),
    # Imports.
    ("lens", "vllm.envs:", "VLLM_PLUGINS VLLM_ENABLE_V1_MULTIPROCESSING VLLM_USE_RUST_FRONTEND "
     "VLLM_HOST_IP"),
    ("lens", "vllm.v1.core.kv_cache_manager:", "KVCacheManager.coordinator"),
    ("lens", "vllm.distributed.communication_op:", "tensor_model_parallel_all_reduce"),
    ("lens", "vllm.distributed.parallel_state:", "get_tp_group get_pp_group "
     "GroupCoordinator.world_size GroupCoordinator.rank_in_group GroupCoordinator.cpu_group "
     "GroupCoordinator.is_first_rank GroupCoordinator.is_last_rank GroupCoordinator.all_gather "
     "GroupCoordinator.broadcast_tensor_dict"),
    ("lens", "vllm.sequence:", "IntermediateTensors.tensors"),
    ("lens", "vllm.model_executor.models.utils:", "PPMissingLayer"),
    ("lens", f"{_LAYERS}.attention_layer_base:", "AttentionLayerBase"),
    ("lens", f"{_LAYERS}.mamba.abstract:", "MambaBase"),
    ("lens", f"{_LAYERS}.mamba.mamba_mixer2:", "MambaMixer2.use_replayssm"),
    ("lens", "vllm.v1.kv_cache_interface:", "MambaSpec KVCacheConfig.kv_cache_groups "
     "KVCacheConfig.num_blocks KVCacheGroupSpec.kv_cache_spec"),
    ("lens", "vllm.v1.worker.block_table:BlockTable.", "block_table commit_block_table clear"),
    ("lens", f"{_LAYERS}.linear:", "LinearBase RowParallelLinear LinearBase.quant_method "
     "LinearBase.output_size RowParallelLinear.reduce_results"),
    ("lens", f"{_LAYERS}.fused_moe.routed_experts:", "RoutedExperts.quant_method"),
    ("lens", "vllm.lora.layers.base_linear:", "BaseLinearLayerWithLoRA.base_layer"),
    ("parameters", f"{_LAYERS}.linear:", "ColumnParallelLinear LinearBase.tp_size "
     "MergedColumnParallelLinear.output_sizes QKVParallelLinear QKVParallelLinear.head_size "
     "QKVParallelLinear.v_head_size QKVParallelLinear.num_heads QKVParallelLinear.num_kv_heads "
     "QKVParallelLinear.num_kv_head_replicas"),
    ("parameters", f"{_LAYERS}.vocab_parallel_embedding:", "VocabParallelEmbedding "
     "VocabParallelEmbedding.shard_indices VocabParallelEmbedding.org_vocab_size "
     "VocabParallelEmbedding.num_added_embeddings "
     "VocabParallelEmbeddingShardIndices.num_org_elements_padded"),
    ("parameters", f"{_LAYERS}.fused_moe.fused_moe_modular_method:",
     "FusedMoEModularMethod.old_quant_method"),
    ("qk", f"{_LAYERS}.attention:", "Attention"),
    ("qk", f"{_LAYERS}.attention.attention:Attention.", "attn_type layer_name head_size "
     "sliding_window use_alibi_sqrt"),
    ("qk", f"{_LAYERS}.attention:", "MLAAttention"),
    ("qk", f"{_LAYERS}.attention.mla_attention:", "MLAAttention.kv_lora_rank"),
    ("qk", f"{_LAYERS}.attention.chunked_local_attention:", "ChunkedLocalAttention "
     "ChunkedLocalAttention.attention_chunk_size"),
    ("qk", "vllm.v1.attention.backend:AttentionImpl.", "scale alibi_slopes logits_soft_cap"),
    ("logits", f"{_LAYERS}.logits_processor:", "LogitsProcessor LogitsProcessor._gather_logits "
     "LogitsProcessor._get_logits LogitsProcessor.org_vocab_size"),
    # Of an API server that lists configurations among its models.
    ("models", "vllm.entrypoints.openai.models.serving:OpenAIServingModels.", "base_model_paths "
     "is_base_model lora_requests"),
    ("models", "vllm.entrypoints.launchers.api_server.app_state:", "openai_serving_models"),
    # Of one whose buffers are full, and of what its errors answer.
    ("busy", "vllm.exceptions:", "GracefulHTTPError"),
    ("http", "vllm.exceptions:", "VLLMClientError"),
    # Of one with keys, and of what it is made of.
    ("http", "vllm.entrypoints.serve.middleware.authenticate:",
     "AuthenticationMiddleware.verify_token"),
    ("http", "vllm.entrypoints.launchers.api_server.app_state:", "engine_client"),
    ("http", "vllm.entrypoints.generate.api_router:", "openai_serving_chat"),
    ("http", "vllm.entrypoints.openai.chat_completion.protocol:",
     "ChatCompletionRequest.vllm_xargs"),
    # Of an engine whose requests vLLM traces.
    ("traces", "vllm.config.vllm:", "VllmConfig.observability_config"),
    ("traces", "vllm.config.observability:", "ObservabilityConfig.otlp_traces_endpoint"),
    # Methods of a connector that the scheduler calls.
    ("connectors", "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1.",
     "on_new_request get_num_new_matched_tokens update_state_after_alloc build_connector_meta "
     "request_finished register_finished_partial_tail"),
    ("connectors", "vllm.distributed.kv_transfer.kv_connector.v1.base:SupportsHMA.",
     "request_finished_all_groups"),
    ("connectors", "vllm.v1.core.sched.output:", "SchedulerOutput.scheduled_cached_reqs "
     "SchedulerOutput.total_num_scheduled_tokens CachedRequestData.req_ids"),
    ("connectors", "vllm.v1.request:", "Request.kv_transfer_params"),
)  # fmt: skip
"""Feature, module (or class), and names in it."""

USED_NAMES: tuple[UsedName, ...] = (
    *(UsedName(place + name, of) for of, place, names in _USED for name in names.split()),
    *(UsedName(target, "parameters") for target in PLAIN),
)

OF_SOME_MODELS: tuple[str, ...] = (
    *PLAIN_IN_ONE_MODEL,
    # Of `fused_norms.py`.
    "vllm.models.common.ops.fused_allreduce_rms_norm:fused_allreduce_rms_norm",
    "vllm.model_executor.layers.fused_allreduce_gemma_rms_norm:fused_allreduce_gemma_rms_norm",
    "vllm.models.minimax_m3.nvidia.model:MiniMaxM3DecoderLayer.ffn_all_reduce_deferred",
    "vllm.models.minimax_m3.nvidia.model:MiniMaxM3DecoderLayer.fuse_input_allreduce",
    "vllm.models.deepseek_v32.nvidia.model:DeepseekV32DecoderLayer.attn_in",
    "vllm.models.deepseek_v32.nvidia.model:DeepseekV32DecoderLayer.use_sequence_parallel",
)
"""Names that a release may lack with the models that they are of; a test finds what has moved."""

_PATCHES: dict[Feature, tuple[Monkeypatch, ...]] = {
    "lens": PATCHES,
    "http": SERVER_PATCHES,
    "hooks": EAGER_PATCHES,
    "splice": EAGER_PATCHES,
}


class _Off:
    reasons: ClassVar[dict[Feature, str]] = {}


def turn_off(feature: Feature, reason: str) -> None:
    """Note that a feature is off in this process, and why."""
    _Off.reasons.setdefault(feature, reason)


def is_off(feature: Feature) -> str | None:
    """Why a feature is off in this process, or None; all are without the lens itself."""
    return _Off.reasons.get("lens") or _Off.reasons.get(feature)


def all_off() -> dict[Feature, str]:
    """Why features are off in this process, by feature; empty where all are served."""
    return dict(_Off.reasons)


def require(feature: Feature) -> None:
    if (reason := is_off(feature)) is not None:
        raise UnsupportedError(f"{FEATURES[feature]}: off in this server: {reason}")


def queued(waiting: Any) -> Iterable[Any]:
    """What is in a queue of vLLM's scheduler, in any order.

    One by priority sorts all of its requests whenever it is iterated, which is too slow for a step.
    """
    return getattr(waiting, "_heap", waiting)  # type: ignore[no-any-return]


def busy(message: str) -> Exception:
    """An error that vLLM answers with HTTP 429: "not now"."""
    from vllm.exceptions import GracefulHTTPError

    error: Exception = GracefulHTTPError(message, HTTPStatus.TOO_MANY_REQUESTS)
    return error


def problems(root: Path | None = None) -> dict[Feature, str]:
    """What of the vLLM that is installed is missing, by the feature that needs it."""
    place = root or _root()
    found: dict[Feature, str] = {}
    if place is None:
        return {"lens": "vLLM is not installed"}
    for feature, patches in _PATCHES.items():
        for item in patches:
            if not has(place, item.target, item.parameters + item.keywords):
                wanted = ", ".join(item.parameters + item.keywords)
                found.setdefault(feature, f"this vLLM has no {item.target}({wanted})")
    for used in USED_NAMES:
        if not has(place, used.target):
            found.setdefault(used.feature, f"this vLLM has no {used.target}")
    if "hooks" in found:
        found.setdefault("parameters", found["hooks"])
    return found


def architectures() -> frozenset[str]:
    """Architectures that the vLLM that is installed has a file for; empty where that is unknown."""
    place = _root()
    text = "" if place is None else _source(place, "vllm.model_executor.models.registry")
    return frozenset(re.findall(r'(?m)^    "(\w+)": \(', text))


def _root() -> Path | None:
    spec = importlib.util.find_spec("vllm")
    return None if spec is None or spec.origin is None else Path(spec.origin).parents[1]


@functools.lru_cache(maxsize=256)
def _source(place: Path, module: str) -> str:
    base = module.replace(".", "/")
    for path in (place / f"{base}.py", place / f"{base}/__init__.py"):
        if path.is_file():
            return path.read_text(encoding="utf-8")
    return ""


def has(place: Path, target: str, parameters: tuple[str, ...] = ()) -> bool:
    """Whether vLLM's source has a name, and a function by that name has parameters."""
    module, _, path = target.partition(":")
    *owner, name = path.split(".")
    text = _source(place, module)
    for cls in owner:
        text = _with_bases(place, module, text, cls)
    known = re.search(
        rf"(?m)^\s*(async def|def|class) {name}\b|\b{name}\b\s*[:=,)]|import .*\b{name}\b", text
    )
    if known is None or not parameters:
        return known is not None
    arguments = re.findall(rf"def {name}\((.*?)\)\s*(?:->|:)", text, re.DOTALL)
    if not arguments:
        # It is imported and wrapped where it is called.
        return re.search(rf"\b{name}\b", text) is not None
    return any(all(re.search(rf"\b{p}\b", one) for p in parameters) for one in arguments)


@functools.lru_cache(maxsize=256)
def _with_bases(place: Path, module: str, text: str, cls: str) -> str:
    """The source of a class, and of the modules of its bases."""
    header = rf"(?ms)^class {cls}\b(.*?):[^\S\n]*(?:#[^\n]*)?\n"
    found = re.search(header + r"((?:[^\S\n][^\n]*\n?|\n)*)", text)
    if found is None:
        return ""
    body = found[2]
    for base in re.findall(r"\b[A-Z]\w+", found[1]):
        home = re.search(rf"(?ms)^from (\S+) import (?:\([^)]*?\b{base}\b|[^\n(]*\b{base}\b)", text)
        if home is not None:
            body += _with_bases(place, home[1], _source(place, home[1]), base)
        elif base != cls:
            body += _with_bases(place, module, text, base)
    return body


_KEY = "inspect_lens_off"
_listeners: list[tuple[Any, Callable[[str], None]]] = []


def is_required() -> bool:
    """Whether whoever started vLLM wants it only with the lens."""
    return is_lens_required()


def off(vllm_config: Any) -> str | None:
    """Why the lens is off in an engine, as far as this process knows; None where it is not."""
    reason: str | None = vars(vllm_config).get(_KEY)
    return reason


def when_off(vllm_config: Any, tell: Callable[[str], None]) -> None:
    """Have somebody of this process told when the lens is turned off in an engine."""
    _listeners.append((vllm_config, tell))


def reason_of(error: BaseException) -> str:
    """What a refusal or a fault of ours means for the engine, in words for its clients."""
    if ends_process(error) or is_required():
        raise error
    if isinstance(error, LensError):
        for detail in getattr(error, "__notes__", ()):
            logger.error("inspect_lens: %s: %s", error, detail)
        return str(error)
    logger.warning("inspect_lens: a fault at start; please report it", exc_info=error)
    return f"a fault at start ({without_files(error)}); the log has its traceback"


def without_files(error: BaseException) -> str:
    """What a fault says; those of the system and of imports name files, which clients need not."""
    says = (error.strerror or "") if isinstance(error, OSError) else str(error)
    if isinstance(error, ImportError):
        says = says.replace(f" ({error.path})", "")
    return ": ".join(filter(None, (type(error).__name__, " ".join(says.split()))))


def not_served(reason: str) -> UnsupportedError:
    """The error for a lens request to an engine that the lens does not serve."""
    return UnsupportedError(f"the lens does not serve this engine: {reason}")


def turn_off_engine(vllm_config: Any, reason: str, *, is_told: bool = False) -> None:
    """Note why the lens is off in an engine."""
    if is_required():
        name = "REQUIRED" if flag("required", wrong=True) else "SERVER"
        raise CompatError(f"INSPECT_LENS_{name} is set, and the lens is off: {reason}")
    for config, tell in _listeners:
        if config is vllm_config:
            tell(reason)
    if off(vllm_config) is not None:
        return
    # Processes that get the configuration from this one hear of it, too.
    vars(vllm_config)[_KEY] = reason
    if not is_told:
        logger.warning(
            "inspect_lens: off in this engine: %s. vLLM runs as without the lens, and requests for "
            "it get this reason; INSPECT_LENS_REQUIRED=1 stops the start instead",
            reason,
        )


def guarded(stepper: Stepper, work: Callable[..., Any], *args: Any) -> Any:
    """Do some work in the step loop; a fault fails the requests that use the lens."""
    try:
        return work(*args)
    except BaseException as error:
        if ends_process(error):
            raise
        logger.exception("inspect_lens: a fault in the step loop; its requests have failed")
        try:
            stepper.fail_all(as_exception(error))
        except BaseException as further:
            if ends_process(further):
                raise
            # Their front-ends' time-outs fail them.
            logger.exception("inspect_lens: the fault could not be cleared away")
        return None


def idle(stepper: Stepper, dummy_run: Callable[..., Any]) -> Callable[..., Any]:
    """Make the taps idle before a dummy run, which is nobody's step."""

    @functools.wraps(dummy_run)
    def run(*args: Any, **kwargs: Any) -> Any:
        if stepper.is_armed:
            guarded(stepper, stepper.disarm)
        return dummy_run(*args, **kwargs)

    # The start-up check is the one dummy run that arms the taps itself.
    run.inspect_lens_original = dummy_run  # type: ignore[attr-defined]
    return run


def fault_of(error: BaseException) -> LensError:
    """The error of a request for which our code went wrong, in words for its client."""
    if isinstance(error, LensError):
        return error
    return CaptureError(
        f"a fault of inspect_lens ended this request ({without_files(error)}); the server's log "
        "has its traceback; please report it"
    )


def pass_over(error: BaseException, *, uses_lens: bool) -> None:
    """Decide on a fault in a call of one request's own."""
    if ends_process(error) or isinstance(error, LensError):
        raise refused(error)
    if uses_lens:
        raise refused(fault_of(error)) from error
    logger.error("inspect_lens: a fault beside a request without the lens", exc_info=error)
