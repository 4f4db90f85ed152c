"""In the worker process: what the lens takes of the step loop's thread, part by part.

An engine whose scheduler is busy for most of a step has little time to give, and a GPU that waits
for its next launch shows as a longer step. Switched on and off by `collective_rpc`, as the step
clock is.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from .step_clock import fullest

__all__ = ["host_summary", "start_host_clock", "stop_host_clock"]

PARTS = {
    "step": ("", "execute_model"),
    "add": ("stepper", "add"),
    "take_up": ("stepper", "take_up"),
    "begin": ("stepper", "begin"),
    "end": ("stepper", "end_step"),
    "readout": ("copier", "apply"),
    "copy": ("copier", "copy"),
    "place": ("arena", "place"),
    "message": ("exporter", "_send"),
}
"""By name: whose method it is, and the method. All but `step` lie within it."""

Times = dict[str, tuple[float, float]]
"""By part: milliseconds on the clock, and of the thread's own work."""


def start_host_clock(worker: Any) -> None:
    """Begin to time the parts of this worker's steps."""
    runner = worker.model_runner
    stepper = runner.inspect_lens
    exporter = stepper._exporter  # noqa: SLF001 (an instrument)
    owners = {
        "": runner,
        "stepper": stepper,
        "copier": exporter.copier,
        "arena": exporter.arena,
        "exporter": exporter,
    }
    steps: list[tuple[int, int, Times, Any]] = []
    now: Times = {}
    is_cuda = worker.device.type == "cuda"
    events: list[Any] = []

    def mark() -> None:
        if is_cuda:
            event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record()
            events.append(event)

    def timed(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            if name == "end":
                mark()
            wall, cpu = time.perf_counter(), time.thread_time()
            try:
                return original(*args, **kwargs)
            finally:
                before = now.get(name, (0.0, 0.0))
                now[name] = (
                    before[0] + 1e3 * (time.perf_counter() - wall),
                    before[1] + 1e3 * (time.thread_time() - cpu),
                )
                if name == "end":
                    mark()

        return run

    def step(original: Callable[..., Any]) -> Callable[..., Any]:
        def execute_model(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            now.clear()
            events.clear()
            result = original(scheduler_output, *args, **kwargs)
            counts = scheduler_output.num_scheduled_tokens
            steps.append((len(counts), sum(counts.values()), dict(now), tuple(events)))
            return result

        return execute_model

    undo: list[Callable[[], None]] = []
    for name, (whose, method) in PARTS.items():
        owner = owners[whose]
        wrapped = timed(name, getattr(owner, method))
        undo.append(_restorer(owner, method))
        setattr(owner, method, step(wrapped) if name == "step" else wrapped)
    worker.host_clock = (steps, undo, is_cuda)


def _restorer(owner: Any, method: str) -> Callable[[], None]:
    """What puts a method back: on the instance where it lay there, else the class has it."""
    if method in vars(owner):
        original = vars(owner)[method]
        return lambda: setattr(owner, method, original)
    return lambda: delattr(owner, method)


def stop_host_clock(worker: Any) -> list[tuple[int, int, Times, float]]:
    """Stop timing.

    Returns:
        Sequences, tokens and times of each step that ran something, and the milliseconds that its
        `end` took the device's stream, which are 0 on a CPU.
    """
    steps, undo, is_cuda = worker.host_clock
    for restore in undo:
        restore()
    del worker.host_clock
    if is_cuda:
        torch.cuda.synchronize(worker.device)
    return [
        (n, t, times, events[0].elapsed_time(events[1]) if len(events) == 2 else 0.0)
        for n, t, times, events in steps
        if t
    ]


def host_summary(steps: list[tuple[int, int, Times, float]]) -> dict[str, Any] | None:
    """Medians and means of the decode steps of the fullest batch; None without such steps.

    Only means tell what is done for some steps together.

    Args:
        steps: as `stop_host_clock` returns them.
    """
    chosen = fullest(steps)
    if not chosen:
        return None

    def over(middle: Callable[[list[float]], float], which: int) -> dict[str, float]:
        found = {}
        for part in PARTS:
            values = [step[2].get(part, (0.0, 0.0))[which] for step in chosen]
            found[part] = round(middle(values), 4)
        return found

    begun = next(i for i, step in enumerate(steps) if step[:2] == chosen[0][:2])
    return {
        "sequences": chosen[0][0],
        "steps": len(chosen),
        "wall_ms": over(statistics.median, 0),
        "thread_ms": over(statistics.median, 1),
        "wall_ms_mean": over(statistics.fmean, 0),
        "thread_ms_mean": over(statistics.fmean, 1),
        "end_on_device_ms": round(statistics.median(step[3] for step in chosen), 4),
        "end_on_device_ms_mean": round(statistics.fmean(step[3] for step in chosen), 4),
        # Before the batch was full: sequences, tokens, and milliseconds on the clock, of each step.
        # What new requests take there the device waits for.
        "first": [
            [n, t, {part: round(wall, 3) for part, (wall, _) in times.items()}]
            for n, t, times, _ in steps[:begun]
        ][-24:],
    }
