"""Steps that repeat: while the same requests feed one token each, the plan of the last step holds.

Only positions move on, and the place in the ring that the step fills. Most steps of a busy engine
are of this kind, and a small batch leaves the CPU little time for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from .step_plan import Batch, Longs, Named, RequestTable, StepPlan

__all__ = ["Repeat"]


@dataclass
class Repeat:
    """The last step's plan, for as long as the steps that follow are the same one token later."""

    keys: list[str]
    """Requests of the whole step, in batch order."""
    position: Longs
    """Of the token that each of them fed last."""
    left: int
    """Steps for which nobody enters or leaves what is captured or steered."""
    plan: StepPlan
    done: int = 0
    """Steps that were the same."""

    @classmethod
    def of(
        cls,
        plan: StepPlan,
        batch: Batch,
        table: RequestTable,
        *,
        keys: Sequence[str],
        n_tokens: NDArray[Any],
        position: NDArray[Any],
    ) -> Self | None:
        """What follows a step; None where the next one needs a plan of its own in any case.

        Args:
            plan: of the step.
            batch: its requests that use the lens.
            table: what they want.
            keys: all requests of the step.
            n_tokens: tokens of each.
            position: position of each one's first token.
        """
        if not plan.is_active or not (n_tokens == 1).all():
            return None
        left = _steps_left(batch, table)
        if left < 1:
            return None
        at = np.array(position, dtype=np.int64)
        return cls(list(keys), at, left, plan)

    def continues(
        self, keys: Sequence[str], n_tokens: NDArray[Any], position: NDArray[Any]
    ) -> bool:
        """Whether a step is the last one, a token later."""
        return (
            self.left > 0
            and self.keys == keys
            and bool((n_tokens == 1).all())
            and bool((position == self.position + 1).all())
        )

    def advance(self) -> Batch:
        """Go on by the step that continues; returns the steered requests of that."""
        self.left -= 1
        self.done += 1
        self.position += 1
        was = self.plan.steered
        if not len(was.slots):
            return was
        return Batch(was.slots, was.offset, was.n_tokens, was.position + self.done)


def _steps_left(batch: Batch, table: RequestTable) -> int:
    """Steps of one token each until a request begins or ends to be captured or steered."""
    at = batch.position
    for wanted in (table.listed, table.named):
        if wanted and _any_ahead(batch, wanted):
            return 0
    slots = batch.slots
    far = np.iinfo(np.int64).max
    lo, hi, until = table.lo[slots], table.hi[slots], table.until[slots]
    capture = np.where(at < lo, lo - at, np.where(at < hi, hi - at, far))
    capture = np.where(table.group[slots] >= 0, capture, far)
    steer = np.where(at < until, until - at, far)
    return int(np.minimum(capture, steer).min(initial=far)) - 1


def _any_ahead(batch: Batch, wanted: dict[int, Any]) -> bool:
    """Whether a request names positions, or has a phase, that it has not passed."""
    for slot, at in zip(batch.slots.tolist(), batch.position.tolist(), strict=True):
        named = wanted.get(slot)
        if isinstance(named, Named):
            if named.edge > at:
                return True
            named = named.positions
        if named is not None and len(named) and named[-1] >= at:
            return True
    return False
