"""vLLM's API server and one client, which asks for everything at once over HTTP.

Seconds are from the first request to the last byte of the last result in this process's hands. The
client is the same in every arm: bodies are written before the clock starts, and of a response no
more is read before it stops than what it takes to fetch the activations.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import time
import urllib.request
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import urllib3
from pydantic_core import from_json

from inspect_lens.client import fetch_here
from inspect_lens.spec import Add, SteeringVector, to_wire_args
from tests.kit.api_server import api_server, preemptions, total
from tests.kit.process_tree import cpu_clock, usage
from tests.kit.tiny_models import write_words

from .arms import ARMS, ENGINES, Vector
from .loads import LOADS, requests
from .shapes import Shape

__all__ = ["Served", "body", "check", "joined"]

_THREADS = 8
"""That fetch, as many as an eval has for that, and by what it has: its event loop is not asked."""
_HANDLES, _HANDLE = re.compile(rb'"handle":\s?"([^"]+)"'), 128
"""A handle of a response or an event, and more bytes than it has."""
BYTES = "bytes that were fetched"
"""Key beside a response's own."""
ROWS, EVENT_BYTES, SCORES = "rows of events", "bytes that events tell of", "scores of events"
"""Likewise; scores are how many came of each probe."""


_FIRST, _LAST = "first answer began", "last answer ended"
_CPU = "API server's CPU until the first answer"
_SUMS = {
    **{name: f"vllm:request_{name}_time_seconds_sum" for name in ("queue", "prefill", "decode")},
    "results waited for": "inspect_lens_wait_seconds_sum",
}
"""What a server measures of each request, in the order in which it comes."""


class Served:
    """A server of one kind of engine."""

    def __init__(self, kind: str, shape: Shape, options: Mapping[str, Any]) -> None:
        folder = Path(options["model"])
        # A server makes text of tokens, which costs time; so it needs words.
        write_words(folder, shape.vocab)
        given = {k: v for k, v in options.items() if k != "skip_tokenizer_init"}
        # The route that forgets cached prefixes is there in development mode only.
        environment = {**os.environ, "VLLM_SERVER_DEV_MODE": "1"}
        self._shape, self._is_peer = shape, ENGINES[kind].is_peer
        self._set_up: set[str] = set()
        self._stack = contextlib.ExitStack()
        made = self._stack.enter_context(
            api_server(
                {**given, "served_model_name": "model", "uvicorn_log_level": "warning"},
                environment=environment,
                log=folder.parent / f"{folder.name}-{kind}-server.log",
            )
        )
        self._url, self._pid = made.url, made.pid

    def prepare(self, arm: str) -> None:
        """Set an arm up, once."""
        probes = ARMS[arm].probes
        if probes is not None and arm not in self._set_up:
            for name, probe in probes(self._shape).items():
                item = {"name": name, "probe": probe.model_dump(mode="json")}
                self._post("/v1/inspect_lens/registry", item)
        self._set_up.add(arm)

    def run(self, arm: str, load: str, seed: int, limit_s: float) -> dict[str, Any]:
        """One timed run."""
        self.prepare(arm)
        drawn = requests(LOADS[load], vocab=self._shape.vocab, seed=seed)
        asked = [ARMS[arm].request(self._shape, i) for i in range(len(drawn))]
        streams = ARMS[arm].streams
        bodies = [
            json.dumps(
                body(prompt, sampled, request, is_peer=self._is_peer)
                | ({"stream": True, "stream_options": {"include_usage": True}} if streams else {})
            ).encode()
            for (prompt, sampled), request in zip(drawn, asked, strict=True)
        ]
        self._post("/reset_prefix_cache", None)
        before = self._metrics()
        used = cpu_clock({os.getpid(): "client", self._pid: "API server"})
        over_tcp = ARMS[arm].over_tcp or self._is_peer
        seconds, phases, answers = asyncio.run(
            ask_all(self._url, bodies, limit_s, over_tcp=over_tcp, pid=self._pid)
        )
        cpu_s, after = used(), self._metrics()
        for answer, request, (prompt, sampled) in zip(answers, asked, drawn, strict=True):
            inline = request and request.get("activations_transport") == "inline"
            has_frame = not self._is_peer and not inline and "activations" in answer
            if has_frame and not answer[BYTES]:
                raise RuntimeError("activations came in the JSON instead of with a handle")
            check(answer, request, len(prompt), sampled, self._shape)
        return {
            "seconds": seconds,
            "tokens": sum(sampled for _, sampled in drawn),
            "preemptions": preemptions(after) - preemptions(before),
            "shared_bytes": usage(os.getpid()).shared_bytes,
            "cpu_s": cpu_s,
            "phases": phases
            | {
                f"{name}, of each": (total(after, metric) - total(before, metric)) / len(drawn)
                for name, metric in _SUMS.items()
            },
        }

    def _post(self, path: str, content: Any) -> None:
        data = b"" if content is None else json.dumps(content).encode()
        headers = {"Content-Type": "application/json"}
        asked = urllib.request.Request(self._url + path, data=data, headers=headers)
        with urllib.request.urlopen(asked, timeout=60) as answer:
            answer.read()

    def _metrics(self) -> str:
        with urllib.request.urlopen(f"{self._url}/metrics", timeout=60) as answer:
            return str(answer.read().decode())

    def close(self) -> None:
        """End the server."""
        self._stack.close()


def body(
    prompt: Sequence[int], sampled: int, request: Mapping[str, Any] | None, *, is_peer: bool
) -> dict[str, Any]:
    """The body of one completion, in the words that vllm-lens knows, too.

    Args:
        prompt: token ids.
        sampled: tokens to sample.
        request: of the arm; None for a plain one.
        is_peer: whether the server is vllm-lens', which knows no handles.
    """
    made: dict[str, Any] = {
        "model": "model",
        "prompt": list(prompt),
        "max_tokens": sampled,
        "temperature": 0,
        "ignore_eos": True,
    }
    if not request:
        return made
    asked = {
        key: [_steering(v) for v in value] if key == "apply_steering_vectors" else value
        for key, value in request.items()
    }
    if "output_residual_stream" in asked and not is_peer:
        asked.setdefault("activations_transport", "binary")
    return made | {"vllm_xargs": to_wire_args(asked)}


def _steering(vector: Vector) -> Add:
    return SteeringVector(
        activations=vector.values[None], layer_indices=[vector.layer], scale=vector.scale
    )


async def ask_all(
    url: str, bodies: Sequence[bytes], limit_s: float, *, over_tcp: bool, pid: int
) -> tuple[float, dict[str, float], list[dict[str, Any]]]:
    """Ask for all completions at once.

    Args:
        url: of the server.
        bodies: as JSON.
        limit_s: seconds after which to give up.
        over_tcp: whether to fetch by HTTP, as from another host.
        pid: of the server.

    Returns:
        Seconds; when answers came, and how long the server was busy before; and the responses,
        under `BYTES` how much their handles stood for.

    Raises:
        RuntimeError: the server refused one.
    """
    headers = {"Content-Type": "application/json"}
    loop, threads = asyncio.get_running_loop(), ThreadPoolExecutor(_THREADS)
    pool = urllib3.PoolManager(maxsize=_THREADS)
    phases: dict[str, float] = {}

    def busy() -> float:
        times = psutil.Process(pid).cpu_times()
        return times.user + times.system

    async with aiohttp.ClientSession(
        base_url=url,
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(total=limit_s),
    ) as session:

        async def ask(content: bytes) -> tuple[bytes, int]:
            fetched: list[asyncio.Future[Any]] = []
            async with session.post("/v1/completions", data=content, headers=headers) as response:
                if _FIRST not in phases:
                    phases[_FIRST] = time.perf_counter() - started
                    phases[_CPU] = busy() - was_busy
                text = bytearray()
                # Of answers and events no more is read before the clock stops than their handles.
                async for some in response.content.iter_any():
                    seen = len(text)
                    text += some
                    first = text.find(b'"handle"', max(seen - _HANDLE, 0))
                    for found in _HANDLES.finditer(text, first) if first >= 0 else ():
                        if found.end() > seen:
                            handle = found[1].decode()
                            fetched.append(loop.run_in_executor(threads, fetch, handle))
                if response.status != 200:
                    raise RuntimeError(f"HTTP {response.status}: {bytes(text[:1000])!r}")
            phases[_LAST] = time.perf_counter() - started
            return bytes(text), sum(map(len, await asyncio.gather(*fetched)))

        def fetch_by_http(handle: str) -> Any:
            response = pool.request("GET", f"{url}/v1/activations/{handle}", timeout=limit_s)
            if response.status != 200:
                raise RuntimeError(f"HTTP {response.status}: {response.data[:1000]!r}")
            return response.data

        fetch = fetch_by_http if over_tcp else fetch_here
        was_busy, started = busy(), time.perf_counter()
        answers = await asyncio.gather(*map(ask, bodies))
        seconds = time.perf_counter() - started
        return seconds, phases, [joined(text) | {BYTES: n} for text, n in answers]


def joined(text: bytes) -> dict[str, Any]:
    """An answer, or the one that events make: what the last say, and how much all of them have."""
    if text.startswith(b"{"):
        return dict(from_json(text))
    answer: dict[str, Any] = {}
    rows, nbytes, scores = 0, 0, Counter[str]()
    for line in text.splitlines():
        if not line.startswith(b"data: {"):
            continue
        event: dict[str, Any] = from_json(line[6:])
        for part in event.get("inspect_lens_partial", ()):
            for entry in part.get("activations", {}).values():
                rows += entry["shape"][1]
                nbytes += entry.get("nbytes", 0)
            scores.update({name: len(new) for name, new in part.get("probes", {}).items()})
        answer |= {key: value for key, value in event.items() if value is not None}
    return answer | {ROWS: rows, EVENT_BYTES: nbytes, SCORES: set(scores.values())}


def check(
    answer: Mapping[str, Any],
    request: Mapping[str, Any] | None,
    n_prompt: int,
    sampled: int,
    shape: Shape,
) -> None:
    """See that what was asked for came: otherwise the seconds mean nothing.

    Raises:
        RuntimeError: it did not.
    """
    n = answer["usage"]["completion_tokens"]
    if n != sampled:
        raise RuntimeError(f"{n} tokens sampled instead of {sampled}")
    request = request or {}
    layers = request.get("output_residual_stream")
    if layers:
        wanted = [shape.layers if layers is True else len(layers), n_prompt + sampled - 1]
        entry = answer["activations"]["residual_stream"]
        found = list(entry["shape"])
        if found != [*wanted, shape.hidden]:
            raise RuntimeError(f"a tensor is {found} instead of {[*wanted, shape.hidden]}")
        if "handle" in entry and answer[BYTES] != entry["nbytes"]:
            raise RuntimeError(f"{answer[BYTES]} bytes of {entry['nbytes']}")
    _check_native(answer, request.get("inspect_lens") or {}, n_prompt, sampled)
    if request.get("apply_steering_vectors"):
        steered = answer["inspect_lens"]["steer"]["n_tokens"]
        if steered != n_prompt + sampled - 1:
            raise RuntimeError(f"{steered} tokens were steered")


def _check_native(
    answer: Mapping[str, Any], asked: Mapping[str, Any], n_prompt: int, sampled: int
) -> None:
    if "capture" in asked:
        if answer[ROWS] != n_prompt + sampled - 1:
            raise RuntimeError(f"{answer[ROWS]} rows came in events")
        if answer[BYTES] != answer[EVENT_BYTES]:
            raise RuntimeError(f"{answer[BYTES]} bytes of {answer[EVENT_BYTES]}")
    if "probes" in asked:
        read = {probe["n_tokens"] for probe in answer["inspect_lens"]["probes"]}
        if read != {sampled - 1}:
            raise RuntimeError(f"probes read {read} tokens")
        if asked.get("stream_results") and answer[SCORES] != {sampled - 1}:
            raise RuntimeError(f"{answer[SCORES]} scores came in events")
