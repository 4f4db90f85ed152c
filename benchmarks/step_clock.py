"""In the worker process: times each step of the model runner with CUDA events.

Switched on and off by `collective_rpc`, so that the timed runs of an arm have nothing of it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, TypeVar

import torch

__all__ = ["fullest", "start_clock", "stop_clock", "summary"]

Step = tuple[int, int, Any, Any, float]
"""Sequences, tokens, the start and end of a step (CUDA events, or seconds on a CPU), and the
milliseconds that the call took its thread."""

Timed = tuple[int, int, float, float, float]
"""Sequences, tokens, milliseconds of the step, until the next one began, and of the call."""


AnyStep = TypeVar("AnyStep", bound=tuple[Any, ...])


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
        before, called = mark(), time.perf_counter()
        result = original(scheduler_output, *args, **kwargs)
        took = 1e3 * (time.perf_counter() - called)
        counts = scheduler_output.num_scheduled_tokens
        if counts:
            steps.append((len(counts), sum(counts.values()), before, mark(), took))
        return result

    runner.execute_model = execute_model
    worker.step_clock = (original, steps, is_cuda)


def stop_clock(worker: Any) -> list[Timed]:
    """Stop timing.

    Returns:
        Each step that ran something and has another one behind it.
    """
    original, steps, is_cuda = worker.step_clock
    # The wrapper lies on the instance; the class has the method.
    worker.model_runner.execute_model = original
    del worker.step_clock
    if is_cuda:
        torch.cuda.synchronize(worker.device)

    def between(a: Any, b: Any) -> float:
        return float(a.elapsed_time(b) if is_cuda else (b - a) * 1e3)

    return [
        (n, t, between(begin, end), between(begin, following[2]), took)
        for (n, t, begin, end, took), following in pairwise(steps)
    ]


def fullest(steps: Sequence[AnyStep]) -> list[AnyStep]:
    """Decode steps of the largest batch, of steps that begin with their sequences and tokens."""
    decode = [step for step in steps if step[0] == step[1]]
    most = max((step[0] for step in decode), default=0)
    return [step for step in decode if step[0] == most]


def summary(steps: list[Timed]) -> dict[str, Any] | None:
    """Medians of the decode steps of the fullest batch; None without such steps.

    Args:
        steps: as `stop_clock` returns them.
    """
    chosen = fullest(steps)
    if not chosen:
        return None
    ms = sorted(step[2] for step in chosen)
    first = next(i for i, step in enumerate(steps) if step[:2] == chosen[0][:2])
    return {
        "sequences": chosen[0][0],
        "steps": len(chosen),
        "ms_median": statistics.median(ms),
        "ms_p90": ms[min(len(ms) - 1, int(0.9 * len(ms)))],
        # Sampling, and whatever the device waits for, lie between a step's end and the next.
        "ms_to_next_median": statistics.median(step[3] for step in chosen),
        "ms_to_next_mean": statistics.mean(step[3] for step in chosen),
        "call_ms_median": statistics.median(step[4] for step in chosen),
        # Before the batch was full: sequences, tokens, and the three times, of each step.
        "first": [[n, t, *(round(ms, 2) for ms in times)] for n, t, *times in steps[:first]][-24:],
    }
