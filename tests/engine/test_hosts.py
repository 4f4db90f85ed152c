"""Engines over two hosts: results as on one, to the bit; and a host that is lost."""

from __future__ import annotations

import functools
import json
import os
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest

from inspect_lens import SteeringVector
from inspect_lens._base.partial import PARTIAL_KEY
from inspect_lens.probe import Probe, load_probe
from inspect_lens.spec import TensorData, decode_tensor
from tests.kit.api_server import api_server
from tests.kit.two_hosts import FIRST, TwoHosts, two_hosts, why_not

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(why_not() is not None, reason=str(why_not())),
    pytest.mark.nightly(
        held_by=(
            "tests/unit/engine/step/test_far_steps.py::test_results_are_those_of_one_host",
            "tests/unit/engine/step/test_far_steps.py::"
            "test_a_worker_that_goes_fails_what_it_has_under_way_and_nothing_else",
            "tests/unit/engine/export/test_links.py::"
            "test_a_worker_that_vanishes_is_known_to_have_gone_in_time",
            "tests/engine/test_parallel.py::test_rows_of_every_site_equal_hugging_face",
        ),
        why="two servers for each way, over two hosts",
    ),
]

MODEL, LAYERS, HIDDEN = "organism/checkpoint", 6, 256
TIMEOUT_S = 4.0
SITES = "resid_post,z"
PROMPTS = ["The town", "Who is the founder of the town Velosh? " * 6]
COMMON: dict[str, Any] = {
    "model": MODEL,
    "dtype": "float32",
    "kv_cache_memory_bytes": 64 << 20,
    "enforce_eager": True,
    "max_model_len": 1024,
}
ENVIRONMENT = os.environ | {
    "INSPECT_LENS_SITES": SITES,
    "INSPECT_LENS_HOSTS_KEY": "a secret of these two hosts",
    "INSPECT_LENS_HOSTS_TIMEOUT_S": str(TIMEOUT_S),
    # Rows of the second engine have to come from it, and not from an earlier answer of the first.
    "INSPECT_LENS_CACHED_ROWS_BYTES": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
}
STEP_S = 20.0
LEARN_S = 30.0
LIMITED = {"VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": f"{STEP_S:.0f}"}
"""How long vLLM waits for a step before it gives an engine up; 300 s by default."""
REGISTRY = "/v1/inspect_lens/registry"
TENSOR, PIPELINE = "tensor_parallel_size", "pipeline_parallel_size"
Answer = dict[str, Any]


@pytest.fixture
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoHosts]:
    with two_hosts(tmp_path_factory.mktemp("hosts")) as made:
        yield made


def nodes(**options: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Options of both hosts, for workers of one engine."""
    common = COMMON | options | {"nnodes": 2, "master_addr": FIRST, "master_port": free_port()}
    return common | {"node_rank": 0}, common | {"node_rank": 1}


def engines() -> tuple[dict[str, Any], dict[str, Any]]:
    """Options of both hosts, for an engine on each."""
    common = COMMON | {
        "data_parallel_size": 2,
        "data_parallel_size_local": 1,
        "data_parallel_address": FIRST,
        "data_parallel_rpc_port": free_port(),
    }
    return common, common | {"data_parallel_start_rank": 1}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((FIRST, 0))
        return int(probe.getsockname()[1])


def vector() -> dict[str, Any]:
    rows = np.random.default_rng(0).standard_normal((2, HIDDEN)).astype(np.float32)
    steer = SteeringVector(activations=rows, layer_indices=[1, LAYERS - 1], scale=2.0)
    return dict(steer.model_dump(mode="json"))


def body(kind: str, prompt: str, **more: Any) -> dict[str, Any]:
    lens: dict[str, Any] = {"capture": {"layers": "all", "site": SITES.split(",")}}
    if kind in ("steered", "streamed"):
        lens["edits"] = [vector()]
    if kind in ("probed", "streamed"):
        lens["probes"] = [{"name": "deception", "positions": "all", "tokens": True}]
    if kind == "alarm":
        stop = {"name": "deception", "aggregate": "last", "alarm": "stop", "threshold": -1e6}
        lens["probes"] = [stop]
    return {
        "model": MODEL,
        "prompt": prompt,
        "max_tokens": 7,
        "temperature": 0,
        "ignore_eos": True,
        "vllm_xargs": {"inspect_lens": json.dumps(lens)},
    } | more


def listening(pid: int) -> list[int]:
    """Ports of a process at the wire between the hosts."""
    found = psutil.Process(pid).net_connections("tcp")
    return [c.laddr.port for c in found if c.status == "LISTEN" and c.laddr.ip == FIRST]


def register(client: httpx.Client) -> None:
    trained = load_probe("probes/organism/deception-lr")
    assert isinstance(trained, Probe)
    probe = trained.for_engine().model_dump(mode="json")
    answer = client.post(REGISTRY, json={"name": "deception", "probe": probe})
    assert answer.status_code == 200, answer.text


def ask_all(client: httpx.Client, rank: int | None = None) -> dict[str, Answer]:
    """Each kind of request for each prompt, one at a time, so that all steps are alike."""
    headers = {} if rank is None else {"X-data-parallel-rank": str(rank)}
    found: dict[str, Answer] = {}
    for kind in ("plain", "steered", "probed", "streamed"):
        for i, prompt in enumerate(PROMPTS):
            # Prefixes in the cache would cut the prompt's step.
            salted = body(kind, prompt, cache_salt=f"{rank} {kind} {i}", stream=kind == "streamed")
            answer = client.post("/v1/completions", json=salted, headers=headers)
            assert answer.status_code == 200, answer.text
            found[f"{kind} {i}"] = joined(answer) if kind == "streamed" else answer.json()
    ends_with_its_alarm(client, headers)
    return found


def joined(answer: httpx.Response) -> Answer:
    """A stream as one answer, with the scores that came beside the tokens."""
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    assert lines.pop() == "[DONE]"
    events = list(map(json.loads, lines))
    texts = [choice["text"] for event in events for choice in event["choices"]]
    parts = [part for event in events for part in event.get(PARTIAL_KEY, ())]
    (last,) = [event for event in events if "inspect_lens" in event]
    scores = [score for part in parts for score in part["probes"]["deception"]]
    return {**last, "choices": [{"text": "".join(texts)}], "scores": scores}


def ends_with_its_alarm(client: httpx.Client, headers: dict[str, str]) -> None:
    asked = body("alarm", PROMPTS[0], max_tokens=200)
    answer = client.post("/v1/completions", json=asked, headers=headers).json()
    assert answer["choices"][0]["stop_reason"] == "inspect_lens:alarm:deception"
    receipt = answer["inspect_lens"]
    assert receipt["n_completion"] < 200
    assert receipt["probes"][0]["stopped"]
    assert receipt["probes"][0]["alarm_position"] == receipt["n_prompt"]


def tensors(answer: Answer) -> dict[str, TensorData]:
    return {name: decode_tensor(one) for name, one in answer["activations"].items()}


def check_same(found: dict[str, Answer], expected: dict[str, Answer]) -> None:
    assert found.keys() == expected.keys()
    for kind, answer in found.items():
        other = expected[kind]
        assert answer["choices"][0]["text"] == other["choices"][0]["text"]
        ours, theirs = tensors(answer), tensors(other)
        assert ours.keys() == theirs.keys()
        for name, tensor in ours.items():
            assert tensor.shape[1] == answer["inspect_lens"]["n_prompt"] + 6
            assert np.abs(tensor.storage).max() > 0
            np.testing.assert_array_equal(tensor.storage, theirs[name].storage, err_msg=kind)
        for part in ("capture", "steer", "probes"):
            assert answer["inspect_lens"].get(part) == other["inspect_lens"].get(part), (kind, part)
        assert answer.get("scores") == other.get("scores"), kind
    steered = tensors(found["steered 0"])["residual_stream"].storage
    assert not np.array_equal(steered, tensors(found["plain 0"])["residual_stream"].storage)
    assert found["steered 0"]["inspect_lens"]["steer"]["n_tokens"] > 0
    assert len(found["probed 0"]["inspect_lens"]["probes"][0]["tokens"]) > 0
    streamed = found["streamed 0"]
    assert streamed["scores"] == streamed["inspect_lens"]["probes"][0]["tokens"]


def client_of(url: str) -> httpx.Client:
    return httpx.Client(base_url=url, timeout=100)


@functools.cache
def answers_of_one_host(way: str) -> dict[str, Answer]:
    """Of an engine with two workers, which all tests of this session compare with."""
    with (
        tempfile.TemporaryDirectory(prefix="one-") as folder,
        api_server(COMMON | {way: 2}, environment=ENVIRONMENT, log=Path(folder) / "log") as server,
        client_of(server.url) as client,
    ):
        register(client)
        return ask_all(client)


@pytest.fixture
def on_one_host(request: pytest.FixtureRequest) -> dict[str, Answer]:
    return answers_of_one_host(getattr(request, "param", TENSOR))


@pytest.mark.parametrize(
    ("on_one_host", "lose", "limits"),
    [
        # The other rank of a tensor-parallel step is missed at once, and vLLM ends the engine.
        (TENSOR, TwoHosts.cut_power, {"lens": 2 * TIMEOUT_S, "plain": 2 * TIMEOUT_S}),
        # A stage is missed by the lens, and by vLLM once a step has taken too long.
        (PIPELINE, TwoHosts.cut_power, {"lens": 2 * TIMEOUT_S, "plain": 2 * STEP_S}),
        (PIPELINE, TwoHosts.cut_wire, {"lens": 2 * TIMEOUT_S, "plain": 2 * STEP_S}),
    ],
    indirect=["on_one_host"],
    ids=["tensor-power", "pipeline-power", "pipeline-wire"],
)
def test_ranks_on_two_hosts_and_one_that_is_lost(
    hosts: TwoHosts,
    on_one_host: dict[str, Answer],
    lose: Callable[[TwoHosts], None],
    limits: dict[str, float],
    request: pytest.FixtureRequest,
) -> None:
    way = request.node.callspec.params["on_one_host"]
    first, second = nodes(**{way: 2})
    with (
        tempfile.TemporaryDirectory(prefix="lens-", dir="/tmp") as folder,
        hosts.server(first, second, ENVIRONMENT | LIMITED | {"TMPDIR": folder}) as server,
        client_of(server.url) as client,
    ):
        register(client)
        check_same(ask_all(client), on_one_host)
        tree = [psutil.Process(server.pid), *psutil.Process(server.pid).children(recursive=True)]

        def long(kind: str) -> tuple[str, float]:
            asked = body(kind, PROMPTS[0], max_tokens=900, stream=kind == "streamed")
            if kind == "none":
                del asked["vllm_xargs"]
            answer = client.post("/v1/completions", json=asked)
            assert answer.status_code == (200 if kind == "streamed" else 500), answer.text
            assert '"error"' in answer.text, "nobody gets a part for the whole"
            return answer.text, time.monotonic()

        kinds = ["plain", "steered", "streamed", "none"]
        with ThreadPoolExecutor(len(kinds)) as pool:
            lost = {kind: pool.submit(long, kind) for kind in kinds}
            time.sleep(0.9)
            assert not any(one.done() for one in lost.values())
            began = time.monotonic()
            lose(hosts)
            for kind, one in lost.items():
                text, when = one.result()
                assert when - began < limits["plain" if kind == "none" else "lens"], kind
                if way == PIPELINE and kind != "none":
                    assert "CaptureError: a worker on another host has gone" in text
        _, alive = psutil.wait_procs(tree, timeout=LEARN_S)
        assert not alive, "vLLM ends the server"
        hosts.cut_power()
        assert not [name for name in os.listdir(folder) if "inspect-lens" in name]
    assert not hosts.pids_of_second()


def test_engines_on_two_hosts_and_one_that_is_lost(hosts: TwoHosts) -> None:
    first, second = engines()
    with (
        tempfile.TemporaryDirectory(prefix="lens-", dir="/tmp") as folder,
        hosts.server(first, second, ENVIRONMENT | {"TMPDIR": folder}) as server,
        client_of(server.url) as client,
    ):
        register(client)
        here = ask_all(client, rank=0)
        check_same(ask_all(client, rank=1), here)

        def long(rank: int) -> tuple[httpx.Response, float]:
            asked = body("steered", PROMPTS[0], max_tokens=900)
            answer = client.post(
                "/v1/completions", json=asked, headers={"X-data-parallel-rank": str(rank)}
            )
            return answer, time.monotonic()

        with ThreadPoolExecutor(4) as pool:
            lost = [pool.submit(long, 1) for _ in range(3)]
            kept = pool.submit(long, 0)
            time.sleep(0.7)
            began = time.monotonic()
            hosts.cut_wire()
            for answer, when in [one.result() for one in lost]:
                assert answer.status_code == 500, answer.text
                assert "CaptureError: a worker on another host has gone" in answer.text
                assert when - began < 2 * TIMEOUT_S
            assert kept.result()[0].status_code == 200
        # One that vLLM still sends there ends, too, and the host that is left goes on.
        answer, when = long(1)
        assert "a worker on another host has gone" in answer.text
        # A server closes connections on which it has answered with a fault.
        with client_of(server.url) as another:
            check_same(ask_all(another, rank=0), here)
            assert another.get("/v1/inspect_lens").json()["open_requests"] == 0
        listens = [(FIRST, port) for port in listening(server.pid)]
        assert listens, "for the other host"
        server_process = psutil.Process(server.pid)
        server_process.terminate()
        server_process.wait(30)
        hosts.cut_power()
        assert not [name for name in os.listdir(folder) if "inspect-lens" in name]
        for address in listens:
            with socket.socket() as probe:
                assert probe.connect_ex(address) != 0, "its port is closed"
    assert not hosts.pids_of_second()
