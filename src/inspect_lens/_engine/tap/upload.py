"""Writing a step's plan where the taps read it: at once on a CPU, stream-ordered on a GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from inspect_lens._engine.plan.step_plan import StepPlan

from .buffers import HEAD, TapState

_EVENT: Any = torch.cuda.Event  # its constructor has no types

STEER, CAPTURE = 1, 2
"""Bits of a tap's flag."""


class Maps:
    """Fills the maps before a step, straight into the buffers: on a CPU nothing runs meanwhile."""

    def __init__(self, state: TapState) -> None:
        self._state = state
        self._header = state.header.numpy()
        self._base = state.base.numpy()

    def write(self, plan: StepPlan, first_row: int) -> None:
        """Make the next forward pass carry the plan out."""
        _fill(self._header, plan, first_row)
        self._base[: len(plan.base)] = plan.base
        _tell_host(self._state, plan)

    def repeat(self, first_row: int, done: int = 0) -> None:
        """Make the next forward pass carry out the plan that was written last."""
        self._header[1], self._header[2] = first_row, done

    def clear(self) -> None:
        """Make the following forward passes do nothing."""
        _forget(self._state)
        self._header[: HEAD + len(self._state.taps)] = 0


class CudaMaps(Maps):
    """Writes through rotating pinned staging on the stream that runs the model.

    The CPU prepares the next step while the GPU still runs the last one, so a staging buffer
    may be written again only once its copy has been made.
    """

    DEPTH = 4
    """Steps that may be in flight; asynchronous scheduling has two, a pipeline a few more."""

    def __init__(self, state: TapState) -> None:
        self._state = state
        pinned = torch.zeros(self.DEPTH, *state.header.shape, dtype=torch.int32).pin_memory()
        bases = torch.zeros(self.DEPTH, *state.base.shape, dtype=torch.int32).pin_memory()
        # Unpacked once: indexing a tensor costs microseconds in every step.
        self._headers = [(t, t.numpy()) for t in pinned]
        self._bases = [(t, t.numpy()) for t in bases]
        self._copied = [_EVENT() for _ in range(self.DEPTH)]
        self._turn = 0
        self._flags, self._origin = state.flags, state.header[1:2]
        self._elapsed = state.header[2:3]
        self._at = 0
        """What stands in `_origin`."""
        self._done = 0
        """What stands in `_elapsed`."""

    def write(self, plan: StepPlan, first_row: int) -> None:
        i = self._turn
        self._turn = (i + 1) % self.DEPTH
        self._copied[i].synchronize()
        header, header_np = self._headers[i]
        used = _fill(header_np, plan, first_row)
        self._state.header[:used].copy_(header[:used], non_blocking=True)
        if n := len(plan.base):
            base, base_np = self._bases[i]
            base_np[:n] = plan.base
            self._state.base[:n].copy_(base[:n], non_blocking=True)
        self._copied[i].record()
        self._at, self._done = first_row, 0
        _tell_host(self._state, plan)

    def repeat(self, first_row: int, done: int = 0) -> None:
        # A number for the GPU, and nothing at all where rows are not kept.
        if first_row != self._at:
            # The value travels with the launch: there is no buffer to keep.
            self._origin.fill_(first_row)
            self._at = first_row
        if done != self._done:
            self._elapsed.fill_(done)
            self._done = done

    def clear(self) -> None:
        # The flags gate everything else, which may keep old numbers.
        _forget(self._state)
        self._flags.zero_()


def _fill(header: np.ndarray[Any, Any], plan: StepPlan, first_row: int) -> int:
    """Write a plan as the taps read it; returns how many numbers of the header were written."""
    n, taps = len(plan.tokens), len(plan.steers)
    header[0], header[1], header[2] = n, first_row, 0
    header[HEAD : HEAD + taps] = plan.steers * STEER + plan.captures * CAPTURE
    used = HEAD + taps + 5 * n
    header[HEAD + taps : used] = plan.tokens.reshape(-1)
    return used


def _tell_host(state: TapState, plan: StepPlan) -> None:
    state.steering = plan.steers.tolist()
    state.capturing = plan.captures.tolist()
    state.is_active = True


def _forget(state: TapState) -> None:
    state.is_active = False
    state.steering = state.capturing = [False] * len(state.taps)


def maps_for(state: TapState) -> Maps:
    """The writer for the device that a state lives on."""
    return CudaMaps(state) if state.ring.is_cuda else Maps(state)
