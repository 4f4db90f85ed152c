"""Facts of an engine, worked out from its configuration alike in every process.

The front-end judges requests by them and the worker sizes its buffers by them, so neither has
to ask the other. The worker checks them against the model that it really loaded.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

from inspect_lens._settings import Settings
from inspect_lens.errors import SpecError
from inspect_lens.spec import (
    BLOCK_SITES,
    SITE_TABLE,
    SITES,
    EngineFacts,
    Site,
    SiteWidth,
    in_site_order,
    rows_for,
    tap_points,
)

from .connectors import connector_refusals, is_vllms_own, no_steering
from .features import is_off
from .hosts import hosts_refusals
from .monkeypatches import vllm_version
from .off import off

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_NEURONS = ("intermediate_size", "ffn_dim", "ffn_hidden_size", "n_inner")


def width_of(site: Site, model: Any, parallel: Any, ranks: int) -> SiteWidth:
    config = model.hf_text_config
    is_latent = bool(getattr(model, "use_mla", False))
    if site in ("q", "k", "v") and is_latent:
        raise _missing(site, "its attention keeps no keys per head (MLA)")
    if site == "router_logits":
        return SiteWidth(site, _number(site, config, _EXPERTS, "it has no experts"))
    if site == "mlp_hidden":
        return SiteWidth(site, _number(site, config, _NEURONS, "it names no number of them"), ranks)
    size = int(config.v_head_dim if is_latent else model.get_head_size())
    if site in ("k", "v"):
        heads = int(model.get_total_num_kv_heads())
        return SiteWidth(site, heads * size, min(heads, ranks), heads)
    heads = int(model.get_num_attention_heads(parallel)) * ranks
    return SiteWidth(site, heads * size, ranks, heads)


def _number(site: Site, config: Any, names: Sequence[str], why: str) -> int:
    for name in names:
        value = getattr(config, name, None)
        if isinstance(value, int) and value > 0:
            return value
    raise _missing(site, why)


def _missing(site: Site, why: str) -> SpecError:
    return SpecError(f"INSPECT_LENS_SITES: this model has no {site}: {why}; leave the site out")


_ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
_MAX_BANK_ROWS = 65536


def refusal(vllm_config: Any) -> str | None:
    """Why the lens cannot serve an engine, or None when it can.

    Such an engine runs as if the plug-in were not installed, and refuses lens requests with
    this reason. What stands here has not been shown to keep rows and tokens together.
    """
    if (known := off(vllm_config) or is_off("lens")) is not None:
        return known
    # Read again for each engine, so that one process can hold engines with and without.
    try:
        settings = Settings.load()
    except SpecError as error:
        return str(error)
    parallel = vllm_config.parallel_config
    found = {
        "INSPECT_LENS_DISABLE is set": settings.disable,
        "it does not generate text": vllm_config.model_config.runner_type != "generate",
        "encoder-decoder models are not served": vllm_config.model_config.is_encoder_decoder,
        **_speculation(vllm_config),
        **connector_refusals(vllm_config),
        "dual-batch overlap moves tokens": getattr(parallel, "enable_dbo", False),
        "prefill context parallelism splits prompts": getattr(
            parallel, "prefill_context_parallel_size", 1
        )
        > 1,
        "fast prefill runs the later layers on a part of the tokens": getattr(
            vllm_config.cache_config, "kv_sharing_fast_prefill", False
        ),
        **hosts_refusals(vllm_config, settings),
        "with an external launcher each rank has a front-end of its own, and one rank sends rows": (
            getattr(parallel, "distributed_executor_backend", None) == "external_launcher"
        ),
        "sequence parallelism splits tokens over ranks": getattr(
            vllm_config.compilation_config.pass_config, "enable_sp", False
        ),
    }
    return next((reason for reason, applies in found.items() if applies), None)


def _speculation(vllm_config: Any) -> dict[str, bool]:
    """Why speculative decoding cannot be served, as far as it cannot.

    A rejected draft's row is written again by the step that feeds the right token, so positions
    must be exact when a step is laid out. They are where the scheduler has seen what was
    accepted; a scheduler that runs ahead gives upper bounds.
    """
    scheduler = vllm_config.scheduler_config
    is_on = vllm_config.speculative_config is not None
    return {
        "with speculative decoding an asynchronous scheduler does not know positions exactly; "
        "start with --no-async-scheduling": is_on and bool(scheduler.async_scheduling),
        "speculative decoding over a pipeline is not served": is_on
        and vllm_config.parallel_config.pipeline_parallel_size > 1,
        "speculative decoding with stream_interval > 1 hides where the last step began": is_on
        and getattr(scheduler, "stream_interval", 1) > 1,
    }


def is_compiled(vllm_config: Any) -> bool:
    mode = vllm_config.compilation_config.mode
    return mode is not None and getattr(mode, "name", "NONE") != "NONE"


def facts_of(vllm_config: Any, settings: Settings) -> EngineFacts:
    model = vllm_config.model_config
    n_layers = int(model.hf_text_config.num_hidden_layers)
    hidden = int(model.get_hidden_size())
    dtype = str(model.dtype).removeprefix("torch.")
    layers = _layers(settings.layers, n_layers)
    sites = _sites(settings.sites)
    taps = tap_points(sites, layers)
    ranks = int(getattr(vllm_config.parallel_config, "tensor_parallel_size", 1))
    widths = tuple(
        [
            width_of(site, model, vllm_config.parallel_config, ranks)
            for site in sites
            if not SITE_TABLE[site].is_wide
        ]
    )
    step = int(vllm_config.scheduler_config.max_num_batched_tokens)
    # On a GPU a step fills up to one half of the buffer while the other is copied out.
    halves = 1 if vllm_config.device_config.device_type == "cpu" else 2
    row_bytes = halves * hidden * _ITEM_BYTES.get(dtype, 4)
    least = _least_step_tokens(vllm_config, step)
    rows = {width.site: rows_for(width, hidden) for width in widths}
    token_rows = sum(rows.get(tap.site, 1) for tap in taps)
    ring_rows = settings.ring_bytes // row_bytes
    if least < step:
        # Shorter steps than these cannot be had, and with them every request is served.
        ring_rows = max(ring_rows, token_rows * least)
    return EngineFacts(
        # The last part only: messages that name it are sent to HTTP clients.
        model=str(model.model).rstrip("/").rpartition("/")[2],
        n_layers=n_layers,
        hidden=hidden,
        dtype=dtype,
        layers=layers,
        sites=sites,
        taps=taps,
        max_step_tokens=step,
        least_step_tokens=least,
        ring_rows=min(token_rows * step, ring_rows),
        ring_row_bytes=row_bytes,
        bank_rows=max(1, min(_MAX_BANK_ROWS, settings.bank_bytes // (hidden * 4))),
        vllm_version=vllm_version(),
        is_speculative=vllm_config.speculative_config is not None,
        allows_code=settings.allow_code,
        has_latent_attention=bool(getattr(model, "use_mla", False)),
        widths=widths,
        ranks=ranks,
        vocab=int(getattr(model.hf_text_config, "vocab_size", 0)),
        no_lens=_no_lens(vllm_config),
        no_steering=no_steering(vllm_config, settings),
    )


def computing_facts(state: Any) -> dict[str, Any]:
    """What decides an API server's activations beside the weights, as cards of probes record it."""
    engine = state.engine_client
    model, tokenizer = engine.model_config, engine.input_processor.tokenizer
    template = getattr(getattr(state, "openai_serving_chat", None), "chat_template", None)
    template = template or getattr(tokenizer, "chat_template", None)
    words = None if tokenizer is None else json.dumps(sorted(tokenizer.get_vocab().items()))
    return {
        "engine": f"vllm {vllm_version()}",
        "dtype": str(model.dtype).removeprefix("torch."),
        "quantization": model.quantization,
        # The last part only: the rest names folders of the server.
        "tokenizer": str(model.tokenizer or "").rstrip("/").rpartition("/")[2],
        "tokenizer_sha256": _sha256(words),
        "chat_template_sha256": _sha256(template),
    }


def _sha256(content: Any) -> str | None:
    if not content:
        return None
    text = content if isinstance(content, str) else json.dumps(content, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _no_lens(vllm_config: Any) -> str:
    """Why rows cannot go through the unembedding, or empty where they can."""
    if getattr(vllm_config.parallel_config, "pipeline_parallel_size", 1) == 1:
        return ""
    return (
        "with pipeline parallelism the unembedding is on the last stage, and rows of other layers "
        "are not; use tensor parallelism, or capture the rows"
    )


def _least_step_tokens(vllm_config: Any, step: int) -> int:
    """Tokens to which the scheduler can be held in a step, and nobody waits for ever.

    Every sequence gets its next token, with drafts, in each step. What cannot be cut has to fit:
    prompts where they are not chunked, images that are not, blocks of recurrent states.
    """
    scheduler, cache = vllm_config.scheduler_config, vllm_config.cache_config
    is_whole = (
        not getattr(scheduler, "enable_chunked_prefill", True)
        or getattr(scheduler, "disable_chunked_mm_input", False)
        # Of somebody else, whose steps are not known to follow the limit.
        or not is_vllms_own(getattr(scheduler, "scheduler_cls", None))
    )
    if is_whole:
        return step
    speculative = vllm_config.speculative_config
    drafts = int(getattr(speculative, "num_speculative_tokens", 0) or 0)
    least = int(scheduler.max_num_seqs) * (1 + drafts)
    if getattr(cache, "mamba_cache_mode", "none") == "align":
        least = max(least, int(getattr(cache, "block_size", 0) or 0))
    return min(step, least)


def _layers(text: str, n_layers: int) -> tuple[int, ...]:
    if text.strip() == "all":
        return tuple(range(n_layers))
    try:
        layers = sorted({int(part) for part in text.split(",") if part.strip()})
    except ValueError:
        layers = []
    if not layers or layers[0] < 0 or layers[-1] >= n_layers:
        raise SpecError(
            f"INSPECT_LENS_LAYERS={text!r}; allowed are 'all' or a comma-separated list of "
            f"layers from 0 to {n_layers - 1}"
        )
    return tuple(layers)


def _sites(text: str) -> tuple[Site, ...]:
    if text.strip() == "all":
        return BLOCK_SITES
    named = [part.strip() for part in text.split(",") if part.strip()]
    found = [site for site in SITES if site in named]
    if not found or set(named) != set(found):
        raise SpecError(
            f"INSPECT_LENS_SITES={text!r}; allowed are 'all' or a comma-separated list of "
            f"{', '.join(SITES)}"
        )
    return in_site_order(found)
