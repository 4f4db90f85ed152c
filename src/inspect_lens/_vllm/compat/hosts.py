"""Engines over several hosts: which of them are served, and how their processes find each other.

Served is what vLLM starts with processes of its own: stages and tensor-parallel ranks of one engine
(`--nnodes`), or whole data-parallel engines (`--data-parallel-size-local`); and one engine whose
workers Ray places. Which hosts those get is known only once they run, so any may be another one.
"""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import inspect_lens
from inspect_lens._engine.protocol.processes import Links
from inspect_lens._settings import Settings
from inspect_lens.spec import EngineFacts

_LEAST_KEY = 16
_MESSAGE_ROOM = 64 << 20
"""Bytes of a message, at most, beside what hooks saved."""


def may_have_remote_ranks(vllm_config: Any) -> bool:
    """Whether workers of one engine run, or may run, on several hosts."""
    parallel = vllm_config.parallel_config
    return bool(getattr(parallel, "nnodes", 1) > 1) or _has_ray_workers(parallel)


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
    executor = getattr(parallel, "distributed_executor_backend", None)
    return executor == "ray" or bool(getattr(executor, "uses_ray", False))


def hosts_refusals(vllm_config: Any, settings: Settings) -> dict[str, bool]:
    """Why an engine that spans hosts, or may, is not served, as far as it is not."""
    parallel = vllm_config.parallel_config
    has_many = parallel.data_parallel_size > 1
    has_ray_engines = has_many and getattr(parallel, "data_parallel_backend", "mp") == "ray"
    found = {
        "data-parallel engines that Ray starts have not been tried; use --data-parallel-backend "
        "mp": has_ray_engines,
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
        "Ray's older executor has not been tried: set VLLM_USE_RAY_V2_EXECUTOR_BACKEND=1, with a "
        "vLLM that knows it": has_ray and not _has_newer_ray_executor(),
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
    """Whether vLLM's Ray executor runs the loop that workers of its own processes run.

    The older one calls the model from a graph of Ray's.
    """
    import vllm.envs

    return bool(getattr(vllm.envs, "VLLM_USE_RAY_V2_EXECUTOR_BACKEND", False))


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

    host = str(getattr(vllm.envs, "VLLM_HOST_IP", ""))
    if not host and _has_ray_workers(parallel):
        # No flag of vLLM's names one: hosts of a Ray cluster find each other through Ray.
        host = str(importlib.import_module("ray.util").get_node_ip_address())
    elif not host:
        told = "master_addr" if getattr(parallel, "nnodes", 1) > 1 else "data_parallel_master_ip"
        host = str(getattr(parallel, told, ""))
    # IPv6 is written in brackets where a port may follow.
    return f"[{host}]" if ":" in host else host


def _is_loopback(address: str) -> bool:
    return address.startswith(("127.", "[::1]"))
