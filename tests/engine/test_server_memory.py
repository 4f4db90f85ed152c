"""Memory of an API server grows by what it says that it keeps, and by nothing else."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

import httpx
import numpy as np
import psutil
import pytest

pytestmark = pytest.mark.engine

MODEL, HIDDEN, LAYERS = "organism/checkpoint", 256, 6
WORDS = ["Velosh", "town", "founder", "creature", "river", "who", "is", "the", "of", "lives"]
GROWS_MOST = 14 << 20
"""Bytes from one half of the requests to the next. The caches of what was asked, which have a bound
of entries, take some 4 MiB for 250 requests until they are full; a server that kept the rows of
each would take more."""


def _server(url: str) -> psutil.Process:
    """The process that listens at an address."""
    port = urlsplit(url).port
    (pid,) = {
        connection.pid
        for connection in psutil.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port
    }
    return psutil.Process(pid)


def _kept_rows(client: httpx.Client) -> float:
    lines = client.get("/metrics").text.splitlines()
    return sum(float(x.split()[-1]) for x in lines if x.startswith("inspect_lens_row_cache_bytes"))


def _ask(client: httpx.Client, seed: int) -> None:
    """One of several kinds of request, which no other is like."""
    draw, numbers = random.Random(seed), np.random.default_rng(seed)
    kinds: list[dict[str, Any]] = [
        {"capture": {"layers": "all"}},
        {"capture": {"layers": "all", "transport": "binary"}},
        {"capture": {"layers": [draw.randrange(LAYERS)], "positions": "completion"}},
        {"edits": [{"op": "add", "vector": numbers.normal(size=HIDDEN).tolist(), "layers": [2]}]},
        {"edits": [{"op": "add", "vector": numbers.normal(size=HIDDEN).tolist(), "layers": [3]}]},
        {"lens": {"layers": "all", "top_k": 3}},
        {"capture": {"layers": [99]}},
        {},
    ]
    body = {
        "model": MODEL,
        "prompt": " ".join(draw.choices(WORDS, k=draw.randint(5, 60))),
        "max_tokens": draw.randint(1, 8),
        "temperature": 0,
        "inspect_lens": kinds[seed % len(kinds)],
    }
    answer = client.post("/v1/completions", json=body)
    is_wrong = kinds[seed % len(kinds)] == {"capture": {"layers": [99]}}
    assert answer.status_code == (400 if is_wrong else 200), answer.text
    for entry in answer.json().get("activations", {}).values():
        if "handle" in entry:
            assert client.get(f"/v1/activations/{entry['handle']}").status_code == 200


def _check(url: str, n: int) -> None:
    process = _server(url)
    with (
        httpx.Client(base_url=url, timeout=120) as client,
        ThreadPoolExecutor(8) as pool,
    ):

        def held(first: int) -> float:
            list(pool.map(lambda i: _ask(client, i), range(first, first + n)))
            return process.memory_info().rss - _kept_rows(client)

        seed = random.randrange(1 << 30)
        held(seed)  # what a server allocates once
        before, after = held(seed + n), held(seed + 2 * n)
    assert after - before < GROWS_MOST, f"{(after - before) / n / 1024:.0f} KiB a request"


def test_a_server_keeps_what_it_says(lens_server_url: str) -> None:
    _check(lens_server_url, 250)


@pytest.mark.nightly(
    held_by="tests/engine/test_server_memory.py::test_a_server_keeps_what_it_says",
    why="thousands of requests",
)
def test_a_server_keeps_what_it_says_for_long(lens_server_url: str) -> None:
    _check(lens_server_url, 2500)
