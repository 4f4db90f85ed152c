"""Fixtures of the whole suite, and the check that no run leaves a process behind."""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests.kit.api_server import api_server
from tests.kit.certificates import read_no_authorities
from tests.kit.preloaded import forked
from tests.kit.quiet import draw_nothing_in_quiet
from tests.kit.repository import ROOT
from tests.kit.webhook import Webhook, webhook

pytest_plugins = ["tests.kit.engine_errors", "tests.kit.leftovers"]

# Tests share two cores with engines: how long an example takes says nothing.
settings.register_profile("shared", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared")
draw_nothing_in_quiet()
read_no_authorities()

MODEL = "organism/checkpoint"
# Engine and server live side by side; the default takes a share of all memory for each.
KV_CACHE_BYTES = 256 << 20
MAX_LORA_RANK = 32
STORE_BYTES = 256 << 20
ADMIN_KEY = "the-operator"
"""Of the session's server."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--soak-requests", type=int, default=600, help="requests of tests/engine/test_soak.py"
    )
    parser.addoption(
        "--lens-server",
        help="address of a server of organism/checkpoint that runs already, with LoRA enabled",
    )
    parser.addoption(
        "--real-models",
        default="~/.cache/inspect_lens/real-models",
        help="folder that keeps the models of tests/real, which are made when they are missing",
    )
    parser.addoption("--real-results", help="file for what tests/real measure")
    parser.addoption(
        "--architecture-results", help="file for what the tests of architectures measure"
    )
    parser.addoption(
        "--quantised-results", help="file for what the tests of quantised engines measure"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Give the engines of each of several test processes a core of their own."""
    if not hasattr(config, "workerinput"):
        _collect_results(config)
    worker = getattr(config, "workerinput", {}).get("workerid", "")
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    if worker and cores:
        # vLLM for CPUs binds the threads of every engine to all cores, where they wait by spinning.
        core = cores[int(worker.removeprefix("gw")) % len(cores)]
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", str(core))


def _collect_results(config: pytest.Config) -> None:
    """Let what tests measure of models go into the files that were asked for."""
    if file := config.getoption("--real-results"):
        from tests.kit.model_results import Results
        from tests.kit.real_models import REAL_MODELS

        config.pluginmanager.register(Results(Path(file), "make real", REAL_MODELS, is_whole=True))
    for option in ("--architecture-results", "--quantised-results"):
        if file := config.getoption(option):
            from tests.kit.architectures import CASES
            from tests.kit.model_results import Results
            from tests.kit.quantised_models import METHODS

            names = [one.name for one in (METHODS if "quantised" in option else CASES)]
            command = " ".join(["pytest", *config.args])
            results = Results(Path(file), command, names, is_whole=False)
            config.pluginmanager.register(results)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Keep tests that share an engine in one process, with `--dist loadscope`."""
    from tests.kit.shared_engines import SharedEngines

    return SharedEngines(config, log) if config.getvalue("dist") == "loadscope" else None


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Tell a test process how tests are handed out: it is not given the option."""
    node.workerinput["dist"] = node.config.getvalue("dist")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Start with what takes longest, with `--dist loadscope`."""
    if getattr(config, "workerinput", {}).get("dist") == "loadscope":
        from tests.kit.shared_engines import longest_first

        items[:] = [items[i] for i in longest_first([i.nodeid for i in items])]


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keep the garbage collector from what stays: it would look at millions of objects."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


@pytest.fixture(scope="session")
def offline_llm() -> Iterator[Any]:
    """One `vllm.LLM` of the model organism for the whole session; it may run hooks."""
    from vllm import LLM

    # Read when an engine is made.
    os.environ["INSPECT_LENS_ALLOW_CODE"] = "1"
    os.environ["INSPECT_LENS_SITES"] = "resid_pre,q,k,resid_post"
    try:
        # Compiled ones are those of `tests/engine`.
        with forked():
            llm = LLM(
                model=str(ROOT / MODEL),
                dtype="float32",
                kv_cache_memory_bytes=KV_CACHE_BYTES,
                enforce_eager=True,
            )
    finally:
        del os.environ["INSPECT_LENS_ALLOW_CODE"], os.environ["INSPECT_LENS_SITES"]
    yield llm
    llm.llm_engine.engine_core.shutdown(timeout=30)


@pytest.fixture(scope="session")
def recorded_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the sink `recorded` of the session's server writes."""
    return tmp_path_factory.mktemp("recorded") / "store"


@pytest.fixture(scope="session")
def alerts_webhook(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Webhook]:
    """Where the session's server sends alarms of what acts on all requests."""
    with webhook(tmp_path_factory.mktemp("alerts") / "dead.jsonl") as made:
        yield made


@pytest.fixture(scope="session")
def lens_server_url(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    recorded_folder: Path,
    alerts_webhook: Webhook,
) -> Iterator[str]:
    """Address of one API server for the whole session; the model is `organism/checkpoint`.

    It takes LoRA adapters at run time, runs hooks, and serves all sites.
    """
    if (running := request.config.getoption("--lens-server")) is not None:
        yield str(running)
        return
    options = {
        "model": MODEL,
        "dtype": "float32",
        "kv_cache_memory_bytes": KV_CACHE_BYTES,
        "enable_scale_out": True,  # the route of token ids
        "enable_lora": True,
        "max_loras": 4,
        "max_lora_rank": MAX_LORA_RANK,
    }
    environment = os.environ | {
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
        "INSPECT_LENS_ALLOW_CODE": "1",
        # Small enough to be filled, and for whoever fetches what he asks for.
        "INSPECT_LENS_STORE_BYTES": str(STORE_BYTES),
        # The organism's truth vector belongs to the output of an attention.
        "INSPECT_LENS_SITES": "resid_pre,q,k,v,z,attn_out,resid_mid,mlp_hidden,mlp_out,resid_post",
    }
    # Alarms go to a webhook; nothing acts on all requests until a test says so.
    environment["INSPECT_LENS_SERVER"] = str(alerts_webhook.file(tmp_path_factory.mktemp("tier")))
    environment["INSPECT_LENS_ADMIN_KEY"] = ADMIN_KEY
    recorded = {"store": str(recorded_folder), "layers": [2, 4], "label_meaning": "a lie"}
    environment["INSPECT_LENS_SINKS"] = json.dumps({"recorded": recorded})
    log = tmp_path_factory.mktemp("server") / "server.log"
    with api_server(options, environment=environment, log=log, preloaded=True) as server:
        yield server.url
