"""How the lens gets ready in a worker: in stages, each on all ranks of the engine or on none.

Whatever is refused or goes wrong in a stage turns the lens off in the whole engine, see
`compat.off`; no rank stays with taps where another has none, as it would steer its share alone.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from typing import Any

from inspect_lens._vllm.compat.off import off, reason_of, turn_off

logger = logging.getLogger("vllm.inspect_lens")

_WAIT_S = 300.0
"""Seconds between the first and the last worker that have loaded the model."""
_OFF = "off: "
_PASSES = ("determine_available_memory", "compile_or_warm_up_model")
"""Of vLLM's worker: what runs the model for the first time; the last one ends the start."""


class Start:
    """The lens of one worker, from the loaded model to the first request."""

    def __init__(self, worker: Any) -> None:
        self.worker = worker
        self.config = worker.vllm_config
        self.undo = ExitStack()
        """Takes the lens out of the model again."""
        self.check: Callable[[], None] = lambda: None
        """Raises what is wrong with the lens that was put in; run when the model is warm."""

    def run(self, prepare: Callable[[Start], str]) -> None:
        """Prepare the model, and have the lens checked once the model is warm."""
        if not self.stage("model", functools.partial(prepare, self)):
            return
        for name in _PASSES:
            setattr(
                self.worker,
                name,
                self._pass(getattr(self.worker, name), is_last=name == _PASSES[-1]),
            )

    def stage(self, name: str, work: Callable[[], str | None]) -> bool:
        """Do a part of the start; returns whether it went well on all ranks."""
        mark, reason, is_told = "", off(self.config), off(self.config) is not None
        try:
            if reason is None:
                mark = work() or ""
        except BaseException as error:  # noqa: BLE001 - a door
            reason = reason_of(error)
        if (reason := agree(name, mark, reason)) is None:
            return True
        self.take_out()
        turn_off(self.config, reason, is_told=is_told or not is_first_rank())
        return False

    def take_out(self) -> None:
        """Have the worker run as without the lens."""
        runner = self.worker.model_runner
        # Compiled code and graphs may have the taps by now. They are idle, and find their state.
        runner.inspect_lens_idle, runner.inspect_lens = getattr(runner, "inspect_lens", None), None
        self.undo.close()

    def _pass(self, original: Callable[..., Any], *, is_last: bool) -> Callable[..., Any]:
        """Run the model for the first time, and where that fails once more without the lens."""

        @functools.wraps(original)
        def run(*args: Any, **kwargs: Any) -> Any:
            try:
                result = original(*args, **kwargs)
            except Exception as error:
                if off(self.config) is not None:
                    raise
                reason = reason_of(error)
                self.take_out()
                result = original(*args, **kwargs)  # or vLLM's own error
                turn_off(self.config, reason, is_told=not is_first_rank())
            if is_last and off(self.config) is None:
                self.stage("check", self.check)
            return result

        return run


def refusal_here(worker: Any) -> str | None:
    """Why the lens is off in a worker; `collective_rpc("inspect_lens_refusal")` calls it."""
    return off(worker.vllm_config)


def is_first_rank() -> bool:
    """Whether this worker speaks for the engine in the log."""
    import torch.distributed as dist

    return not dist.is_initialized() or dist.get_rank() == 0


def agree(stage: str, mark: str, reason: str | None) -> str | None:
    """Compare notes with all other workers, on whichever hosts they are."""
    import torch.distributed as dist

    if not dist.is_initialized() or dist.get_world_size() == 1:
        return reason
    # What `init_process_group` made: all ranks can reach it, and it answers without a collective,
    # which would hang where a rank takes no part.
    store: Any = dist.distributed_c10d._get_default_store()
    rank = dist.get_rank()
    store.set(f"inspect_lens/{stage}/{rank}", mark if reason is None else _OFF + reason)
    found = [reason]
    for other in range(dist.get_world_size()):
        try:
            store.wait([f"inspect_lens/{stage}/{other}"], timedelta(seconds=_WAIT_S))
            theirs = store.get(f"inspect_lens/{stage}/{other}").decode()
        except RuntimeError:
            found.append(
                f"the worker of rank {other} has not said within {_WAIT_S:g} s that it has "
                "inspect-lens; install it on all hosts, or set INSPECT_LENS_DISABLE=1 on all"
            )
            break
        if theirs.startswith(_OFF):
            found.append(f"the worker of rank {other}: {theirs.removeprefix(_OFF)}")
        elif reason is None and theirs != mark:
            found.append(
                f"the worker of rank {other} has other INSPECT_LENS_* settings, or another "
                "version; give all hosts the same ones"
            )
    return next((one for one in found if one is not None), None)
