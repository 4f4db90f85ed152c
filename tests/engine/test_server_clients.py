"""Clients that are killed or stand still: others do not notice, nothing is left."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from http.client import HTTPResponse
from typing import Any

import httpx
import pytest

from inspect_lens._base.partial import PARTIAL_KEY
from tests.kit.waiting import until

pytestmark = pytest.mark.engine

MODEL = "organism/checkpoint"
LAYERS = 6
LONG: dict[str, Any] = {
    "model": MODEL,
    "prompt": "hello there",
    "max_tokens": 900,
    "ignore_eos": True,
    "stream": True,
    "inspect_lens": {"capture": {"layers": "all"}},
}
CLIENT = """
import sys, threading, time, httpx
url, body = sys.argv[1:]
lock, begun = threading.Lock(), []

def one():
    with httpx.stream("POST", url + "/v1/completions", content=body, timeout=300,
                      headers={"content-type": "application/json"}) as answer:
        lines = answer.iter_lines()
        next(lines)
        with lock:
            begun.append(1)
            if len(begun) == 8:
                print("begun", flush=True)
        for line in lines:
            pass

for _ in range(8):
    threading.Thread(target=one, daemon=True).start()
time.sleep(600)
"""


@pytest.fixture(scope="module")
def client(lens_server_url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=lens_server_url, timeout=120) as made:
        yield made


def others_are_answered(client: httpx.Client) -> None:
    """One that captures and one that does not; each has all that it asked for."""
    body = {**LONG, "max_tokens": 8, "stream": False}
    receipt = client.post("/v1/completions", json=body).raise_for_status().json()["inspect_lens"]
    assert receipt["capture"]["rows"] == LAYERS * (receipt["n_prompt"] + 7)
    del body["inspect_lens"]
    assert client.post("/v1/completions", json=body).status_code == 200


def n_running(client: httpx.Client) -> int:
    (found,) = re.findall(
        r"^vllm:num_requests_running\{.*\} (\S+)$", client.get("/metrics").text, re.M
    )
    return int(float(found))


def nothing_is_open(client: httpx.Client) -> bool:
    return until(lambda: client.get("/v1/inspect_lens").json()["open_requests"] == 0)


def test_a_killed_client_leaves_nothing(client: httpx.Client, lens_server_url: str) -> None:
    command = [sys.executable, "-c", CLIENT, lens_server_url, json.dumps(LONG)]
    for _ in range(2):
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:
            assert other.stdout is not None
            assert other.stdout.readline() == "begun\n"
            assert client.get("/v1/inspect_lens").json()["open_requests"] > 0
            other.kill()
        others_are_answered(client)
    assert nothing_is_open(client)


def test_a_client_that_stands_still_holds_nobody_up_and_gets_all_of_it(
    client: httpx.Client, lens_server_url: str
) -> None:
    """Its rows come with their tokens, and are more than sockets hold."""
    url = httpx.URL(lens_server_url)
    n = 600
    asked = LONG | {
        "max_tokens": n,
        "inspect_lens": LONG["inspect_lens"] | {"stream_results": True},
    }
    body = json.dumps(asked).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: {url.host}\r\nconnection: close\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    with socket.socket() as reader:
        reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        reader.settimeout(60)
        reader.connect((url.host, url.port or 80))
        reader.sendall(head.encode() + body)
        assert until(lambda: n_running(client))
        for _ in range(3):
            others_are_answered(client)
        assert until(lambda: n_running(client) == 0, 300)
        others_are_answered(client)
        assert client.get("/v1/inspect_lens").json()["open_requests"] == 1, "nobody has read it"
        response = HTTPResponse(reader)
        response.begin()
        answer = response.read()
    assert response.status == 200
    assert answer.endswith(b"data: [DONE]\n\n")
    events = [json.loads(e) for e in re.findall(rb"^data: (\{.*\})\r?$", answer, re.M)]
    (receipt,) = [event["inspect_lens"] for event in events if "inspect_lens" in event]
    assert receipt["capture"]["rows"] == LAYERS * (receipt["n_prompt"] + n - 1)
    parts = [
        part["activations"]["residual_stream"] for e in events for part in e.get(PARTIAL_KEY, ())
    ]
    assert sum(part["shape"][1] for part in parts) == receipt["n_prompt"] + n - 1
    assert nothing_is_open(client)
