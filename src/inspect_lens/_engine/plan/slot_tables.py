"""Tables by slot: as long as the largest slot that was ever taken asks for."""

from __future__ import annotations

import numpy as np

from .step_plan import Longs

__all__ = ["grown"]


def grown(values: Longs, slots: Longs, fill: int = 0) -> Longs:
    """A table that has these slots: itself, or a longer one with the same values.

    Args:
        values: the table.
        slots: that are written next.
        fill: of slots that are new.
    """
    if (n := int(slots.max()) + 1) <= len(values):
        return values
    return np.concatenate([values, np.full(max(n - len(values), len(values)), fill)])
