from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from inspect_ai.model import get_model

from inspect_lens.model import _server, lens_config
from inspect_lens.model._host import VLLMServer, _vllm_servers
from inspect_lens.model._scope import steering_around
from inspect_lens.model._server import weights_of
from tests.kit.fake_server import FakeLensServer
from tests.kit.repository import ROOT

from .conftest import GetModel


@pytest.mark.anyio
async def test_two_urls_of_one_model_are_two_servers(model_of: GetModel) -> None:
    with FakeLensServer() as one, FakeLensServer() as two:
        first, second = model_of(one), model_of(two)
        await first.generate("to one")
        await second.generate("to two")
        await first.generate("to one again")
        assert (len(one.requests), len(two.requests)) == (2, 1)


@pytest.mark.anyio
async def test_the_builtin_provider_keeps_its_own_server(model_of: GetModel) -> None:
    _vllm_servers.pop("org/both", None)
    with FakeLensServer(model="org/both") as lens, FakeLensServer(model="org/both") as plain:
        ours = model_of(lens)
        assert lens.model not in _vllm_servers
        theirs = get_model(f"vllm/{plain.model}", base_url=f"{plain.url}/v1", memoize=False)
        await ours.generate("ours")
        await theirs.generate("theirs")
        assert (len(lens.requests), len(plain.requests)) == (1, 1)


@pytest.mark.anyio
@pytest.mark.parametrize("suffix", ["", "/", "/v1", "/v1/"])
async def test_a_url_needs_no_v1(server: FakeLensServer, suffix: str) -> None:
    model = get_model("lens/org/tiny", base_url=server.url + suffix, memoize=False)
    await model.generate("hello")
    assert server.paths == ["/v1/chat/completions"]


@pytest.mark.anyio
async def test_the_environment_names_a_server(
    server: FakeLensServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_BASE_URL", server.url)
    output = await get_model("vllm-lens/org/tiny", memoize=False).generate(
        "hello", config=lens_config(capture=[1])
    )
    assert output.metadata["activations"].layers == (1,)


@pytest.mark.anyio
async def test_the_api_key_is_sent_everywhere() -> None:
    with FakeLensServer(api_key="secret") as server:
        model = get_model("lens/org/tiny", base_url=server.url, api_key="secret", memoize=False)
        config = lens_config(capture={"layers": [1], "transport": "binary"})
        output = await model.generate("hello", config=config)
        assert output.metadata["activations"].numpy().shape == (1, 4, 8)


def test_making_a_model_starts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_server, "start_local_server", lambda *_, **__: pytest.fail("started"))
    model = get_model("lens/org/another", capture=[1], gpu_memory_utilization=0.5, memoize=False)
    assert model.api.max_connections() >= 32
    assert model.api.base_url is None


def test_the_command_and_its_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}

    def start(command: list[str], **options: Any) -> tuple[str, Any, int]:
        seen.update(options, command=command)
        return "http://localhost:1/v1", None, 1

    monkeypatch.setattr(_server, "start_local_server", start)
    args = {
        "kv_cache_memory_bytes": 1 << 28,
        "enforce_eager": True,
        "max_model_len": 512,
        "hf_overrides": {"a": 1},
        "device": "0,1",
        "timeout": 5,
    }
    record = VLLMServer(enable_lora=True, max_lora_rank=16)
    _server.start_server("org/tiny", port=None, api_key="k", server=record, args=args)
    assert seen["command"] == [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", "org/tiny", "--host", "127.0.0.1"),
    ], "the key is in no list of processes, and in no error"
    assert seen["env"]["VLLM_API_KEY"] == "k"
    assert seen["server_args"] == {
        "kv_cache_memory_bytes": 1 << 28,
        "enforce_eager": True,
        "max_model_len": 512,
        "hf_overrides": json.dumps({"a": 1}),
        "tensor_parallel_size": 2,
        "enable_lora": True,
        "max_lora_rank": 16,
        "max_loras": 2,
    }
    assert seen["timeout"] == 5
    assert seen["env"]["CUDA_VISIBLE_DEVICES"] == "0,1"
    assert seen["env"]["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "True"
    assert seen["env"]["INSPECT_LENS_PARENT"] == str(os.getpid()), "it ends with this process"
    assert args["timeout"] == 5, "a restart needs them again"


TOKEN = 2 * 6 * 256 * 4
"""Bytes of keys and values of a token, below."""


@pytest.mark.parametrize("chosen", [{}, {"kv-cache-memory-bytes": 1 << 28}, {"timeout": 5}])
@pytest.mark.parametrize("is_cpu", [True, False])
def test_a_server_on_cpus_asks_for_memory_that_is_free(
    monkeypatch: pytest.MonkeyPatch, chosen: dict[str, Any], is_cpu: bool
) -> None:
    seen: dict[str, Any] = {}

    def start(command: list[str], **options: Any) -> tuple[str, Any, int]:
        seen.update(options)
        return "http://localhost:1/v1", None, 1

    monkeypatch.setattr(_server, "start_local_server", start)
    monkeypatch.setattr(_server, "is_for_cpus", lambda: is_cpu)
    free = SimpleNamespace(available=6 << 30, total=24 << 30)
    monkeypatch.setattr(_server.psutil, "virtual_memory", lambda: free)
    _server.start_server("org/tiny", port=None, api_key="k", server=VLLMServer(), args=chosen)
    asks = is_cpu and "kv-cache-memory-bytes" not in chosen
    assert seen["server_args"].get("gpu_memory_utilization") == (0.2 if asks else None)


@pytest.mark.parametrize(
    ("length", "free", "cache"),
    [
        (1024, 8 << 30, 8 * 1024 * TOKEN),  # eight of the longest contexts
        (16, 8 << 30, 64 << 20),
        (65536, 8 << 30, 2 << 30),  # a quarter of what is free
        (65536, 2 << 30, 2 * 65536 * TOKEN),  # one context has to fit, and another one
        (65536, 1 << 30, (1 << 30) * 4 // 5),
        (-1, 8 << 30, 8 * 2048 * TOKEN),  # as long as the model can
        ("", 8 << 30, 8 * 2048 * TOKEN),
    ],
)
def test_a_cache_on_cpus_is_as_large_as_the_model_and_the_memory_ask(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, length: Any, free: int, cache: int
) -> None:
    config = {"num_hidden_layers": 6, "num_attention_heads": 4, "hidden_size": 256}
    config["max_position_embeddings"] = 2048
    (tmp_path / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr(_server, "is_for_cpus", lambda: True)
    memory = SimpleNamespace(available=free, total=24 << 30)
    monkeypatch.setattr(_server.psutil, "virtual_memory", lambda: memory)
    found = _server._memory_on_cpus(str(tmp_path), {"max-model-len": length})
    assert found == {"kv_cache_memory_bytes": cache}


_EVAL = """
import os, sys
from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.model import get_model
from inspect_ai.scorer import Score, mean, scorer
from inspect_lens.model import _server

_server.COMMAND = ("-m", "tests.kit.stub_vllm")
_server.GRACE_S = 0.2

@scorer(metrics=[mean()])
def one():
    async def run(state, target):
        if fails:
            raise RuntimeError("scorer fails")
        return Score(value=state.output.metadata["activations"].numpy().shape[0])
    return run

# Imports take seconds, so both evals are forks of one process.
for fails in (False, True):
    if not os.fork():
        break
    os.wait()
else:
    sys.exit()
print("fails", fails)
model = get_model("lens/org/tiny", capture=[1, 2])
print("before", model.api.base_url)
log = eval(Task(dataset=[Sample("hi"), Sample("ho")], scorer=one()), model=model, display="none")[0]
import psutil
print("after", model.api.base_url)
print("pids", *[p.pid for p in psutil.Process().children(recursive=True)])
print("status", log.status)
"""


@pytest.mark.slow
def test_no_process_is_left_behind(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _EVAL],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    succeeds, fails = done.stdout.partition("fails True")[::2]
    for printed, status in ((succeeds, "success"), (fails, "error")):
        said = dict(line.split(" ", 1) for line in printed.splitlines() if line.count(" ") >= 1)
        assert said.get("status") == status, done.stdout + done.stderr
        assert said["before"] == said["after"] == "None"
        pids = [int(pid) for pid in said["pids"].split()]
        assert len(pids) == 2, "the server and its child"
        alive = [pid for pid in pids if psutil.pid_exists(pid)]
        _, stay = psutil.wait_procs([psutil.Process(pid) for pid in alive], timeout=60)
        assert not stay


@pytest.mark.anyio
async def test_configurations_of_one_model_share_its_server(
    model_of: GetModel, tmp_path: Path
) -> None:
    """A server that the provider starts is that of the model, whatever name an eval chose."""
    assert weights_of("org/model@steered") == weights_of("org/model") == "org/model"
    (folder := tmp_path / "step@100").mkdir()
    assert weights_of(str(folder)) == str(folder), "a folder may be called so"
    with FakeLensServer(model="org/two") as server:
        url = f"{server.url}/v1"
        apis = [
            get_model(f"vllm-lens/org/two{name}", base_url=url, memoize=False).api
            for name in ("", "@steered")
        ]
        assert apis[0]._server is apis[1]._server
        assert [api.service_model_name() for api in apis] == ["org/two", "org/two@steered"]


def test_a_configuration_in_the_models_name_counts_as_steering_around_a_call() -> None:
    """A sweep would else take its answers for unsteered ones."""
    models = [
        get_model(f"vllm-lens/org/model{end}", base_url="http://localhost:9", memoize=False)
        for end in ("", "@careful")
    ]
    assert steering_around(models[0]) is None
    around = steering_around(models[1])
    assert "the server's configuration 'careful', which may steer" in str(around)
