"""The chat page before a server that is not there, not ours, or never ends."""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import numpy as np
import pytest

from inspect_lens._base.http import json_bytes
from inspect_lens._base.partial import PARTIAL_KEY
from inspect_lens.errors import CaptureError, LensError, SpecError
from inspect_lens.spec import Add, EngineEdits, Receipt
from inspect_lens.view import ChatPage, open_talk
from inspect_lens.view._chat_talk import ChatSetup, ChatTalk, _spread

NORTH = Add(vector=np.ones(4, np.float32), layers=[3], scale=2.5)


class Endless(ThreadingHTTPServer):
    """Has a model of 12 layers whose answers never end."""

    daemon_threads = True

    def __init__(self, engine: Any) -> None:
        super().__init__(("127.0.0.1", 0), Answers)
        self.engine, self.gone = engine, threading.Event()
        self.bodies: list[dict[str, Any]] = []
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Answers(BaseHTTPRequestHandler):
    server: Endless

    def do_GET(self) -> None:
        known = {
            "/v1/models": {"data": [{"id": "toy"}]},
            "/v1/inspect_lens": self.server.engine and {"engines": [self.server.engine]},
            "/v1/inspect_lens/registry": {
                "lies": {"$lens": "probe/1", "threshold": 0.5, "aggregate": "last"},
                "means": {"$lens": "probe/1", "threshold": 0.5, "aggregate": "mean"},
                "tuned": {"$lens": "lens/1"},
                "north": EngineEdits(edits=(NORTH,)).reference(),
            },
        }
        answer = known.get(self.path)
        self.send_response(200 if answer else 404)
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())

    def do_POST(self) -> None:
        self.server.bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(200)
        self.end_headers()
        # The second is NaN in the engine.
        tokens = [{"token": " a", "logprob": -0.5}, {"token": " b", "logprob": None}]
        choice = {"delta": {"content": " a"}, "logprobs": {"content": tokens}, "token_ids": [7, 8]}
        scores = {"index": 0, "probes": {"lies": [float("nan"), 0.25]}}
        read = {"name": "lies", "sha256": "0", "aggregate": "max", "score": math.inf, "n_tokens": 2}
        told = {"n_prompt": 1, "n_completion": 2, "probes": [read], "cache_salted": False}
        told |= {"paths": [], "engine": "e", "version": "0", "vllm_version": "0"}
        receipt = Receipt.model_validate(told)
        done = {"inspect_lens": receipt.model_dump()}
        try:
            while not self.server.gone.wait(0.005):
                for event in ({"choices": [choice]}, {PARTIAL_KEY: [scores]}, done):
                    self.wfile.write(b"data: %b\n\n" % json_bytes(event))
        except OSError:
            self.server.gone.set()

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Endless]:
    made = Endless({"layers": list(range(12))})
    yield made
    made.gone.set()
    made.shutdown()
    made.server_close()


def test_who_stops_an_answer_stops_the_server(server: Endless) -> None:
    talk = open_talk(server.url, model="vllm-lens/toy", probe="lies", lens="tuned")
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 9, "temperature": 0.5}
    with ChatPage(talk) as page:
        key = {"X-Inspect-Lens-Key": page.url.partition("key=")[2]}
        url = page.url.partition("?")[0] + "answer"
        with httpx.stream("POST", url, json=body, headers=key) as answer:
            lines = answer.iter_lines()
            first, second, third = (json.loads(next(lines)) for _ in range(3))
            assert not server.gone.is_set()
        assert server.gone.wait(10), "the server is told that nobody reads on"
    assert first["tokens"] == [
        {"text": " a", "p": pytest.approx(0.6065, abs=1e-4), "id": 7},
        {"text": " b", "p": None, "id": 8},
    ]
    assert second == {"event": "scores", "scores": [None, 0.25]}, "NaN is no JSON"
    assert third == {"event": "pooled", "score": None, "aggregate": "max"}, "nor is infinity"
    (asked,) = server.bodies
    assert (asked["model"], asked["max_tokens"], asked["temperature"]) == ("toy", 9, 0.5)
    assert asked["inspect_lens"] == {
        "probes": [{"name": "lies", "tokens": True}],
        "lens": {"name": "tuned", "layers": "all", "top_k": 5, "positions": "completion"},
    }


def test_a_probe_alone_and_neither(server: Endless) -> None:
    talk = open_talk(server.url, probe="lies", layers=[])
    assert (talk.setup.layers, talk.setup.threshold) == ((), 0.5)
    talk.close()
    talk = open_talk(server.url, probe="means", layers=[])
    assert talk.setup.threshold == 0.0, "one for a running mean says nothing of single tokens"
    talk.close()
    talk = open_talk(server.url)
    assert talk.setup.layers == (0, 2, 4, 7, 9, 11)
    assert talk.setup.probe is None
    talk.close()


@pytest.mark.parametrize(
    ("given", "asked", "sent"),
    [(None, None, 2.5), (1.5, None, 1.5), (1.5, -1, -1), (None, 0, None), (0, None, None)],
)
def test_a_registered_vector_has_its_own_scale_until_another_is_said(
    server: Endless, given: float | None, asked: float | None, sent: float | None
) -> None:
    talk = open_talk(server.url, layers=[], vector="north", scale=given)
    events = talk.answer([], max_tokens=1, temperature=0, scale=asked)
    next(events)
    events.close()
    talk.close()
    (body,) = server.bodies
    steered = [] if sent is None else [{"name": "north", "scale": sent}]
    assert body.get("inspect_lens", {}).get("edits_named", []) == steered


def test_a_scale_without_a_vector_is_refused_before_anything_is_sent(server: Endless) -> None:
    talk = open_talk(server.url, layers=[])
    with pytest.raises(SpecError, match="of which vector"):
        next(talk.answer([], max_tokens=1, temperature=0, scale=2))
    talk.close()
    assert server.bodies == []


def test_layers_are_spread_evenly_and_end_with_the_last() -> None:
    assert _spread([3]) == [3]
    assert _spread([1, 5, 9]) == [1, 5, 9]
    for n in range(1, 100):
        found = _spread(range(n))
        assert len(set(found)) == min(6, n)
        assert found == sorted(found)
        assert (found[-1], found[0]) == (n - 1, 0)


def test_names_of_other_kinds_are_refused(server: Endless) -> None:
    with pytest.raises(SpecError, match="probe='tuned': is registered there as lens/1"):
        open_talk(server.url, probe="tuned")
    with pytest.raises(SpecError, match="lens='lies'"):
        open_talk(server.url, lens="lies")
    with pytest.raises(SpecError, match=r"vector='lies': .* is no steering vector"):
        open_talk(server.url, vector="lies")
    with pytest.raises(SpecError, match="of which vector"):
        open_talk(server.url, scale=2)
    with pytest.raises(SpecError, match="allowed are toy"):
        open_talk(server.url, model="lens/other")


@pytest.mark.parametrize(
    ("engine", "message"),
    [(None, "without inspect-lens"), ({"not_served": "it pools"}, "this engine: it pools")],
)
def test_servers_that_cannot_are_named(engine: Any, message: str) -> None:
    made = Endless(engine)
    with pytest.raises(LensError, match=message):
        open_talk(made.url)
    made.shutdown()
    made.server_close()
    with pytest.raises(LensError, match="no server answers"):
        open_talk(made.url)


def test_a_port_that_is_taken_is_named(server: Endless) -> None:
    port = int(server.server_address[1])
    with pytest.raises(SpecError, match=f"port={port}: cannot be used"):
        ChatPage(open_talk(server.url), port=port)


def test_the_command_prints_the_address_and_ends_with_ctrl_c(server: Endless) -> None:
    command = [sys.executable, "-m", "inspect_lens._cli", "chat", "--base-url", server.url]
    command += ["--probe", "lies", "--layers", "2-4", "--no-browser"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            url = process.stdout.readline().strip()
            page = httpx.get(url)
            process.send_signal(signal.SIGINT)
            assert process.wait(30) == 0
        finally:
            process.kill()
    assert page.status_code == 200
    assert '"layers":[2,3,4]' in page.text
    with pytest.raises(httpx.ConnectError):
        httpx.get(url)


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        ({"probe": "lies"}, "scores of the probe"),
        ({"layers": (2,)}, "predictions of layers"),
        ({"vector": "north", "scale": 1.0}, "steering"),
    ],
)
def test_an_answer_without_what_was_asked_ends_in_an_error(
    asked: dict[str, Any], named: str
) -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, text="data: [DONE]\n\n")

    http = httpx.Client(base_url="http://lens", transport=httpx.MockTransport(answer))
    nothing: dict[str, Any] = {"probe": None, "lens": None, "layers": ()}
    setup = ChatSetup(model="toy", threshold=0.0, top_k=1, **(nothing | asked))
    with pytest.raises(CaptureError, match=named):
        list(ChatTalk(http, setup).answer([], max_tokens=1, temperature=0))
