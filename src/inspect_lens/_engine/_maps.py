"""Writing a step's plan where the taps read it: at once on a CPU, stream-ordered on a GPU."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import torch

from ._plan import StepPlan
from ._state import TapState

__all__ = ["CAPTURE", "STEER", "CpuMaps", "CudaMaps", "Maps", "maps_for"]

_EVENT: Any = torch.cuda.Event  # its constructor has no types

STEER, CAPTURE = 1, 2
"""Bits of a tap's flag."""


class Maps(Protocol):
    """Fills the maps before a step and leaves the taps idle after it."""

    def write(self, plan: StepPlan) -> None:
        """Make the next forward pass carry the plan out."""
        ...

    def clear(self) -> None:
        """Make the following forward passes do nothing."""
        ...


class CpuMaps:
    """Writes straight into the buffers: on a CPU nothing runs behind our back."""

    def __init__(self, state: TapState) -> None:
        self._state = state
        self._header = state.header.numpy()
        self._base = state.base.numpy()

    def write(self, plan: StepPlan) -> None:
        """See `Maps.write`."""
        _fill(self._header, self._base, plan)
        _tell_host(self._state, plan)

    def clear(self) -> None:
        """See `Maps.clear`."""
        _forget(self._state)
        self._header[: 1 + len(self._state.taps)] = 0


class CudaMaps:
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

    def write(self, plan: StepPlan) -> None:
        """See `Maps.write`."""
        state, i = self._state, self._turn
        self._turn = (i + 1) % self.DEPTH
        self._copied[i].synchronize()
        (header, header_np), (base, base_np) = self._headers[i], self._bases[i]
        used = _fill(header_np, base_np, plan)
        state.header[:used].copy_(header[:used], non_blocking=True)
        if n := len(plan.base):
            state.base[:n].copy_(base[:n], non_blocking=True)
        self._copied[i].record()
        _tell_host(state, plan)

    def clear(self) -> None:
        """See `Maps.clear`; the flags gate everything else, which may keep old numbers."""
        _forget(self._state)
        self._state.flags.zero_()


def _fill(header: np.ndarray[Any, Any], base: np.ndarray[Any, Any], plan: StepPlan) -> int:
    """Write a plan as the taps read it; returns how many numbers of the header were written."""
    n, taps = len(plan.tokens), len(plan.steers)
    header[0] = n
    header[1 : 1 + taps] = plan.steers * STEER + plan.captures * CAPTURE
    used = 1 + taps + 3 * n
    header[1 + taps : used] = plan.tokens.reshape(-1)
    base[: len(plan.base)] = plan.base
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
    return CudaMaps(state) if state.ring.is_cuda else CpuMaps(state)
