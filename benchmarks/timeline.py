"""What a run is made of: operations of the host and of the device, out of a trace of a worker.

`python -m benchmarks.run --timeline logit-lens …` has each arm run once more when all are measured,
with vLLM's own profiler, and writes this beside the result.
"""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

__all__ = ["options", "read", "table"]

_ON_DEVICE = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
_ON_HOST = frozenset({"cpu_op", "cuda_runtime", "cuda_driver"})
_STEP = "execute_"
"""How vLLM's name for a step begins."""
_DECODES = "execute_context_0"
"""And for one that reads no prompt."""
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
    """How long the device was busy, and the longest operations of steps that only decode.

    The device runs behind the host, so what it did for those steps begins at its own mark of the
    first of them.
    """
    spans = [e for e in events if e.get("ph") == "X"]
    marks = [e for e in spans if str(e["name"]).startswith(_STEP) and "user" in str(e.get("cat"))]
    starts = sorted(_start(e) for e in marks if e["cat"] == "user_annotation")
    if not starts:
        return "the trace names no step\n"
    device = [e for e in spans if e.get("cat") in _ON_DEVICE]
    first = {cat: _first_decoding(marks, cat) for cat in ("user_annotation", "gpu_user_annotation")}
    decoding = [e for e in device if _start(e) >= first["gpu_user_annotation"]]
    host = [e for e in spans if e.get("cat") in _ON_HOST and _start(e) >= first["user_annotation"]]
    begun = [start for start in starts if start >= first["user_annotation"]]
    steps = max(1, len(begun))
    apart = [b - a for a, b in pairwise(begun)] or [0.0]
    prompts = [e for e in device if _start(e) < first["gpu_user_annotation"]]
    lines = [
        f"{len(starts)} steps, {(starts[-1] - starts[0]) / 1e3:.1f} ms from the first to the last; "
        f"device busy {_busy(device) / 1e3:.1f} ms, "
        f"{_busy(prompts) / 1e3:.1f} ms of it with prompts",
        f"{steps} steps only decode, {median(apart):.0f} us from one to the next in the median; "
        f"device busy {_busy(decoding) / steps:.0f} us of a step",
    ]
    for title, rows in (
        ("device", _summed(((e, float(e["dur"])) for e in decoding), steps)),
        ("host, each without what it calls", _summed(_own(host), steps)),
    ):
        total = sum(row.micros for row in rows)
        lines += ["", f"{title}: {total:.0f} us per step", "   us/step  calls/step  operation"]
        lines += [f"{r.micros:10.1f} {r.calls:11.1f}  {r.name[:_NAME]}" for r in rows[:most]]
    return "\n".join(lines) + "\n"


def _first_decoding(marks: Iterable[Mapping[str, Any]], cat: str) -> float:
    """When the first step begins behind which no step reads a prompt."""
    of_cat = sorted((e for e in marks if e["cat"] == cat), key=_start)
    reading = [i for i, e in enumerate(of_cat) if not str(e["name"]).startswith(_DECODES)]
    behind = of_cat[reading[-1] + 1 :] if reading else of_cat
    return _start(behind[0]) if behind else float("inf")


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
        for event in sorted(events, key=lambda e: (_start(e), -float(e["dur"]))):
            while around and _end(made[around[-1]][0]) <= _start(event):
                around.pop()
            if around:
                outer, micros = made[around[-1]]
                made[around[-1]] = outer, micros - float(event["dur"])
            around.append(len(made))
            made.append((event, float(event["dur"])))
    return made


def _start(event: Mapping[str, Any]) -> float:
    return float(event["ts"])


def _end(event: Mapping[str, Any]) -> float:
    return _start(event) + float(event["dur"])


def _busy(device: Iterable[Mapping[str, Any]]) -> float:
    """Microseconds in which at least one stream has something to do."""
    total, until = 0.0, float("-inf")
    for event in sorted(device, key=_start):
        total += max(0.0, _end(event) - max(until, _start(event)))
        until = max(until, _end(event))
    return total
