"""What a step is made of: operations of the host and of the device, out of a trace of a worker.

`python -m benchmarks.run --timeline logit-lens …` has each arm run once more when all are measured,
with vLLM's own profiler, and writes this beside the result.
"""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["STEPS", "options", "read", "table"]

STEPS = 20
"""Steps of a trace, behind `_SKIPPED` ones, so that all of them decode."""
_SKIPPED = 8
_ON_DEVICE = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
_ON_HOST = frozenset({"cpu_op", "cuda_runtime", "cuda_driver"})
_STEP = "execute_"
"""How vLLM's name for a step begins."""
_NAME = 96
"""Letters of a name that are shown."""


def options(folder: Path) -> dict[str, Any]:
    """Options of an engine that can be profiled; it costs nothing until that begins."""
    return {
        "profiler_config": {
            "profiler": "torch",
            "torch_profiler_dir": str(folder),
            "torch_profiler_with_stack": False,
            "torch_profiler_dump_cuda_time_total": False,
            "delay_iterations": _SKIPPED,
            "max_iterations": STEPS,
        }
    }


class _Row(NamedTuple):
    name: str
    micros: float
    """Of a step, without what is called within."""
    calls: float
    """Per step."""


def read(folder: Path, prefix: str) -> list[dict[str, Any]]:
    """Events of the first worker's trace of one arm."""
    files = sorted(folder.glob(f"{prefix}_*.json*"))
    if not files:
        raise FileNotFoundError(f"{prefix}: the profiler left nothing")
    opened = gzip.open if files[0].suffix == ".gz" else open
    with opened(files[0], "rt") as file:
        events: list[dict[str, Any]] = json.load(file)["traceEvents"]
    return events


def table(events: Sequence[Mapping[str, Any]], most: int = 25) -> str:
    """The longest operations per step as text, and how long the device was busy."""
    spans = [e for e in events if e.get("ph") == "X"]
    marks = [e for e in spans if str(e["name"]).startswith(_STEP) and "user" in str(e.get("cat"))]
    starts = sorted({float(e["ts"]) for e in marks if e["cat"] == "user_annotation"})
    steps = max(1, len(starts))
    device = [e for e in spans if e.get("cat") in _ON_DEVICE]
    host = [e for e in spans if e.get("cat") in _ON_HOST]
    apart = (starts[-1] - starts[0]) / (steps - 1) if steps > 1 else 0.0
    lines = [
        f"{steps} steps, {apart:.0f} us from one to the next; "
        f"device busy {_busy(device) / steps:.0f} us of a step"
    ]
    for title, rows in (
        ("device", _summed(((e, float(e["dur"])) for e in device), steps)),
        ("host, each without what it calls", _summed(_own(host), steps)),
    ):
        total = sum(row.micros for row in rows)
        lines += ["", f"{title}: {total:.0f} us per step", "   us/step  calls/step  operation"]
        lines += [f"{r.micros:10.1f} {r.calls:11.1f}  {r.name[:_NAME]}" for r in rows[:most]]
    return "\n".join(lines) + "\n"


def _summed(taken: Iterable[tuple[Mapping[str, Any], float]], steps: int) -> list[_Row]:
    sums: dict[str, list[float]] = defaultdict(list)
    for event, micros in taken:
        sums[str(event["name"])].append(micros)
    rows = [_Row(name, sum(each) / steps, len(each) / steps) for name, each in sums.items()]
    return sorted(rows, key=lambda row: -row.micros)


def _own(host: Iterable[Mapping[str, Any]]) -> list[tuple[Mapping[str, Any], float]]:
    """Each with its time without that of the events within, on the same thread."""
    by_thread: dict[Any, list[Mapping[str, Any]]] = defaultdict(list)
    for event in host:
        by_thread[event["pid"], event["tid"]].append(event)
    made: list[tuple[Mapping[str, Any], float]] = []
    for events in by_thread.values():
        around: list[int] = []
        for event in sorted(events, key=lambda e: (float(e["ts"]), -float(e["dur"]))):
            while around and _end(made[around[-1]][0]) <= float(event["ts"]):
                around.pop()
            if around:
                outer, micros = made[around[-1]]
                made[around[-1]] = outer, micros - float(event["dur"])
            around.append(len(made))
            made.append((event, float(event["dur"])))
    return made


def _end(event: Mapping[str, Any]) -> float:
    return float(event["ts"]) + float(event["dur"])


def _busy(device: Iterable[Mapping[str, Any]]) -> float:
    """Microseconds in which at least one stream has something to do."""
    total, until = 0.0, float("-inf")
    for event in sorted(device, key=lambda e: float(e["ts"])):
        total += max(0.0, _end(event) - max(until, float(event["ts"])))
        until = max(until, _end(event))
    return total
