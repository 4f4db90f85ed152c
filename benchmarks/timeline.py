"""In the worker process: what the device does in a step, kernel by kernel.

A step clock says that a step takes longer; this says whether its kernels run longer, more of them
run, or the device waits. One stretch of full decode steps is traced with CUPTI (`torch.profiler`),
which by itself costs time: compare arms with one another, not with the timed runs.
"""

from __future__ import annotations

import json
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

__all__ = ["start_timeline", "stop_timeline", "timeline_summary"]

SKIPPED, TRACED = 24, 40
"""Full decode steps before the trace begins, and within it."""

_KINDS = ("kernel", "gpu_memcpy", "gpu_memset")
_SHOWN = 14

Event = dict[str, Any]
"""`name`, `cat`, `ts` and `dur` in microseconds, `args` with `stream` and `bytes`: as traced."""


def start_timeline(worker: Any, sequences: int) -> None:
    """Trace steps of `sequences` decoding requests, once there have been some."""
    runner = worker.model_runner
    original: Callable[..., Any] = runner.execute_model
    seen = 0
    profiler: Any = None
    events: list[Event] = []

    def stop() -> None:
        nonlocal profiler
        if profiler is not None:
            torch.cuda.synchronize(worker.device)
            profiler.stop()
            profiler = None

    def read() -> None:
        traced = profiler
        stop()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            traced.export_chrome_trace(str(path))
            found = json.loads(path.read_text())["traceEvents"]
        events.extend(e for e in found if e.get("cat") in _KINDS)

    def execute_model(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal seen, profiler
        counts = scheduler_output.num_scheduled_tokens
        if len(counts) == sum(counts.values()) == sequences:
            if seen == SKIPPED:
                # So that the trace holds these steps and nothing of the one before.
                torch.cuda.synchronize(worker.device)
                profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
                profiler.start()
            if seen == SKIPPED + TRACED:
                read()
            seen += 1
        return original(scheduler_output, *args, **kwargs)

    runner.execute_model = execute_model
    worker.timeline = (original, events, stop)


def stop_timeline(worker: Any) -> list[Event]:
    """Stop, and return what was traced: nothing where the batch never was that full for long."""
    original, events, stop = worker.timeline
    worker.model_runner.execute_model = original
    # A batch that was not full for that long: what was traced is of too few steps.
    stop()
    del worker.timeline
    return [{k: e[k] for k in ("name", "cat", "ts", "dur")} | _args(e) for e in events]


def _args(event: Event) -> Event:
    args = event.get("args", {})
    return {"args": {k: args[k] for k in ("stream", "bytes") if k in args}}


def timeline_summary(events: Sequence[Event], steps: int = TRACED) -> dict[str, Any] | None:
    """Tell where the time of a step went; None without events.

    Args:
        events: of whole steps, as `stop_timeline` returns them.
        steps: how many.

    Returns:
        Milliseconds per step: `step_ms` from one to the next; `busy_ms`, in which the model's
        stream ran something, and `idle_ms`, in which it did not; `kernels` by time; `copies` by
        kind and stream.
    """
    if not events:
        return None
    by_stream: dict[Any, list[Event]] = defaultdict(list)
    for event in events:
        by_stream[event["args"].get("stream")].append(event)
    model = max(by_stream.values(), key=lambda of: sum(e["dur"] for e in of if _is_kernel(e)))
    begin = min(e["ts"] for e in model)
    end = max(e["ts"] + e["dur"] for e in model)
    busy = sum(b - a for a, b in _union((e["ts"], e["ts"] + e["dur"]) for e in model))
    copies = [e for e in events if e["cat"] == "gpu_memcpy"]
    kernels = [e for e in events if _is_kernel(e)]
    return {
        "steps": steps,
        "step_ms": _ms(end - begin, steps),
        "busy_ms": _ms(busy, steps),
        "idle_ms": _ms(end - begin - busy, steps),
        "kernels": _totals(kernels, steps, lambda e: e["name"].split("(")[0][:90]),
        "copies": _totals(
            copies, steps, lambda e: f"{e['name']}, stream {e['args'].get('stream')}"
        ),
    }


def _is_kernel(event: Event) -> bool:
    return bool(event["cat"] == "kernel")


def _ms(microseconds: float, steps: int) -> float:
    return round(microseconds / 1e3 / steps, 4)


def _union(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Intervals that do not overlap, in order."""
    merged: list[tuple[float, float]] = []
    for a, b in sorted(spans):
        if merged and a <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(b, merged[-1][1]))
        else:
            merged.append((a, b))
    return merged


def _totals(
    events: Sequence[Event], steps: int, name: Callable[[Event], str]
) -> list[dict[str, Any]]:
    groups: dict[str, list[Event]] = defaultdict(list)
    for event in events:
        groups[name(event)].append(event)
    rows = []
    for key, group in groups.items():
        row: dict[str, Any] = {
            "name": key,
            "per_step": round(len(group) / steps, 2),
            "ms": _ms(sum(e["dur"] for e in group), steps),
        }
        n_bytes = sum(e["args"].get("bytes", 0) for e in group)
        if n_bytes:
            row["mib"] = round(n_bytes / steps / (1 << 20), 4)
        rows.append(row)
    return sorted(rows, key=lambda row: -row["ms"])[:_SHOWN]
