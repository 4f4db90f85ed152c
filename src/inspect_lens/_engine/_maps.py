"""Writing a step's plan where the taps read it: at once on a CPU, stream-ordered on a GPU."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from ._plan import StepPlan
from ._state import TapState

__all__ = ["CAPTURE", "STEER", "CpuMaps", "CudaMaps", "Maps", "maps_for"]

_EVENT: Any = torch.cuda.Event  # its constructor has no types

STEER, CAPTURE = 1, 2
"""Bits of a site's flag."""


class Maps(Protocol):
    """Fills the maps before a step and leaves the taps idle after it."""

    def write(self, plan: StepPlan) -> None:
        """Make the next forward pass carry the plan out."""
        ...

    def clear(self, plan: StepPlan) -> None:
        """Make the following forward passes do nothing."""
        ...


class CpuMaps:
    """Writes straight into the buffers: on a CPU nothing runs behind our back."""

    def __init__(self, state: TapState) -> None:
        self._state = state

    def write(self, plan: StepPlan) -> None:
        """See `Maps.write`."""
        state = self._state
        for site, index, rows in plan.steer:
            state.steer_rows[site, torch.from_numpy(index)] = torch.from_numpy(rows)
            state.steering[site] = True
        for site, tokens, slot in plan.capture:
            slots = torch.arange(slot, slot + len(tokens), dtype=torch.int32)
            state.slots[site, torch.from_numpy(tokens)] = slots
            state.capturing[site] = True

    def clear(self, plan: StepPlan) -> None:
        """See `Maps.clear`."""
        state = self._state
        for site, index, _ in plan.steer:
            state.steer_rows[site, torch.from_numpy(index)] = 0
            state.steering[site] = False
        for site, tokens, _ in plan.capture:
            state.slots[site, torch.from_numpy(tokens)] = -1
            state.capturing[site] = False


class CudaMaps:
    """Writes through rotating pinned staging on the stream that runs the model.

    The CPU prepares the next step while the GPU still runs the last one, so a staging buffer
    may be written again only once its copy has been made.
    """

    DEPTH = 4
    """Steps that may be in flight; asynchronous scheduling has two, a pipeline a few more."""
    WHOLE = 3
    """From this many sites on, one copy of the whole map is cheaper than one per site."""

    def __init__(self, state: TapState) -> None:
        self._state = state
        shape = (self.DEPTH, *state.steer_rows.shape)
        self._rows = torch.zeros(shape, dtype=torch.int32).pin_memory()
        self._slots = torch.full(shape, -1, dtype=torch.int32).pin_memory()
        self._flags = torch.zeros(self.DEPTH, shape[1], dtype=torch.int32).pin_memory()
        self._copied = [_EVENT() for _ in range(self.DEPTH)]
        self._turn = 0

    def write(self, plan: StepPlan) -> None:
        """See `Maps.write`."""
        state, i = self._state, self._turn
        self._turn = (i + 1) % self.DEPTH
        self._copied[i].synchronize()
        rows, slots, flags = (t[i].numpy() for t in (self._rows, self._slots, self._flags))
        flags[:] = 0
        steered = {site for site, _, _ in plan.steer}
        captured = {site for site, _, _ in plan.capture}
        for site in steered:
            rows[site] = 0
            flags[site] |= STEER
        for site in captured:
            slots[site] = -1
            flags[site] |= CAPTURE
        for site, index, values in plan.steer:
            rows[site, index] = values
        for site, tokens, slot in plan.capture:
            slots[site, tokens] = range(slot, slot + len(tokens))
        _copy(state.steer_rows, self._rows[i], steered, self.WHOLE)
        _copy(state.slots, self._slots[i], captured, self.WHOLE)
        state.flags.copy_(self._flags[i], non_blocking=True)
        self._copied[i].record()

    def clear(self, plan: StepPlan) -> None:
        """See `Maps.clear`; the flags gate the maps, which may keep old numbers."""
        self._state.flags.zero_()


def _copy(target: torch.Tensor, source: torch.Tensor, sites: set[int], whole: int) -> None:
    if len(sites) >= whole:
        target.copy_(source, non_blocking=True)
    else:
        for site in sites:
            target[site].copy_(source[site], non_blocking=True)


def maps_for(state: TapState) -> Maps:
    """The writer for the device that a state lives on."""
    return CudaMaps(state) if state.ring.is_cuda else CpuMaps(state)
