"""The load of `benchmarks.endurance`: clients of every kind, and what each of them saw."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import aiohttp
import numpy as np

from .arms import ARMS
from .served import body
from .shapes import Shape

__all__ = ["GONE", "SHARES", "Ask", "Load", "Seen", "Target", "draw", "outcomes", "percentiles"]

Kind = Literal["plain", "steer", "capture-1", "capture-all", "probes-16x4", "left", "slow"]
SHARES: Mapping[Kind, float] = {
    "plain": 0.4, "steer": 0.15, "capture-1": 0.15, "capture-all": 0.05, "probes-16x4": 0.1,
    "left": 0.1, "slow": 0.05,
}  # fmt: skip
"""`capture-all` never fetches its rows, `left` goes away after some tokens, `slow` reads slowly."""
LENS_KINDS = ("steer", "capture-1", "capture-all", "probes-16x4")
GONE = "rows went with their server"
"""Between an answer and the fetch of its rows: those of the answers of a server end with it."""
PAUSE_S = 0.5
"""Between two reads of a slow client."""
N_PROMPTS = 64


@dataclass(frozen=True)
class Ask:
    """One request."""

    kind: Kind
    arm: str
    """What it asks of the lens, by `benchmarks.arms`."""
    prompt: tuple[int, ...]
    sampled: int
    leave_after: int
    wait_s: float
    """Since the request before."""


@dataclass
class Seen:
    """What one request saw."""

    kind: Kind
    began: float
    outcome: str = "open"
    """`done`, `left`, or what went wrong."""
    ended: float = 0.0
    first_s: float | None = None
    gaps_s: list[float] = field(default_factory=list)
    text: str = ""


@dataclass
class Target:
    """A server that may be replaced by another under way."""

    url: str
    with_lens: bool
    is_down: bool = False


def draw(seed: int, rate: float, vocab: int) -> Any:
    """Requests without end, arriving at random (Poisson).

    Args:
        seed: of kinds, prompts and arrivals.
        rate: requests per second.
        vocab: of the model.

    Yields:
        `Ask`.
    """
    rng = np.random.default_rng(seed)
    pool = [
        tuple(int(t) for t in np.random.default_rng([7, i]).integers(3, vocab, 8 + 3 * i))
        for i in range(N_PROMPTS)
    ]
    kinds, shares = list(SHARES), list(SHARES.values())
    while True:
        kind: Any = str(rng.choice(kinds, p=shares))
        which, other = int(rng.integers(N_PROMPTS)), str(rng.choice(LENS_KINDS))
        yield Ask(
            kind=kind,
            # Those that go away or read slowly had asked for anything.
            arm=other if kind in ("left", "slow") else kind,
            prompt=pool[which],
            sampled=16 + which % 32,
            leave_after=int(rng.integers(1, 12)),
            wait_s=float(rng.exponential(1 / rate)),
        )


class Load:
    """Clients of one server.

    Args:
        target: the server.
        shape: of its model.
        limit_s: after which a request is given up, which is an outcome of its own.
    """

    def __init__(self, target: Target, shape: Shape, *, limit_s: float = 120.0) -> None:
        self.target = target
        self.seen: list[Seen] = []
        self._shape, self._limit_s = shape, limit_s
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def in_flight(self) -> list[Seen]:
        """Requests that have begun and not ended."""
        return [one for one in self.seen if one.outcome == "open"]

    async def run(self, asks: Any, until: float) -> None:
        """Send requests until a time of the monotonic clock, and wait for the last."""
        timeout = aiohttp.ClientTimeout(total=self._limit_s)
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
            for ask in asks:
                await asyncio.sleep(ask.wait_s)
                if time.monotonic() >= until:
                    break
                task = asyncio.create_task(self._one(session, ask))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            await asyncio.gather(*self._tasks)

    async def _one(self, session: aiohttp.ClientSession, ask: Ask) -> None:
        seen = Seen(ask.kind, time.monotonic())
        self.seen.append(seen)
        was_down = self.target.is_down
        try:
            seen.outcome = await self._ask(session, ask, seen)
        except TimeoutError:
            seen.outcome = "no end"
        except (aiohttp.ClientError, OSError) as error:
            seen.outcome = type(error).__name__  # its text has a port
        except Exception as error:  # noqa: BLE001 - counted; the load goes on
            seen.outcome = f"{type(error).__name__}: {error}"[:200]
        if was_down and seen.outcome not in ("done", "left"):
            seen.outcome = "server down"
        seen.ended = time.monotonic()

    async def _ask(self, session: aiohttp.ClientSession, ask: Ask, seen: Seen) -> str:
        asked = ARMS[ask.arm].request(self._shape, 0) if ask.arm != "plain" else None
        made = body(
            ask.prompt, ask.sampled, asked if self.target.with_lens else None, is_peer=False
        )
        url, last = self.target.url, seen.began
        found: dict[str, Any] = {}
        n = 0
        async with session.post(f"{url}/v1/completions", json=made | {"stream": True}) as answer:
            if answer.status != 200:
                return f"HTTP {answer.status}: {(await answer.text())[:120]}"
            async for line in answer.content:
                if not line.startswith(b"data: {"):
                    continue
                chunk = json.loads(line[6:])
                if "error" in chunk:
                    return f"error: {str(chunk['error'])[:120]}"
                found |= {k: chunk[k] for k in ("activations", "inspect_lens") if chunk.get(k)}
                if not (chunk.get("choices") or [{}])[0].get("text"):
                    continue
                now = time.monotonic()
                if seen.first_s is None:
                    seen.first_s = now - seen.began
                else:
                    seen.gaps_s.append(now - last)
                last, n = now, n + 1
                seen.text += chunk["choices"][0]["text"]
                if ask.kind == "left" and n >= ask.leave_after:
                    return "left"
                if ask.kind == "slow":
                    await asyncio.sleep(PAUSE_S)
        if asked is None or not self.target.with_lens:
            return "done"
        return await self._result(session, url, ask, asked, found)

    async def _result(
        self, session: aiohttp.ClientSession, url: str, ask: Ask, asked: Any, found: Any
    ) -> str:
        """Whether what was asked for came."""
        rows = len(ask.prompt) + ask.sampled - 1
        receipt = found.get("inspect_lens") or {}
        if ask.arm == "steer":
            done = receipt["steer"]["n_tokens"] + receipt["steer"].get("cached_tokens", 0)
            return "done" if done == rows else f"{done} tokens were steered, not {rows}"
        if ask.arm == "probes-16x4":
            read = {probe["n_tokens"] for probe in receipt["probes"]}
            return "done" if read == {ask.sampled - 1} else f"probes read {read} tokens"
        if not ask.arm.startswith("capture"):
            return "done"
        entry = found["activations"]["residual_stream"]
        layers = asked["output_residual_stream"]
        n_layers = self._shape.layers if layers is True else len(layers)
        if list(entry["shape"]) != [n_layers, rows, self._shape.hidden]:
            return f"rows of shape {entry['shape']}, not {(n_layers, rows, self._shape.hidden)}"
        if ask.kind == "capture-all":
            return "done"
        try:
            async with session.get(f"{url}/v1/activations/{entry['handle']}") as answer:
                data = await answer.read()
        except aiohttp.ClientConnectionError:
            return GONE
        whole = answer.status == 200 and len(data) == entry["nbytes"]
        return "done" if whole else f"HTTP {answer.status} for the rows, {len(data)} bytes"


def percentiles(seen: Sequence[Seen], at: Sequence[int] = (50, 95, 99)) -> dict[str, Any]:
    """Milliseconds to the first token and between tokens, of plain requests.

    Args:
        seen: of one server.
        at: percentiles.

    Returns:
        By name and percentile; empty where there was no plain request.
    """
    plain = [one for one in seen if one.kind == "plain" and one.outcome == "done"]
    if not plain:
        return {}
    first = [one.first_s for one in plain if one.first_s is not None]
    gaps = [gap for one in plain for gap in one.gaps_s]
    made: dict[str, Any] = {"requests": len(plain)}
    for name, values in (("first_token_ms", first), ("between_tokens_ms", gaps)):
        made[name] = {f"p{p}": round(1e3 * float(np.percentile(values, p)), 2) for p in at}
    return made


def outcomes(seen: Sequence[Seen]) -> dict[str, dict[str, int]]:
    """How requests ended, by kind."""
    made: dict[str, Counter[str]] = {}
    for one in seen:
        made.setdefault(one.kind, Counter())[one.outcome] += 1
    return {kind: dict(counts) for kind, counts in sorted(made.items())}
