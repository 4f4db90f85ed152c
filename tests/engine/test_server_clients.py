"""Clients that are killed, stand still or read slowly: others do not notice, nothing is left."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import httpx
import pytest

pytestmark = pytest.mark.engine

MODEL = "organism/checkpoint"
LAYERS = 6
LONG = {
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


def plain_s(client: httpx.Client, *, captures: bool = False) -> float:
    """Seconds that somebody else's request takes."""
    body = {**LONG, "max_tokens": 8, "stream": False}
    if not captures:
        del body["inspect_lens"]
    began = time.perf_counter()
    answer = client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    if captures:
        receipt = answer.json()["inspect_lens"]
        assert receipt["capture"]["rows"] == LAYERS * (receipt["n_prompt"] + 7)
    return time.perf_counter() - began


def nothing_is_open(client: httpx.Client, *, within_s: float = 30) -> bool:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if client.get("/v1/inspect_lens").json()["open_requests"] == 0:
            return True
        time.sleep(0.2)
    return False


def test_a_killed_client_leaves_nothing(client: httpx.Client, lens_server_url: str) -> None:
    usual = max(plain_s(client, captures=captures) for captures in (True, False) for _ in range(3))
    command = [sys.executable, "-c", CLIENT, lens_server_url, json.dumps(LONG)]
    for _ in range(3):
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:
            assert other.stdout is not None
            assert other.stdout.readline() == "begun\n"
            assert client.get("/v1/inspect_lens").json()["open_requests"] > 0
            other.kill()
        assert plain_s(client) < 4 + 10 * usual
    assert nothing_is_open(client)
    assert plain_s(client, captures=True) < 4 + 10 * usual


def test_a_client_that_stands_still_holds_nobody_up(
    client: httpx.Client, lens_server_url: str
) -> None:
    usual = max(plain_s(client, captures=captures) for captures in (True, False) for _ in range(3))
    command = [sys.executable, "-c", CLIENT, lens_server_url, json.dumps(LONG)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "begun\n"
        other.send_signal(signal.SIGSTOP)
        deadline = time.monotonic() + 8
        try:
            while time.monotonic() < deadline:
                assert plain_s(client) < 4 + 10 * usual
                assert plain_s(client, captures=True) < 4 + 10 * usual
        finally:
            os.kill(other.pid, signal.SIGKILL)
    assert nothing_is_open(client)


def test_a_slow_reader_gets_all_of_it_and_nobody_waits(
    client: httpx.Client, lens_server_url: str
) -> None:
    usual = max(plain_s(client, captures=captures) for captures in (True, False) for _ in range(3))
    url = httpx.URL(lens_server_url)
    body = json.dumps(LONG).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: {url.host}\r\nconnection: close\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    with socket.socket() as reader:
        reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        reader.settimeout(60)
        reader.connect((url.host, url.port or 80))
        reader.sendall(head.encode() + body)
        # Nothing is read, until the answer is ready long since.
        deadline = time.monotonic() + 8
        while time.monotonic() < deadline:
            assert plain_s(client) < 4 + 10 * usual
            assert plain_s(client, captures=True) < 4 + 10 * usual
        answer = bytearray()
        while piece := reader.recv(1 << 16):
            answer += piece
    assert answer.startswith(b"HTTP/1.1 200")
    assert b"data: [DONE]" in answer[-200:]
    found = answer.rpartition(b'"inspect_lens":')[2]
    receipt, _ = json.JSONDecoder().raw_decode(found.decode().lstrip())
    assert receipt["capture"]["rows"] == LAYERS * (receipt["n_prompt"] + 899)
    assert nothing_is_open(client)
