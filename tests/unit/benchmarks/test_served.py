"""The client of a served benchmark: what it asks for, fetches, and does not let pass."""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import served
from benchmarks.served import BYTES, ROWS, Served, check, joined
from benchmarks.shapes import SHAPES
from inspect_lens.spec import parse_extra_args
from tests.kit.api_server import ApiServer
from tests.kit.waiting import until

SHAPE = SHAPES["tiny"]
N_AT_ONCE = 6


class Fake(ThreadingHTTPServer):
    """Answers as a lens server does, with rows of zeros."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answers)
        self.paths: list[str] = []
        self.registered: dict[str, Any] = {}
        self.bodies: list[dict[str, Any]] = []
        self.refused = ""
        self.at_once = 0
        self.most_at_once = 0
        self.lock = threading.Lock()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of a client that has given up."""

    def completion(self, asked: dict[str, Any]) -> dict[str, Any]:
        """One answer."""
        xargs = asked.get("vllm_xargs", {})
        answer: dict[str, Any] = {"usage": {"completion_tokens": asked["max_tokens"]}}
        n_fed = len(asked["prompt"]) + asked["max_tokens"] - 1
        receipt: dict[str, Any] = {}
        if "output_residual_stream" in xargs:
            layers = json.loads(xargs["output_residual_stream"])
            n_layers = SHAPE.layers if layers is True else len(layers)
            shape = [n_layers, n_fed, SHAPE.hidden]
            n_bytes = 4 * int(np.prod(shape))
            entry = {"shape": shape, "nbytes": n_bytes, "handle": f"h{n_bytes}"}
            answer["activations"] = {"residual_stream": entry}
        if "inspect_lens" in xargs:
            names = json.loads(xargs["inspect_lens"])["probes"]
            receipt["probes"] = [{"name": n, "n_tokens": asked["max_tokens"] - 1} for n in names]
        if "apply_steering_vectors" in xargs:
            receipt["steer"] = {"n_tokens": n_fed}
        return answer | ({"inspect_lens": receipt} if xargs else {})


class Answers(BaseHTTPRequestHandler):
    """One request."""

    server: Fake

    def do_POST(self) -> None:
        """Answer."""
        self.server.paths.append(self.path)
        content = self.rfile.read(int(self.headers["Content-Length"]))
        if self.path == "/v1/completions":
            with self.server.lock:
                self.server.at_once += 1
                self.server.most_at_once = max(self.server.most_at_once, self.server.at_once)
            asked = json.loads(content)
            self.server.bodies.append(asked)
            until(lambda: self.server.most_at_once == N_AT_ONCE)
            with self.server.lock:
                self.server.at_once -= 1
            if self.server.refused:
                self._answer(400, self.server.refused.encode())
                return
            self._answer(200, json.dumps(self.server.completion(asked)).encode())
            return
        if self.path.endswith("/registry"):
            item = json.loads(content)
            self.server.registered[item["name"]] = item["probe"]
        self._answer(200, b"{}")

    def do_GET(self) -> None:
        """Answer."""
        self.server.paths.append(self.path)
        if self.path == "/metrics":
            told = 'vllm:num_preemptions_total{engine="0",model_name="model"} 3.0\n'
            seconds = 3 * self.server.paths.count("/metrics")
            decode = f'vllm:request_decode_time_seconds_sum{{engine="0"}} {seconds}\n'
            self._answer(200, (told + decode).encode())
        else:
            self._answer(200, b"\0" * int(self.path.rpartition("/h")[2]))

    def _answer(self, status: int, content: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing."""


@pytest.fixture
def fake() -> Iterator[Fake]:
    server = Fake()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def made(fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Served:
    started: dict[str, Any] = {}

    @contextlib.contextmanager
    def api_server(options: Any, *, environment: Any, log: Path) -> Iterator[ApiServer]:
        started.update(options=options, environment=environment, log=log)
        yield ApiServer(f"http://127.0.0.1:{fake.server_address[1]}", os.getpid())

    monkeypatch.setattr(served, "api_server", api_server)
    options = {"model": str(SHAPE.write(tmp_path / "tiny")), "skip_tokenizer_init": True, "x": 1}
    made = Served("lens", SHAPE, options)
    assert started["options"]["x"] == 1
    assert "skip_tokenizer_init" not in started["options"]
    assert (tmp_path / "tiny" / "tokenizer.json").exists()
    assert started["environment"]["VLLM_SERVER_DEV_MODE"] == "1"
    return made


@pytest.mark.parametrize(
    "arm", ["idle", "capture-1", "capture-1-tcp", "capture-all", "steer", "probes-16x4"]
)
def test_an_arm_is_asked_for_at_once_fetched_and_checked(
    made: Served, fake: Fake, monkeypatch: pytest.MonkeyPatch, arm: str
) -> None:
    taken = list[str]()

    def here(handle: str) -> bytes:
        taken.append(handle)
        return b"\0" * int(handle.removeprefix("h"))

    monkeypatch.setattr(served, "fetch_here", here)
    run = made.run(arm, "smoke", 0, 20.0)
    assert run["tokens"] == 6 * 8
    assert run["preemptions"] == 0
    phases = run["phases"]
    assert 0 < phases["first answer began"] <= phases["last answer ended"] <= run["seconds"]
    assert phases["API server's CPU until the first answer"] >= 0
    # Each time that it is asked, the server has been at it for three seconds more.
    assert phases["decode, of each"] == pytest.approx(3.0 / 6)
    assert set(run["cpu_s"]) <= {"API server"}  # which is this process, too
    assert fake.most_at_once == N_AT_ONCE
    assert fake.paths.index("/reset_prefix_cache") < fake.paths.index("/v1/completions")
    fetched = sum(path.startswith("/v1/activations/") for path in fake.paths)
    assert fetched == (6 if arm.endswith("tcp") else 0)
    assert len(taken) == (6 if arm in ("capture-1", "capture-all") else 0)
    for asked in fake.bodies:
        wanted = parse_extra_args(asked.get("vllm_xargs"))
        assert (wanted is None) == (arm == "idle")


def test_a_refusal_is_told_with_what_the_server_said(made: Served, fake: Fake) -> None:
    fake.refused = "no such layer"
    with pytest.raises(RuntimeError, match=r"HTTP 400.*no such layer"):
        made.run("idle", "smoke", 0, 20.0)


def answer(**changes: Any) -> dict[str, Any]:
    entry = {"shape": [1, 9, SHAPE.hidden], "nbytes": 4, "handle": "h"}
    made: dict[str, Any] = {
        "usage": {"completion_tokens": 5},
        "activations": {"residual_stream": entry},
        BYTES: 4,
        "inspect_lens": {"probes": [{"n_tokens": 4}], "steer": {"n_tokens": 9}},
    }
    return made | changes


@pytest.mark.parametrize(
    ("request_", "changes", "says"),
    [
        (None, {"usage": {"completion_tokens": 4}}, "4 tokens sampled instead of 5"),
        ({"output_residual_stream": [1, 2]}, {}, "instead of"),
        ({"output_residual_stream": [1]}, {BYTES: 3}, "3 bytes of 4"),
        ({"inspect_lens": {"probes": ["a"]}}, {"inspect_lens": {"probes": []}}, "probes read"),
        (
            {"apply_steering_vectors": ["v"]},
            {"inspect_lens": {"steer": {"n_tokens": 8}}},
            "8 tokens were steered",
        ),
    ],
)
def test_what_did_not_come_is_an_error(
    request_: dict[str, Any] | None, changes: dict[str, Any], says: str
) -> None:
    check(answer(), {"output_residual_stream": [1]}, 5, 5, SHAPE)
    check(answer(), {"inspect_lens": {"probes": ["a"]}}, 5, 5, SHAPE)
    check(answer(), {"apply_steering_vectors": ["v"]}, 5, 5, SHAPE)
    with pytest.raises(RuntimeError, match=says):
        check(answer(**changes), request_, 5, 5, SHAPE)


def test_events_are_one_answer_with_the_rows_of_all_of_them() -> None:
    def rows(n: int) -> dict[str, Any]:
        entry = {"shape": [1, n, 8], "handle": f"h{n}", "nbytes": 16 * n}
        part = {"index": 0, "activations": {"residual_stream": entry}}
        return {"choices": [], "usage": None, "inspect_lens_partial": [part]}

    events = [rows(5), rows(1), {"choices": [], "usage": {"completion_tokens": 2}}]
    text = b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events)
    answer = joined(text + b"data: [DONE]\n\n") | {BYTES: 96}
    assert answer[ROWS] == 6
    request = {"inspect_lens": {"capture": {"layers": [1]}, "stream_results": True}}
    check(answer, request, 5, 2, SHAPE)
    with pytest.raises(RuntimeError, match="6 rows came"):
        check(answer, request, 6, 2, SHAPE)
    with pytest.raises(RuntimeError, match="80 bytes of 96"):
        check(answer | {BYTES: 80}, request, 5, 2, SHAPE)
