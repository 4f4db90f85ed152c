"""What vLLM does wrong with seeds on a CPU: a prompt that takes several steps would end the engine.

Seen in 0.32, without this package, too. A step samples for each request, also for one whose prompt
goes on, and takes back what that drew from the generator of its seed, by an offset. Generators of
CPUs have none, and raise in the step loop.
"""

from __future__ import annotations

import functools
from typing import Any


def rewind_seeds(runner: Any) -> None:
    """Have a runner on a CPU take back what was drawn for nobody by the generator's state."""
    if runner.device.type != "cpu":
        return
    prepare, keep_books = runner._prepare_inputs, runner._bookkeeping_sync
    states: list[tuple[Any, Any]] = []

    @functools.wraps(prepare)
    def prepare_inputs(*args: Any, **kwargs: Any) -> Any:
        result = prepare(*args, **kwargs)
        mask = runner.discard_request_mask.np
        seeded = runner.input_batch.generators.items()
        states[:] = [(one, one.get_state()) for i, one in seeded if mask[i]]
        return result

    @functools.wraps(keep_books)
    def bookkeeping_sync(*args: Any, **kwargs: Any) -> Any:
        batch = runner.input_batch
        seeded, batch.generators = batch.generators, {}
        try:
            return keep_books(*args, **kwargs)
        finally:
            batch.generators = seeded
            for one, state in states:
                one.set_state(state)

    runner._prepare_inputs, runner._bookkeeping_sync = prepare_inputs, bookkeeping_sync
