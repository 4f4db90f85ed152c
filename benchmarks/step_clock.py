"""In the worker process: times each step of the model runner with CUDA events.

Switched on and off by `collective_rpc`, so that the timed runs of an arm have nothing of it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["start_clock", "stop_clock", "summary"]

Step = tuple[int, int, Any, Any]
"""Sequences, tokens, and the start and end of a step: CUDA events, or seconds on a CPU."""


def start_clock(worker: Any) -> None:
    """Begin to time the steps of this worker.

    The events are recorded in the stream of the model: copies on side streams are not in the
    time, but what they take from the model is.
    """
    runner = worker.model_runner
    original: Callable[..., Any] = runner.execute_model
    steps: list[Step] = []
    is_cuda = worker.device.type == "cuda"

    def mark() -> Any:
        if not is_cuda:
            return time.perf_counter()
        event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def execute_model(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        before = mark()
        result = original(scheduler_output, *args, **kwargs)
        counts = scheduler_output.num_scheduled_tokens
        steps.append((len(counts), sum(counts.values()), before, mark()))
        return result

    runner.execute_model = execute_model
    worker.step_clock = (original, steps, is_cuda)


def stop_clock(worker: Any) -> list[tuple[int, int, float]]:
    """Stop timing.

    Returns:
        (sequences, tokens, milliseconds) of each step that ran something.
    """
    original, steps, is_cuda = worker.step_clock
    # The wrapper lies on the instance; the class has the method.
    worker.model_runner.execute_model = original
    del worker.step_clock
    if is_cuda:
        torch.cuda.synchronize(worker.device)
        return [(n, t, a.elapsed_time(b)) for n, t, a, b in steps if t]
    return [(n, t, (b - a) * 1e3) for n, t, a, b in steps if t]


def summary(steps: list[tuple[int, int, float]]) -> dict[str, Any] | None:
    """Median of the decode steps of the fullest batch; None without such steps.

    Args:
        steps: as `stop_clock` returns them.
    """
    decode = [(n, ms) for n, t, ms in steps if n == t]
    if not decode:
        return None
    most = max(n for n, _ in decode)
    chosen = sorted(ms for n, ms in decode if n == most)
    return {
        "sequences": most,
        "steps": len(chosen),
        "ms_median": statistics.median(chosen),
        "ms_p90": chosen[min(len(chosen) - 1, int(0.9 * len(chosen)))],
    }
