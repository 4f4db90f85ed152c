"""Which steered requests have a row that a tap left as it was: it would have been too large.

A tap notes that on the board, which front-ends read: in memory of the host, also on a GPU, whose
kernels can write there. So nothing is copied and nobody waits, and the note is there as soon as the
step's tokens are.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from inspect_lens.errors import SpecError
from inspect_lens.spec import N_LATCHES

from .device_copy import Copier

__all__ = ["COLUMN", "LATCHES", "Faults", "overflow"]

COLUMN = 4
"""Of the board."""

LATCHES = slice(COLUMN + 1, COLUMN + 1 + 2 * N_LATCHES)
"""Columns of the board in which taps note when gates fired, and then how long they were open."""


class Faults:
    """The worker's side of the notes."""

    def __init__(self, board: NDArray[np.int64], copier: Copier) -> None:
        """Find memory for them.

        Args:
            board: (records, columns) of the worker's shared memory.
            copier: knows what the device can write to.
        """
        self._column = board[:, COLUMN]
        self.fired = copier.reachable(board[:, LATCHES])
        """What gates that last write to; None where kernels cannot."""
        reachable = copier.reachable(self._column)
        self._is_apart = reachable is None
        self.table = torch.zeros(len(board), dtype=torch.int64) if reachable is None else reachable
        """(records,) int64; what taps write to."""

    def move_to(self, device: torch.device) -> torch.Tensor:
        """The table where taps on a device can write to it."""
        if self._is_apart:
            self.table = self.table.to(device)
        return self.table

    def of(self, records: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which of some requests, by board record, have one."""
        if self._is_apart:
            # Memory could not be pinned, so that rows are copied while the step loop waits, too.
            self._column[:] |= self.table.cpu().numpy()
            self.table.zero_()
        found: NDArray[np.bool_] = self._column[records] != 0
        return found


def overflow() -> SpecError:
    """The error of a request whose steering left a row too large, or not finite."""
    return SpecError(
        "steer: a steered row would have been too large for the dtype of the stream, or not "
        "finite, and was left as it was, so that the output is not that of the steered model; "
        "nothing is returned; lower the scale"
    )
