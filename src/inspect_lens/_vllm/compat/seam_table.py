"""Every private name of vLLM that inspect_lens wraps, in one table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["EAGER_SEAMS", "SEAMS", "SERVE_SEAMS", "Process", "Seam"]

Process = Literal["front-end", "engine", "worker", "api-server"]
_SCHED = "vllm.v1.core.sched.scheduler:Scheduler"
_MANY = "from here on it may feed many tokens in a step"


@dataclass(frozen=True)
class Seam:
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


SEAMS: tuple[Seam, ...] = (
    Seam(
        "load_model",
        "vllm.v1.worker.gpu_worker:Worker.load_model",
        ("self",),
        "worker",
        "taps must be in the model when the profile run traces it; inherited by CPU workers",
    ),
    Seam(
        "scheduler_init",
        f"{_SCHED}.__init__",
        ("self", "vllm_config"),
        "engine",
        "a KV connector brings no tokens whose rows are wanted, and no blocks of other steering; "
        "an engine ends with the process that started it",
    ),
    Seam("schedule", f"{_SCHED}.schedule", ("self",), "engine", "rows of a step fit the buffer"),
    Seam("scheduler_add", f"{_SCHED}.add_request", ("self", "request"), "engine", _MANY),
    Seam("scheduler_preempt", f"{_SCHED}._preempt_request", ("self", "request"), "engine", _MANY),
    Seam(
        "cached_blocks",
        "vllm.v1.core.kv_cache_manager:KVCacheManager.get_computed_blocks",
        ("self", "request"),
        "engine",
        "a captured prompt reads the prefix cache as far as its rows are known from before",
    ),
    Seam(
        "input_processor_init",
        "vllm.v1.engine.input_processor:InputProcessor.__init__",
        ("self", "vllm_config"),
        "front-end",
        "the one place where every front-end learns its engine's configuration",
    ),
    Seam(
        "process_inputs",
        "vllm.v1.engine.input_processor:InputProcessor.process_inputs",
        ("self", "request_id", "prompt", "params"),
        "front-end",
        "knows the prompt's length; sets the cache salt and the reply address",
    ),
    Seam(
        "add_request",
        "vllm.v1.engine.output_processor:OutputProcessor.add_request",
        ("self", "request", "prompt", "parent_req", "request_index", "queue"),
        "front-end",
        "the internal id of each choice, before the engine can answer",
    ),
    Seam(
        "abort_requests",
        "vllm.v1.engine.output_processor:OutputProcessor.abort_requests",
        ("self", "request_ids", "internal"),
        "front-end",
        "an aborted request takes no results",
    ),
    Seam(
        "new_completion_output",
        "vllm.v1.engine.output_processor:RequestState._new_completion_output",
        ("self", "token_ids", "finish_reason", "stop_reason"),
        "front-end",
        "ties a choice to its internal id and its number of sampled tokens",
    ),
    Seam(
        "output_add",
        "vllm.outputs:RequestOutput.add",
        ("self", "next_output", "aggregate"),
        "front-end",
        "vLLM merges outputs that a slow reader has not taken; the ticket must not be lost",
    ),
    Seam(
        "engine_step",
        "vllm.v1.engine.llm_engine:LLMEngine.step",
        ("self",),
        "front-end",
        "offline results",
    ),
    Seam(
        "run_engine",
        "vllm.entrypoints.llm:LLM._run_engine",
        ("self",),
        "front-end",
        "raises a failed request's error once the batch is done, so that no request is left",
    ),
    Seam(
        "call_utility",
        "vllm.v1.engine.core_client:SyncMPClient.call_utility",
        ("self", "method"),
        "front-end",
        "rows that are kept beside the prefix cache go with it",
    ),
    Seam(
        "call_utility_async",
        "vllm.v1.engine.core_client:AsyncMPClient._call_utility_async",
        ("self", "method"),
        "front-end",
        "rows that are kept beside the prefix cache go with it",
    ),
    Seam(
        "async_generate",
        "vllm.v1.engine.async_llm:AsyncLLM.generate",
        ("self", "prompt", "sampling_params", "request_id"),
        "front-end",
        "online results",
    ),
)

SERVE_SEAMS: tuple[Seam, ...] = (
    Seam(
        "chat_full",
        "vllm.entrypoints.openai.chat_completion.serving:"
        "OpenAIServingChat.chat_completion_full_generator",
        ("self", "request", "result_generator"),
        "api-server",
        "puts activations and receipt into a chat response",
    ),
    Seam(
        "chat_stream",
        "vllm.entrypoints.openai.chat_completion.serving:"
        "OpenAIServingChat.chat_completion_stream_generator",
        ("self", "request", "result_generator"),
        "api-server",
        "sends activations and receipt before [DONE]",
    ),
    Seam(
        "completion_full",
        "vllm.entrypoints.openai.completion.serving:"
        "OpenAIServingCompletion.request_output_to_completion_response",
        ("self", "final_res_batch"),
        "api-server",
        "puts activations and receipt into a completion response",
    ),
    Seam(
        "completion_stream",
        "vllm.entrypoints.openai.completion.serving:"
        "OpenAIServingCompletion.completion_stream_generator",
        ("self", "request", "engine_inputs", "result_generator"),
        "api-server",
        "sends activations and receipt before [DONE]",
    ),
    Seam(
        "chat_batch",
        "vllm.entrypoints.openai.chat_completion.batch_serving:"
        "OpenAIServingChatBatch.chat_completion_full_generator_batch",
        ("self", "request", "generators"),
        "api-server",
        "puts activations and receipts into a batched chat response",
    ),
    Seam(
        "chat_params",
        "vllm.entrypoints.openai.chat_completion.protocol:ChatCompletionRequest.to_sampling_params",
        ("self",),
        "api-server",
        "reads lens requests that stand in the body and not in vllm_xargs",
    ),
    Seam(
        "completion_params",
        "vllm.entrypoints.openai.completion.protocol:CompletionRequest.to_sampling_params",
        ("self",),
        "api-server",
        "reads lens requests that stand in the body and not in vllm_xargs",
    ),
    Seam(
        "chat_beam",
        "vllm.entrypoints.openai.chat_completion.protocol:"
        "ChatCompletionRequest.to_beam_search_params",
        ("self",),
        "api-server",
        "beam search drops extra arguments; a lens request must be refused there",
    ),
    Seam(
        "completion_beam",
        "vllm.entrypoints.openai.completion.protocol:CompletionRequest.to_beam_search_params",
        ("self",),
        "api-server",
        "beam search drops extra arguments; a lens request must be refused there",
    ),
    Seam(
        "responses_params",
        "vllm.entrypoints.openai.responses.protocol:ResponsesRequest.to_sampling_params",
        ("self",),
        "api-server",
        "responses there have no place for results; a lens request must be refused",
    ),
    Seam(
        "transcription_params",
        "vllm.entrypoints.speech_to_text.transcription.protocol:TranscriptionRequest.to_sampling_params",
        ("self",),
        "api-server",
        "answers there have no place for results; a lens request must be refused",
    ),
    Seam(
        "transcription_beam",
        "vllm.entrypoints.speech_to_text.transcription.protocol:TranscriptionRequest.to_beam_search_params",
        ("self",),
        "api-server",
        "answers there have no place for results; a lens request must be refused",
    ),
    Seam(
        "translation_params",
        "vllm.entrypoints.speech_to_text.translation.protocol:TranslationRequest.to_sampling_params",
        ("self",),
        "api-server",
        "answers there have no place for results; a lens request must be refused",
    ),
    Seam(
        "translation_beam",
        "vllm.entrypoints.speech_to_text.translation.protocol:TranslationRequest.to_beam_search_params",
        ("self",),
        "api-server",
        "answers there have no place for results; a lens request must be refused",
    ),
    Seam(
        "tokens_full",
        "vllm.entrypoints.scale_out.token_in_token_out.serving:ServingTokens.serve_tokens_full_generator",
        ("self", "request", "result_generator"),
        "api-server",
        "puts activations and receipt into a response of tokens",
    ),
    Seam(
        "tokens_stream",
        "vllm.entrypoints.scale_out.token_in_token_out.serving:ServingTokens.serve_tokens_stream_generator",
        ("self", "request", "result_generator"),
        "api-server",
        "sends activations and receipt before [DONE]",
    ),
    Seam(
        "routers",
        "vllm.entrypoints.serve:register_vllm_serve_api_routers",
        ("app",),
        "api-server",
        "adds the route that serves binary activations",
    ),
)

EAGER_SEAMS: tuple[Seam, ...] = (
    Seam(
        "forward_context",
        "vllm.forward_context:create_forward_context",
        ("attn_metadata", "vllm_config"),
        "worker",
        "a step with hooks calls the model as it was before compilation",
        ("skip_compiled",),
    ),
    Seam(
        "dispatch_v2",
        "vllm.v1.worker.gpu.model_runner:dispatch_cg_and_sync_dp",
        ("cudagraph_manager", "num_reqs", "num_tokens"),
        "worker",
        "a step with hooks replays no graph; the V2 runner",
        ("need_eager",),
    ),
    Seam(
        "dispatch_v1",
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner._determine_batch_execution_and_padding",
        ("self", "num_tokens", "num_reqs"),
        "worker",
        "a step with hooks replays no graph; the V1 runner",
        ("force_eager",),
    ),
)
