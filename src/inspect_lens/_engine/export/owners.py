"""Which front-end the request in each slot belongs to, for all requests of a step at once."""

from __future__ import annotations

import numpy as np

from inspect_lens._engine.plan.slot_tables import grown
from inspect_lens._engine.plan.step_plan import Longs

__all__ = ["Owners"]


class Owners:
    """Front-ends by slot. There are as many as processes that sent requests: they stay known."""

    def __init__(self) -> None:
        self._of_slot: Longs = np.full(256, -1, dtype=np.int64)
        self._replies: list[str] = []
        self._index: dict[str, int] = {}

    def set(self, slots: Longs, reply: str) -> None:
        """Note whose requests some slots have."""
        self._of_slot = grown(self._of_slot, slots, fill=-1)
        index = self._index.setdefault(reply, len(self._replies))
        if index == len(self._replies):
            self._replies.append(reply)
        self._of_slot[slots] = index

    def clear(self, slot: int) -> None:
        """Take note that a slot's request has gone."""
        self._of_slot[slot] = -1

    def reply(self, index: int) -> str:
        """Address of a front-end."""
        return self._replies[index]

    def of(self, slots: Longs) -> Longs:
        """Index of the front-end of each slot's request; -1 where there is none."""
        return self._of_slot[slots]

    def reply_of(self, slot: int) -> str | None:
        """Address of the front-end of a slot's request; None where there is none."""
        index = int(self._of_slot[slot])
        return None if index < 0 else self._replies[index]
