"""Fixtures of the whole suite, and the check that no run leaves a process behind."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests.kit.repository import ROOT

pytest_plugins = ["tests.kit.leftovers"]

# Tests share two cores with engines: how long an example takes says nothing.
settings.register_profile("shared", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared")

MODEL = "organism/checkpoint"
START_TIMEOUT_S = 600
# Engine and server live side by side; the default takes a share of all memory for each.
KV_CACHE_BYTES = 256 << 20
MAX_LORA_RANK = 32


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--soak-requests", type=int, default=600, help="requests of tests/engine/test_soak.py"
    )
    parser.addoption(
        "--lens-server",
        help="address of a server of organism/checkpoint that runs already, with LoRA enabled",
    )


@pytest.fixture(scope="session")
def offline_llm() -> Iterator[Any]:
    """One `vllm.LLM` of the model organism for the whole session; it may run hooks."""
    from vllm import LLM

    # Read when an engine is made.
    os.environ["INSPECT_LENS_ALLOW_CODE"] = "1"
    try:
        # Compiled ones are those of `tests/engine`, and the server.
        llm = LLM(
            model=str(ROOT / MODEL),
            dtype="float32",
            kv_cache_memory_bytes=KV_CACHE_BYTES,
            enforce_eager=True,
        )
    finally:
        del os.environ["INSPECT_LENS_ALLOW_CODE"]
    yield llm
    llm.llm_engine.engine_core.shutdown()


@pytest.fixture(scope="session")
def lens_server_url(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """Address of one API server for the whole session; the model is `organism/checkpoint`.

    It takes LoRA adapters at run time, runs hooks, and serves all sites.
    """
    if (running := request.config.getoption("--lens-server")) is not None:
        yield str(running)
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    log = tmp_path_factory.mktemp("server") / "server.log"
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", MODEL]
    command += ["--dtype", "float32", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--kv-cache-memory-bytes", str(KV_CACHE_BYTES)]
    command += ["--enable-scale-out"]  # the route of token ids
    command += ["--enable-lora", "--max-loras", "2", "--max-lora-rank", str(MAX_LORA_RANK)]
    environment = os.environ | {
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
        "INSPECT_LENS_ALLOW_CODE": "1",
        # The organism's truth vector belongs to the output of an attention.
        "INSPECT_LENS_SITES": "all",
    }
    with log.open("wb") as output:
        # Its own group, so that the engine's processes end with it.
        server = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        _wait_until_ready(server, url, log)
        yield url
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGTERM)
        try:
            server.wait(timeout=30)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait(timeout=30)


def _wait_until_ready(server: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline and server.poll() is None:
        with contextlib.suppress(OSError):
            if urllib.request.urlopen(f"{url}/health", timeout=2).status == 200:
                return
        time.sleep(0.5)
    pytest.fail(f"the server did not start:\n{log.read_text(errors='replace')[-4000:]}")
