"""Engines over several hosts: which of them are served, and how their processes find each other.

Served is what vLLM starts with processes of its own: stages and tensor-parallel ranks of one engine
(`--nnodes`), or whole data-parallel engines (`--data-parallel-size-local`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import inspect_lens
from inspect_lens._engine.protocol.hosts import Links
from inspect_lens._settings import Settings
from inspect_lens.spec import EngineFacts

__all__ = [
    "facts_mark",
    "has_remote_engines",
    "has_remote_ranks",
    "hosts_refusals",
    "links_of",
    "routes_of",
    "worker_links",
]

_LEAST_KEY = 16
_MESSAGE_ROOM = 64 << 20
"""Bytes of a message, at most, beside what hooks saved."""


def has_remote_ranks(vllm_config: Any) -> bool:
    """Whether an engine has workers on several hosts."""
    return bool(getattr(vllm_config.parallel_config, "nnodes", 1) > 1)


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


def _spans_hosts(vllm_config: Any) -> bool:
    return has_remote_ranks(vllm_config) or has_remote_engines(vllm_config)


def hosts_refusals(vllm_config: Any, settings: Settings) -> dict[str, bool]:
    """Why an engine over several hosts is not served, as far as it is not."""
    if not _spans_hosts(vllm_config):
        return {}
    parallel = vllm_config.parallel_config
    executor = getattr(parallel, "distributed_executor_backend", None)
    is_open = settings.hosts_open or _is_loopback(_address(parallel, settings))
    return {
        "over several hosts with Ray it has not been tried; use vLLM's own processes (--nnodes, or "
        "--data-parallel-backend mp)": executor == "ray"
        or getattr(parallel, "data_parallel_backend", "mp") == "ray",
        "data-parallel engines that span hosts themselves have not been tried": (
            has_remote_ranks(vllm_config) and parallel.data_parallel_size > 1
        ),
        "it spans several hosts, and rows need a secret to travel between them: set "
        "INSPECT_LENS_HOSTS_KEY to the same one on all hosts": not (settings.hosts_key or is_open),
        f"INSPECT_LENS_HOSTS_KEY has fewer than {_LEAST_KEY} characters": (
            0 < len(settings.hosts_key) < _LEAST_KEY
        ),
    }


def links_of(vllm_config: Any, settings: Settings, facts: EngineFacts) -> Links | None:
    """How a front-end listens for workers of other hosts; None where there are none."""
    if not _spans_hosts(vllm_config):
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
    client = getattr(engine, "engine_core", None)
    found: Mapping[str, Any] = getattr(client, "reqs_in_flight", {})
    return found


def facts_mark(facts: EngineFacts) -> str:
    """What is equal on hosts that lay requests out alike; the folder of a model may differ."""
    text = f"{inspect_lens.__version__} {replace(facts, model='')!r}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _address(parallel: Any, settings: Settings) -> str:
    """Of the host with the front-ends, which all others are told, too."""
    if settings.hosts_address:
        return settings.hosts_address
    import vllm.envs

    told = "master_addr" if getattr(parallel, "nnodes", 1) > 1 else "data_parallel_master_ip"
    host = str(getattr(vllm.envs, "VLLM_HOST_IP", "") or getattr(parallel, told, ""))
    # IPv6 is written in brackets where a port may follow.
    return f"[{host}]" if ":" in host else host


def _is_loopback(address: str) -> bool:
    return address.startswith(("127.", "[::1]"))
