"""Facts of an engine, worked out from its configuration alike in every process.

The front-end judges requests by them and the worker sizes its buffers by them, so neither has
to ask the other. The worker checks them against the model that it really loaded.
"""

from __future__ import annotations

import hashlib
import importlib
import json
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Final

import inspect_lens
from inspect_lens._engine.protocol.processes import Links
from inspect_lens._engine.protocol.readouts import crossing_bytes
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
from .features import is_off, off
from .monkeypatches import vllm_version

_LEAST_KEY = 16
_MESSAGE_ROOM = 64 << 20
"""Bytes of a message, at most, beside what hooks saved."""


def may_have_remote_ranks(vllm_config: Any) -> bool:
    """Whether workers of one engine run, or may run, on several hosts."""
    parallel = vllm_config.parallel_config
    return bool(parallel.nnodes > 1) or _has_ray_workers(parallel)


def has_remote_engines(vllm_config: Any) -> bool:
    """Whether a front-end hands requests to data-parallel engines of other hosts.

    Behind an outer load balancer, and where each rank is a program of its own, a front-end has
    the engines of its host only.
    """
    parallel = vllm_config.parallel_config
    is_local = (
        parallel.data_parallel_external_lb
        or parallel.data_parallel_hybrid_lb
        or parallel.data_parallel_rank_local is not None
    )
    return not is_local and parallel.data_parallel_size_local != parallel.data_parallel_size


def _may_span_hosts(vllm_config: Any) -> bool:
    return may_have_remote_ranks(vllm_config) or has_remote_engines(vllm_config)


def _has_ray_workers(parallel: Any) -> bool:
    """Whether Ray starts the workers: vLLM's executor, or one that is made from it."""
    executor = parallel.distributed_executor_backend
    return executor == "ray" or bool(getattr(executor, "uses_ray", False))


def hosts_refusals(vllm_config: Any, settings: Settings) -> dict[str, bool]:
    """Why an engine that spans hosts, or may, is not served, as far as it is not."""
    parallel = vllm_config.parallel_config
    has_many = parallel.data_parallel_size > 1
    has_ray_engines = has_many and parallel.data_parallel_backend == "ray"
    found = {
        "data-parallel engines that Ray starts have not been tried; use --data-parallel-backend "
        "mp": has_ray_engines
    }
    if not _may_span_hosts(vllm_config):
        return found
    has_ray = _has_ray_workers(parallel)
    # Ray's workers are not told the API server's VLLM_HOST_IP, and have to come to the same answer.
    address = settings.hosts_address if has_ray else _address(parallel, settings)
    needs_key = not (settings.hosts_key or settings.hosts_open or _is_loopback(address))
    return found | {
        "data-parallel engines that span hosts themselves, or whose workers Ray places, have not "
        "been tried": may_have_remote_ranks(vllm_config) and has_many,
        "Ray's older executor has not been tried: set VLLM_USE_RAY_V2_EXECUTOR_BACKEND=1": (
            has_ray and not _has_newer_ray_executor()
        ),
        "Ray may place its workers on several hosts, and rows need a secret to travel between "
        "them: set INSPECT_LENS_HOSTS_KEY where the API server starts, or "
        "INSPECT_LENS_HOSTS_ADDRESS=127.0.0.1 if all workers are on its host": (
            has_ray and needs_key
        ),
        "it spans several hosts, and rows need a secret to travel between them: set "
        "INSPECT_LENS_HOSTS_KEY to the same one on all hosts": needs_key,
        f"INSPECT_LENS_HOSTS_KEY has fewer than {_LEAST_KEY} characters": (
            0 < len(settings.hosts_key) < _LEAST_KEY
        ),
    }


def _has_newer_ray_executor() -> bool:
    """Whether vLLM's Ray executor runs the loop that workers of its own processes run."""
    # The older one calls the model from a graph of Ray's, and is gone in vLLM 0.33.
    import vllm.envs

    return bool(getattr(vllm.envs, "VLLM_USE_RAY_V2_EXECUTOR_BACKEND", True))


def links_of(vllm_config: Any, settings: Settings, facts: EngineFacts) -> Links | None:
    """How a front-end listens for workers of other hosts; None where there are none."""
    if not _may_span_hosts(vllm_config):
        return None
    return replace(
        worker_links(settings, facts), address=_address(vllm_config.parallel_config, settings)
    )


def worker_links(settings: Settings, facts: EngineFacts) -> Links:
    """How a worker reaches front-ends of other hosts."""
    return Links(
        key=settings.hosts_key,
        timeout_s=settings.hosts_timeout_s,
        most_bytes=settings.shm_bytes,
        most_message=settings.hook_bytes + _MESSAGE_ROOM,
        facts=facts_mark(facts),
    )


def routes_of(engine: Any) -> Mapping[str, Any]:
    """Which data-parallel engine has each running request of an `AsyncLLM`, by internal id.

    Empty where there is one engine, or nobody knows.
    """
    # Of one that balances requests over several engines.
    found: Mapping[str, Any] = getattr(engine.engine_core, "reqs_in_flight", {})
    return found


def facts_mark(facts: EngineFacts) -> str:
    """What is equal on hosts that lay requests out alike; the folder of a model may differ."""
    # Attention that loads in a worker may name the cache's dtype more closely.
    text = f"{inspect_lens.__version__} {replace(facts, model='', kv_cache_dtype=None)!r}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _address(parallel: Any, settings: Settings) -> str:
    """Of the host with the front-ends, which all others are told, too."""
    if settings.hosts_address:
        return settings.hosts_address
    import vllm.envs

    host = str(vllm.envs.VLLM_HOST_IP)
    if not host and _has_ray_workers(parallel):
        # No flag of vLLM's names one: hosts of a Ray cluster find each other through Ray.
        host = str(importlib.import_module("ray.util").get_node_ip_address())
    elif not host:
        is_spread = parallel.nnodes > 1
        host = str(parallel.master_addr if is_spread else parallel.data_parallel_master_ip)
    # IPv6 is written in brackets where a port may follow.
    return f"[{host}]" if ":" in host else host


def _is_loopback(address: str) -> bool:
    return address.startswith(("127.", "[::1]"))


_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_NEURONS = ("intermediate_size", "ffn_dim", "ffn_hidden_size", "n_inner")


def width_of(site: Site, model: Any, parallel: Any, ranks: int) -> SiteWidth:
    config = model.hf_text_config
    is_latent = bool(model.use_mla)
    if site in ("q", "k", "v") and is_latent:
        raise _missing(site, "its attention keeps no keys per head (MLA)")
    if site == "router_logits":
        if not (experts := n_experts(config)):
            raise _missing(site, "it has no experts")
        return SiteWidth(site, experts)
    if site == "mlp_hidden":
        found = (getattr(config, name, None) for name in _NEURONS)
        neurons = next((n for n in found if isinstance(n, int) and n > 0), None)
        if neurons is None:
            raise _missing(site, "it names no number of them")
        return SiteWidth(site, neurons, ranks)
    size = int(config.v_head_dim if is_latent else model.get_head_size())
    if site in ("k", "v"):
        heads = int(model.get_total_num_kv_heads())
        return SiteWidth(site, heads * size, min(heads, ranks), heads)
    heads = int(model.get_num_attention_heads(parallel)) * ranks
    return SiteWidth(site, heads * size, ranks, heads)


def n_experts(config: Any) -> int:
    """The largest number of experts that a configuration, or one inside it, names; 0 for none."""
    held = config if isinstance(config, dict) else getattr(config, "__dict__", {})
    most = 0
    for name, value in held.items():
        values = value if isinstance(value, list | tuple) else [value]
        if name in _EXPERTS:
            most = max([most, *(n for n in values if isinstance(n, int))])
        inside = (v for v in values if isinstance(v, dict) or hasattr(v, "to_dict"))
        most = max([most, *map(n_experts, inside)])
    return most


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
        "dual-batch overlap moves tokens": parallel.enable_dbo,
        "prefill context parallelism splits prompts": parallel.prefill_context_parallel_size > 1,
        "fast prefill runs the later layers on a part of the tokens": (
            vllm_config.cache_config.kv_sharing_fast_prefill
        ),
        **hosts_refusals(vllm_config, settings),
        "with an external launcher each rank has a front-end of its own, and one rank sends rows": (
            parallel.distributed_executor_backend == "external_launcher"
        ),
    }
    return next((reason for reason, applies in found.items() if applies), None)


def _speculation(vllm_config: Any) -> dict[str, bool]:
    """Why speculative decoding cannot be served, as far as it cannot."""
    # A rejected draft's row is written again by the step that feeds the right token, so positions
    # must be exact when a step is laid out. They are where the scheduler has seen what was
    # accepted; a scheduler that runs ahead gives upper bounds.
    scheduler = vllm_config.scheduler_config
    is_on = vllm_config.speculative_config is not None
    return {
        "with speculative decoding an asynchronous scheduler does not know positions exactly; "
        "start with --no-async-scheduling": is_on and bool(scheduler.async_scheduling),
        "speculative decoding over a pipeline is not served": is_on
        and vllm_config.parallel_config.pipeline_parallel_size > 1,
        "speculative decoding with stream_interval > 1 hides where the last step began": is_on
        and scheduler.stream_interval > 1,
    }


def draft_tokens(vllm_config: Any) -> int:
    """Tokens that are drafted for each sequence in a step; 0 without speculative decoding."""
    speculative = vllm_config.speculative_config
    return 0 if speculative is None else int(speculative.num_speculative_tokens or 0)


def is_compiled(vllm_config: Any) -> bool:
    mode = vllm_config.compilation_config.mode
    return mode is not None and mode.name != "NONE"


def facts_of(vllm_config: Any, settings: Settings) -> EngineFacts:
    model = vllm_config.model_config
    n_layers = int(model.hf_text_config.num_hidden_layers)
    hidden = int(model.get_hidden_size())
    dtype = str(model.dtype).removeprefix("torch.")
    layers = _layers(settings.layers, n_layers)
    sites = _sites(settings.sites)
    taps = tap_points(sites, layers)
    ranks = int(vllm_config.parallel_config.tensor_parallel_size)
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
    last = min(int(vllm_config.parallel_config.pipeline_parallel_size), 3) - 1
    item_bytes = hidden * _ITEM_BYTES.get(dtype, 4)

    def held(rows: int) -> int:
        one = rows * item_bytes
        return halves * one + max(
            crossing_bytes(one, is_first=stage == 0, is_last=stage == last)
            for stage in range(last + 1)
        )

    least = _least_step_tokens(vllm_config, step)
    rows = {width.site: rows_for(width, hidden) for width in widths}
    token_rows = sum(rows.get(tap.site, 1) for tap in taps)
    at_most = range(settings.ring_bytes // item_bytes + 1)
    ring_rows = bisect_right(at_most, settings.ring_bytes, key=held) - 1
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
        ring_row_bytes=held(1),
        bank_rows=max(1, min(_MAX_BANK_ROWS, settings.bank_bytes // (hidden * 4))),
        vllm_version=vllm_version(),
        is_speculative=vllm_config.speculative_config is not None,
        allows_code=settings.allow_code,
        has_latent_attention=bool(model.use_mla),
        widths=widths,
        ranks=ranks,
        vocab=int(getattr(model.hf_text_config, "vocab_size", 0)),
        no_steering=no_steering(vllm_config, settings),
        quantization=model.quantization,
        kv_cache_dtype=_cache_dtype(vllm_config),
        placeholders=frozenset(_placeholders(model.hf_config)),
    )


def _cache_dtype(vllm_config: Any) -> str:
    """Of keys and values in the cache; `auto` is the model's."""
    found = str(vllm_config.cache_config.cache_dtype)
    if found == "auto":
        return str(vllm_config.model_config.dtype).removeprefix("torch.")
    return found


_PLACEHOLDERS: Final = tuple(
    f"{kind}_token_{what}" for kind in ("image", "video", "audio") for what in ("id", "index")
)


def _placeholders(config: Any) -> Iterator[int]:
    """Tokens that stand for images and such, by a configuration and by those inside it."""
    is_plain = isinstance(config, dict)
    for name in _PLACEHOLDERS:
        found = config.get(name) if is_plain else getattr(config, name, None)
        yield from (found,) if isinstance(found, int) else ()
    for value in (config if is_plain else vars(config)).values():
        if isinstance(value, dict) or hasattr(value, "to_dict"):
            yield from _placeholders(value)


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
        "kv_cache_dtype": _cache_dtype(engine.vllm_config),
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


def _least_step_tokens(vllm_config: Any, step: int) -> int:
    """Tokens to which the scheduler can be held in a step, and nobody waits for ever."""
    # Every sequence gets its next token, with drafts, in each step. What cannot be cut has to fit:
    # prompts where they are not chunked, images that are not, blocks of recurrent states.
    scheduler, cache = vllm_config.scheduler_config, vllm_config.cache_config
    is_whole = (
        not scheduler.enable_chunked_prefill
        or scheduler.disable_chunked_mm_input
        # Of somebody else, whose steps are not known to follow the limit.
        or not is_vllms_own(scheduler.scheduler_cls)
    )
    if is_whole:
        return step
    least = int(scheduler.max_num_seqs) * (1 + draft_tokens(vllm_config))
    if cache.mamba_cache_mode == "align":
        least = max(least, int(cache.block_size or 0))
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
