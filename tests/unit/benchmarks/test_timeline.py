"""What a trace of the device says of a step."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.timeline import (
    SKIPPED,
    TRACED,
    start_timeline,
    stop_timeline,
    timeline_summary,
)


def kernel(name: str, ts: float, dur: float, stream: int = 7) -> dict[str, Any]:
    return {"name": name, "cat": "kernel", "ts": ts, "dur": dur, "args": {"stream": stream}}


def copy(ts: float, dur: float, n_bytes: int, stream: int = 20) -> dict[str, Any]:
    args = {"stream": stream, "bytes": n_bytes}
    name = "Memcpy DtoH (Device -> Pinned)"
    return {"name": name, "cat": "gpu_memcpy", "ts": ts, "dur": dur, "args": args}


def test_time_of_a_step_is_split_into_work_waiting_and_copies() -> None:
    # Two steps of 950 us, with a gap of 100 us in which only a copy runs.
    events = [
        kernel("matmul(float*)", 0, 400),
        kernel("matmul(float*)", 400, 600),
        kernel("norm<bf16>", 1100, 400),
        kernel("matmul(float*)", 1500, 400),
        kernel("other", 0, 50, stream=9),
        copy(450, 500, 2 << 20),
        copy(1950, 50, 1 << 10),
    ]
    found = timeline_summary(events, steps=2)
    assert found is not None
    assert found["step_ms"] == pytest.approx(0.95)
    assert found["busy_ms"] == pytest.approx(0.9)
    assert found["idle_ms"] == pytest.approx(0.05)
    assert found["kernels"][0] == {"name": "matmul", "per_step": 1.5, "ms": 0.7}
    assert [row["name"] for row in found["kernels"]] == ["matmul", "norm<bf16>", "other"]
    (copies,) = found["copies"]
    assert copies["name"] == "Memcpy DtoH (Device -> Pinned), stream 20"
    assert copies["per_step"] == 1
    assert copies["ms"] == pytest.approx(0.275)
    assert copies["mib"] == pytest.approx((2 + 1 / 1024) / 2, abs=1e-4)
    assert timeline_summary([]) is None


class Profile:
    """Notes when it was on, and writes a trace like torch's."""

    made: list[Profile]

    def __init__(self, activities: list[Any]) -> None:
        assert activities == [torch.profiler.ProfilerActivity.CUDA]
        self.made.append(self)
        self.is_on = False

    def start(self) -> None:
        self.is_on = True

    def stop(self) -> None:
        self.is_on = False

    def export_chrome_trace(self, path: str) -> None:
        assert not self.is_on
        kept = [kernel("matmul", i, 1.0) | {"pid": 0} for i in range(3)]
        Path(path).write_text(json.dumps({"traceEvents": [{"cat": "cpu_op", "ts": 0}, *kept]}))


def test_the_trace_holds_full_steps_once_there_have_been_some(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Profile, "made", [], raising=False)
    monkeypatch.setattr(torch.profiler, "profile", Profile)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    on = []

    class Runner:
        def execute_model(self, scheduler_output: Any) -> str:
            on.append(any(p.is_on for p in Profile.made))
            return "out"

    worker = SimpleNamespace(model_runner=Runner(), device="cuda:0")

    def step(*counts: int) -> None:
        scheduled = {str(i): n for i, n in enumerate(counts)}
        output = SimpleNamespace(num_scheduled_tokens=scheduled)
        assert worker.model_runner.execute_model(output) == "out"

    original = worker.model_runner.execute_model
    start_timeline(worker, 2)
    step(5, 5)
    for _ in range(SKIPPED + TRACED + 3):
        step(1, 1)
    step(1)
    found = stop_timeline(worker)
    assert on == [False] * (1 + SKIPPED) + [True] * TRACED + [False] * 4
    assert found == [kernel("matmul", i, 1.0) for i in range(3)]
    assert worker.model_runner.execute_model == original
    start_timeline(worker, 3)
    step(1, 1)
    assert stop_timeline(worker) == []
    start_timeline(worker, 2)
    for _ in range(SKIPPED + 5):
        step(1, 1)
    assert Profile.made[-1].is_on
    assert stop_timeline(worker) == [], "too few steps"
    assert not any(p.is_on for p in Profile.made)
