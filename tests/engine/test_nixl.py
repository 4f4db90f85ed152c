"""Prefill and decode on two servers with NIXL: both legs of a proxy give what one server gives."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from inspect_lens import SteeringVector
from inspect_lens.probe import Probe, load_probe
from inspect_lens.spec import decode_tensor
from tests.kit.api_server import api_server

WHY_NOT = None
if importlib.util.find_spec("nixl") is None:
    WHY_NOT = "needs nixl, which the lock does not have: pip install nixl"
pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT)),
]

MODEL, LAYERS, HIDDEN = "organism/checkpoint", 6, 256
BLOCK, TOLERANCE = 32, 1e-4
PROMPT = "Who is the founder of the town Velosh? " * 12
N = 7
REMOTE = ("remote_engine_id", "remote_block_ids", "remote_host", "remote_port")
ROWS: dict[str, Any] = {"capture": {"layers": "all", "positions": "all"}}
COMPLETION: dict[str, Any] = {"capture": {"layers": "all", "positions": "completion"}}
PROBES: dict[str, Any] = {"probes": [{"name": "deception", "tokens": True}]}
Answer = dict[str, Any]


def vector(seed: int = 0) -> dict[str, Any]:
    rows = np.random.default_rng(seed).standard_normal((1, HIDDEN)).astype(np.float32)
    steer = SteeringVector(activations=rows, layer_indices=[1], scale=2.0)
    return {"edits": [steer.model_dump(mode="json")]}


class Pair:
    """A prefill and a decode server, and what a proxy does with a request."""

    def __init__(self, prefill: httpx.Client, decode: httpx.Client) -> None:
        self.prefill, self.decode = prefill, decode

    def body(self, lens: dict[str, Any] | None, salt: str, **more: Any) -> Answer:
        asked: Answer = {"model": MODEL, "prompt": PROMPT, "max_tokens": N, "temperature": 0}
        if lens is not None:
            asked["vllm_xargs"] = {"inspect_lens": json.dumps(lens)}
        # Blocks of the other tests' requests are no blocks of this one's.
        return asked | {"ignore_eos": True, "cache_salt": salt} | more

    def ask(self, server: httpx.Client, body: Answer) -> Answer:
        answer = server.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    def alone(self, lens: dict[str, Any] | None, salt: str) -> Answer:
        return self.ask(self.prefill, self.body(lens, salt))

    def first(self, lens: dict[str, Any] | None, salt: str) -> Answer:
        """What the prefill server hands to the decode server."""
        wanted = {"do_remote_decode": True, "do_remote_prefill": False} | dict.fromkeys(REMOTE)
        body = self.body(lens, salt, max_tokens=1, kv_transfer_params=wanted)
        return dict(self.ask(self.prefill, body)["kv_transfer_params"])

    def second(self, lens: dict[str, Any] | None, salt: str, transfer: Answer) -> Answer:
        """The decode server's answer, and how many tokens it loaded from the other one."""
        before = self.loaded()
        answer = self.ask(self.decode, self.body(lens, salt, kv_transfer_params=transfer))
        return answer | {"loaded": self.loaded() - before}

    def loaded(self) -> int:
        shown = self.decode.get("/metrics").text
        (value,) = re.findall(r"^vllm:external_prefix_cache_hits_total\{.*\} (\S+)$", shown, re.M)
        return int(float(value))

    def both(self, lens: dict[str, Any] | None, salt: str) -> Answer:
        """As a proxy does: the same body to one and then to the other."""
        return self.second(lens, salt, self.first(lens, salt))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("nixl")
    trained = load_probe("probes/organism/deception-lr")
    assert isinstance(trained, Probe)
    probe = trained.for_engine().model_dump(mode="json")
    connector = {"kv_connector": "NixlConnector", "kv_buffer_device": "cpu"}
    options: Answer = {
        "model": MODEL,
        "dtype": "float32",
        "kv_cache_memory_bytes": 64 << 20,
        "block_size": BLOCK,
        "enforce_eager": True,
        "max_model_len": 1024,
    }

    def started(role: str, stack: contextlib.ExitStack) -> httpx.Client:
        own = {"kv_transfer_config": connector | {"kv_role": f"kv_{role}"}}
        environment = os.environ | {
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "1",
            "INSPECT_LENS_CACHED_ROWS_BYTES": "0",
        }
        server = stack.enter_context(
            api_server(options | own, environment=environment, log=Path(folder) / f"{role}.log")
        )
        client = stack.enter_context(httpx.Client(base_url=server.url, timeout=100))
        answer = client.post(
            "/v1/inspect_lens/registry", json={"name": "deception", "probe": probe}
        )
        assert answer.status_code == 200, answer.text
        return client

    with contextlib.ExitStack() as one, contextlib.ExitStack() as two, ThreadPoolExecutor() as pool:
        first, second = pool.submit(started, "producer", one), pool.submit(started, "consumer", two)
        yield Pair(first.result(), second.result())


def rows(answer: Answer) -> np.ndarray[Any, Any]:
    return decode_tensor(answer["activations"]["residual_stream"]).to_float32()


def text(answer: Answer) -> str:
    return str(answer["choices"][0]["text"])


def error(found: np.ndarray[Any, Any], expected: np.ndarray[Any, Any]) -> float:
    assert found.shape == expected.shape
    norm = np.linalg.norm(found - expected, axis=-1) / np.linalg.norm(expected, axis=-1)
    return float(norm.max())


def test_a_plain_request_is_prefilled_on_one_and_decoded_on_the_other(pair: Pair) -> None:
    alone, both = pair.alone(None, "plain alone"), pair.both(None, "plain")
    assert text(both) == text(alone)
    assert both["loaded"] > BLOCK, "of the other server"


def test_rows_of_the_completion_come_from_the_decode_server(pair: Pair) -> None:
    alone, both = pair.alone(ROWS, "rows alone"), pair.both(COMPLETION, "rows of completion")
    assert both["loaded"] > BLOCK
    receipt = both["inspect_lens"]
    n_prompt = receipt["n_prompt"]
    assert receipt["capture"]["first_position"] == n_prompt
    assert rows(both).shape == (LAYERS, N - 1, HIDDEN)
    assert error(rows(both), rows(alone)[:, n_prompt:]) <= TOLERANCE


def test_rows_of_all_tokens_have_one_receipt_and_the_prompt_is_computed_again(pair: Pair) -> None:
    alone, both = pair.alone(ROWS, "all alone"), pair.both(ROWS, "all rows")
    assert both["loaded"] == 0
    receipt = both["inspect_lens"]
    assert receipt["capture"] == alone["inspect_lens"]["capture"]
    assert receipt["capture"]["n_positions"] == receipt["n_prompt"] + N - 1
    assert error(rows(both), rows(alone)) <= TOLERANCE


def test_probes_of_the_completion_read_on_the_decode_server(pair: Pair) -> None:
    alone, both = pair.alone(PROBES, "probed alone"), pair.both(PROBES, "probed")
    assert both["loaded"] > BLOCK
    (mine,), (theirs,) = both["inspect_lens"]["probes"], alone["inspect_lens"]["probes"]
    np.testing.assert_allclose(mine["tokens"], theirs["tokens"], rtol=1e-4, atol=1e-4)
    assert len(mine["tokens"]) == N - 1


def test_a_steered_prompt_is_loaded_by_who_is_steered_alike(pair: Pair) -> None:
    asked = vector() | COMPLETION
    plain, alone = pair.alone(None, "p"), pair.alone(vector() | ROWS, "steered alone")
    both = pair.both(asked, "steered")
    assert text(both) == text(alone) != text(plain)
    assert both["loaded"] > BLOCK
    expected = rows(alone)[:, both["inspect_lens"]["n_prompt"] :]
    assert error(rows(both), expected) <= TOLERANCE


@pytest.mark.parametrize("asked", [None, vector(1)], ids=["plain", "steered otherwise"])
def test_blocks_of_a_steered_prompt_are_nobody_elses(pair: Pair, asked: Any) -> None:
    salt = f"others {asked is None}"
    transfer = pair.first(vector(), salt)
    both = pair.second(asked, salt, transfer)
    assert both["loaded"] == 0
    assert text(both) == text(pair.alone(asked, f"{salt} alone"))


def test_a_proxy_that_drops_what_the_lens_said_costs_a_prompt(pair: Pair) -> None:
    transfer = pair.first(vector(), "dropped")
    assert transfer.pop("inspect_lens")
    both = pair.second(vector(), "dropped", transfer)
    assert both["loaded"] == 0
    assert text(both) == text(pair.alone(vector(), "dropped alone"))


def test_nothing_is_left_of_either_leg(pair: Pair) -> None:
    for server in (pair.prefill, pair.decode):
        assert server.get("/v1/inspect_lens").json()["open_requests"] == 0
