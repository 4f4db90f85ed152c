"""Two API servers of one engine, traced: one of them is stopped, and then the worker is killed."""

from __future__ import annotations

import json
import os
import signal
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import pytest

from tests.engine.test_kills import LAYERS, MODEL, OPTIONS, stop_and_kill
from tests.kit.api_server import ApiServer, api_server
from tests.kit.trace_collector import Collector, collector
from tests.kit.waiting import until

# The start has a limit of its own, which a loaded machine does not reach.
pytestmark = [pytest.mark.engine, pytest.mark.timeout(900, func_only=True)]


@dataclass
class Server:
    """One of the API servers, and a client whose connections only it has accepted."""

    pid: int
    client: httpx.Client

    def ask(self, n: int = 40, *, captures: bool = True, **headers: str) -> httpx.Response:
        lens = {"output_residual_stream": True, "activations_transport": "binary"}
        body = {"model": MODEL, "prompt": "hello there", "max_tokens": n, "ignore_eos": True}
        if captures:
            body["vllm_xargs"] = {k: str(v).lower() for k, v in lens.items()}
        return self.client.post("/v1/completions", json=body, headers=headers)


@dataclass
class Servers:
    """Both, and the process that started them."""

    whole: ApiServer
    log: Path
    temporary: Path
    each: list[Server]
    traces: Collector


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    log = tmp_path_factory.mktemp("servers") / "server.log"
    with tempfile.TemporaryDirectory(prefix="kill-") as temporary, collector() as traces:
        # Room for the rows of 160 tokens.
        own = {"INSPECT_LENS_SHM_BYTES": str(160 * LAYERS * 1024), "TMPDIR": temporary}
        environment = os.environ | own | traces.environment
        options = OPTIONS | {"otlp_traces_endpoint": traces.url}
        with api_server(options, environment=environment, log=log) as server:
            each = _each(server)
            yield Servers(server, log, Path(temporary), each, traces)
            for one in each:
                one.client.close()


def _each(server: ApiServer) -> list[Server]:
    port = int(server.url.rpartition(":")[2])

    def listening() -> list[int]:
        below = psutil.Process(server.pid).children(recursive=True)
        return [child.pid for child in below if _listens(child.pid, port)]

    assert until(lambda: len(listening()) == 2, 600.0), _titles(server.pid)
    pids = listening()
    made = []
    for pid, other in (pids, pids[::-1]):
        # While the other one is stopped, this one takes the connection.
        os.kill(other, signal.SIGSTOP)
        try:
            limits = httpx.Limits(max_connections=1, keepalive_expiry=600)
            client = httpx.Client(base_url=server.url, timeout=150, limits=limits)
            assert client.get("/health").status_code == 200
        finally:
            os.kill(other, signal.SIGCONT)
        made.append(Server(pid, client))
    return made


def _listens(pid: int, port: int) -> bool:
    try:
        found = psutil.Process(pid).net_connections("tcp")
    except psutil.Error:
        return False
    return any(c.status == psutil.CONN_LISTEN and c.laddr.port == port for c in found)


def _titles(pid: int) -> list[str]:
    children = psutil.Process(pid).children(recursive=True)
    return [" ".join(child.cmdline())[:80] for child in children]


def whole(answer: httpx.Response, n: int) -> bool:
    assert answer.status_code == 200, answer.text
    receipt = answer.json()["inspect_lens"]
    fed = receipt["n_prompt"] + n - 1
    return bool(receipt["capture"]["rows"] == LAYERS * fed)


def test_spans_of_each_server_stand_in_the_trace_of_the_client(servers: Servers) -> None:
    parent = "b7ad6b7169203331"
    for i, server in enumerate(servers.each):
        trace = f"0af7651916cd43dd8448eb211c80319{i}"
        headers = {"traceparent": f"00-{trace}-{parent}-01"}
        answer = server.ask(**headers).json()
        (entry,) = answer["activations"].values()
        fetched = server.client.get(f"/v1/activations/{entry['handle']}")
        assert server.ask(captures=False, **headers).status_code == 200
        wrong = {"model": MODEL, "prompt": "a", "inspect_lens": {"capture": {"layers": [99]}}}
        refused = server.client.post("/v1/completions", json=wrong, headers=headers)
        assert refused.status_code == 400
        spans = servers.traces.of(trace, 5)
        plain = [span for span in spans if span.name == "llm_request"]
        refusal, ours = sorted(
            (span for span in spans if span.name == "inspect_lens_request"),
            key=lambda span: not span.is_error,
        )
        assert sorted(span.parent for span in plain) == sorted([parent, ours.id]), (
            "of a plain request the client's, and of ours this one"
        )
        assert ours.parent == parent
        assert ours.attributes["inspect_lens.layers"] == list(range(LAYERS))
        assert ours.attributes["inspect_lens.rows"] == answer["inspect_lens"]["capture"]["rows"]
        (fetch,) = [span for span in spans if span.name == "inspect_lens_fetch"]
        assert fetch.parent == ours.id
        assert fetch.attributes["inspect_lens.bytes"] == len(fetched.content)
        assert refusal.parent == parent
        assert refusal.is_error
        assert refusal.attributes["http.response.status_code"] == 400


def test_what_a_stopped_server_has_under_way_holds_nobody_up(servers: Servers) -> None:
    assert all(whole(server.ask(), 40) for server in servers.each)
    # Connections of now: one that was closed and made anew may lead to the other server.
    stopped, other = servers.each[:] = _each(servers.whole)
    # Of more rows than there is room for, and of more tokens than come before the server stands.
    body = {"model": MODEL, "prompt": "hello there", "max_tokens": 900, "ignore_eos": True}
    body |= {"stream": True, "inspect_lens": {"capture": {"layers": "all"}}}
    with stopped.client.stream("POST", "/v1/completions", json=body) as held:
        lines = held.iter_lines()
        next(lines)
        os.kill(stopped.pid, signal.SIGSTOP)
        try:
            for _ in range(8):
                assert whole(other.ask(), 40)
                assert other.ask(captures=False).status_code == 200
        finally:
            os.kill(stopped.pid, signal.SIGCONT)
        said = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    if errors := [event["error"] for event in said if "error" in event]:
        assert [error["code"] for error in errors] == [429]
        assert "try again" in errors[0]["message"]
    else:  # nobody has needed its room
        (receipt,) = [event["inspect_lens"] for event in said if "inspect_lens" in event]
        assert receipt["capture"]["rows"] == LAYERS * (receipt["n_prompt"] + 900 - 1)
    assert whole(stopped.ask(), 40)
    assert whole(other.ask(), 40)


def test_a_worker_that_is_killed(servers: Servers) -> None:
    """The engine and both servers end after it, so it is the last test of them."""
    stop_and_kill("Worker", servers.whole, servers.log, servers.temporary)
