"""Bodies near right ones, and patterns of all kinds, against a served engine.

`--log-cli-level INFO` says the figures; at night there are thousands.

None of them is answered with a 5xx, the server keeps nothing beyond its budgets, and somebody
else's plain request is answered all along.
"""

from __future__ import annotations

import json
import logging
import random
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx
import numpy as np
import psutil
import pytest

from inspect_lens import SteeringVector
from inspect_lens.spec import EngineProbe, TokenMatch
from tests.kit.bodies import calm, near_valid, pattern, registry_body, sweep_body

pytestmark = pytest.mark.engine

logger = logging.getLogger(__name__)

MODEL = "organism/checkpoint"
REGISTRY = "/v1/inspect_lens/registry"
SWEEP = "/v1/inspect_lens/patch_sweep"
JSON = {"content-type": "application/json"}
CLIENTS = 4
GROWTH = 512 << 20
"""Bytes that the API server may grow by, beside results that nobody has fetched: three caches of
32 MiB, and what 4 clients have under way, 128 MiB of vectors at a time."""
PATIENCE = 5
"""How much longer than usual, where nothing is asked of the lens, somebody else may wait."""


@pytest.fixture(scope="module")
def client(lens_server_url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=lens_server_url, timeout=300) as made:
        for name, layer in (("p", 1), ("q", 2)):
            weight = {"weight": np.ones((1, 256), np.float32)}
            probe = EngineProbe(layers=(layer,), tensors=weight, threshold=1e6)
            item = {"name": name, "probe": probe.model_dump(mode="json")}
            assert made.post(REGISTRY, json=item).status_code == 200
        vector = SteeringVector(activations=np.ones((1, 256)), layer_indices=[1])
        item = {"name": "v", "edits": [vector.model_dump(mode="json")]}
        assert made.post(REGISTRY, json=item).status_code == 200
        yield made
        for name in ("p", "q", "v"):
            assert made.delete(f"{REGISTRY}/{name}").status_code == 200


class Neighbour(threading.Thread):
    """Somebody who sends plain requests, and looks whether the server is there."""

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self._client = httpx.Client(base_url=url, timeout=300)
        self.is_over = threading.Event()
        self.plain_s: list[float] = []
        self.health_s: list[float] = []

    def run(self) -> None:
        while not self.plain_s or not self.is_over.wait(0.2):
            self.plain_s.append(timed(self._client, plain=True))
            self.health_s.append(timed(self._client, plain=False))
        self._client.close()


@contextmanager
def beside(url: str) -> Iterator[Neighbour]:
    """Somebody else, as long as something runs."""
    neighbour = Neighbour(url)
    neighbour.start()
    try:
        yield neighbour
    finally:
        neighbour.is_over.set()
        neighbour.join()


def timed(client: httpx.Client, *, plain: bool) -> float:
    began = time.perf_counter()
    body = {"model": MODEL, "prompt": "hello there", "max_tokens": 4, "ignore_eos": True}
    answer = client.post("/v1/completions", json=body) if plain else client.get("/health")
    assert answer.status_code == 200, answer.text
    return time.perf_counter() - began


def body_of(seed: int) -> tuple[str, str]:
    """Path and text of a body."""
    rng = random.Random(seed)
    if (kind := rng.random()) < 0.05:
        return SWEEP, json.dumps(sweep_body(rng))
    if kind < 0.15:
        return REGISTRY, json.dumps(calm(registry_body(rng)))
    if kind < 0.2:
        return "/v1/hooks/register", json.dumps({"hooks": near_valid(rng)})
    lens = calm(near_valid(rng))
    said: dict[str, Any] = {"model": MODEL, "max_tokens": 2, "ignore_eos": True, "temperature": 0}
    path = "/v1/completions"
    if rng.random() < 0.2:
        path = "/inference/v1/generate"
        params = {"max_tokens": 2, "extra_args": lens.get("extra_args", lens)}
        return path, json.dumps({"token_ids": [5, 9, 14, 23], "sampling_params": params})
    if rng.random() < 0.4:
        path = "/v1/chat/completions"
        said["messages"] = [{"role": "user", "content": "Who is it?"}]
    else:
        said["prompt"] = "hello there"
    if rng.random() < 0.2:
        said["stream"] = True
    return path, json.dumps({**lens, **said})


def is_pattern(text: str) -> bool:
    try:
        return TokenMatch(pattern=text).pattern == text
    except ValueError:
        return False


def pattern_of(seed: int) -> tuple[str, str]:
    """The same of a prompt of some length, or several, in which a pattern is looked for."""
    rng = random.Random(seed)
    prompts = ["the town of é and a river " * rng.choice([1, 10, 60])] * rng.choice([1, 1, 8, 32])
    edits = [
        {"op": "scale", "factor": 1, "layers": [1], "positions": {"pattern": pattern(rng)}}
        for _ in range(rng.choice([0, 0, 0, 0, 1, 4, 20]))
    ]
    text = pattern(rng)
    while rng.random() < 0.7 and not is_pattern(f"{text}|e"):
        text = pattern(rng)
    where = {"pattern": f"{text}|e"[:1500]}
    lens = {"capture": {"layers": [1], "positions": where}, "edits": edits}
    said = {"model": MODEL, "max_tokens": 1, "temperature": 0, "prompt": prompts}
    return "/v1/completions", json.dumps({**said, "inspect_lens": lens})


def without_lens(path: str, text: str) -> tuple[str, str]:
    """The same prompts, and nothing asked of the lens."""
    body = json.loads(text)
    if path in (SWEEP, REGISTRY) or path.startswith("/v1/hooks"):
        return "/v1/completions", json.dumps({"model": MODEL, "prompt": "hello", "max_tokens": 2})
    if "token_ids" in body:
        return path, json.dumps({**body, "sampling_params": {"max_tokens": 2}})
    kept = ("model", "max_tokens", "ignore_eos", "temperature", "messages", "prompt", "stream")
    plain = {key: body[key] for key in kept if key in body}
    if isinstance(prompts := plain.get("prompt"), list):
        # Computed whole, as prompts are whose rows are wanted.
        plain["prompt"] = [f"{i} {prompt}" for i, prompt in enumerate(prompts)]
        plain["cache_salt"] = str(time.perf_counter_ns())
    return path, json.dumps(plain)


def send(
    client: httpx.Client,
    seed: int,
    make: Callable[[int], tuple[str, str]] = body_of,
    *,
    plain: bool = False,
) -> tuple[int, str]:
    path, text = without_lens(*make(seed)) if plain else make(seed)
    answer = client.post(path, content=text, headers=JSON)
    status = answer.status_code
    if path == SWEEP and status == 200 and '{"error"' in (last := answer.text.splitlines()[-1]):
        status = int(json.loads(last)["error"]["code"])
    for line in answer.text.splitlines() if "stream" in text and status == 200 else ():
        if line.startswith('data: {"error"'):
            status = int(json.loads(line.removeprefix("data: "))["error"]["code"])
    return status, f"seed {seed}: {status} {answer.text[:500]} for {path} {text[:500]}"


def server_process(url: str) -> psutil.Process:
    port = httpx.URL(url).port
    for connection in psutil.net_connections("tcp"):
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port:
            assert connection.pid is not None
            return psutil.Process(connection.pid)
    return pytest.fail("the server is on another machine")


@pytest.mark.parametrize(
    ("make", "n"),
    [pytest.param(body_of, 100, id="bodies"), pytest.param(pattern_of, 40, id="patterns")],
)
def test_bodies_hurt_nobody(
    client: httpx.Client, lens_server_url: str, make: Callable[[int], tuple[str, str]], n: int
) -> None:
    check_that_nobody_is_hurt(client, lens_server_url, make, n)


@pytest.mark.nightly(
    held_by="tests/engine/test_fuzz_bodies.py::test_bodies_hurt_nobody",
    why="5,000 bodies and 2,000 patterns; by day 100 and 40",
)
@pytest.mark.parametrize(
    ("make", "n"),
    [pytest.param(body_of, 5000, id="bodies"), pytest.param(pattern_of, 2000, id="patterns")],
)
def test_thousands_of_bodies_hurt_nobody(
    client: httpx.Client, lens_server_url: str, make: Callable[[int], tuple[str, str]], n: int
) -> None:
    check_that_nobody_is_hurt(client, lens_server_url, make, n)


def check_that_nobody_is_hurt(
    client: httpx.Client, lens_server_url: str, make: Callable[[int], tuple[str, str]], n: int
) -> None:
    logging.getLogger("httpx").setLevel(logging.WARNING)
    process = server_process(lens_server_url)

    def held() -> int:
        stored = int(client.get("/v1/inspect_lens").json()["stored_bytes"])
        return int(process.memory_info().rss) - stored

    with ThreadPoolExecutor(CLIENTS) as pool:
        # What is loaded and made at the first request of a kind is no growth.
        list(pool.map(lambda seed: send(client, seed, make), range(-25, 0)))
        before = held()
        began = time.perf_counter()
        with beside(lens_server_url) as neighbour:
            answers = list(pool.map(lambda seed: send(client, seed, make), range(n)))
        seconds = time.perf_counter() - began
        # What the same prompts cost a neighbour where nothing is asked of the lens.
        served = [seed for seed, (status, _) in enumerate(answers) if status == 200]
        with beside(lens_server_url) as usual_neighbour:
            list(pool.map(lambda seed: send(client, seed, make, plain=True), served[:30]))
        usual = max(usual_neighbour.plain_s)
    grown = held() - before
    statuses = Counter(status for status, _ in answers)
    plain, health = sorted(neighbour.plain_s), sorted(neighbour.health_s)
    logger.info(
        "%d bodies in %.0f s: %s; grown by %d MiB; plain request: usually up to %.3f s, median "
        "%.3f s, longest %.3f s; /health: median %.4f s, longest %.3f s",
        *(n, seconds, dict(statuses), grown >> 20),
        *(
            usual,
            statistics.median(plain),
            plain[-1],
            statistics.median(health),
            health[-1],
        ),
    )
    failed = [what for status, what in answers if status >= 500]
    assert not failed, "\n".join(failed[:5])
    assert statuses[200] >= n // 10 <= statuses[400], "the fuzz has both kinds"
    assert grown <= GROWTH
    assert statistics.median(plain) <= PATIENCE * usual
    assert health[-1] <= PATIENCE * usual, "nothing stalls the event loop"
    assert client.get("/v1/inspect_lens").json()["open_requests"] == 0
