"""The short names under which a worker tells front-ends of their requests."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from inspect_lens._engine.plan.step_plan import Batch, Longs, grown
from inspect_lens._engine.protocol.messages import PATHS, unpacked
from inspect_lens._engine.protocol.shared_memory import BOARD_SIZE
from inspect_lens.spec import EnginePath

_MOST_AWAY = BOARD_SIZE // 2
"""Removed requests whose number is kept. That is far more than an engine can have pre-empted at
once; only those of whose end no worker was told could be so many."""


class Numbers:
    """Gives each live request a number whose board record nobody else holds."""

    def __init__(self, board: NDArray[np.int64]) -> None:
        self._board = board
        self._away: OrderedDict[str, int] = OrderedDict()
        """Removed requests that are not over: a pre-empted one comes back under its key."""
        self._next = 1
        self._live: set[int] = set()
        self._held: set[int] = set()
        """Records of live requests, and of those that are away."""
        self.fresh: frozenset[int] = frozenset()
        """Of the numbers that were taken last, those of requests that are new here."""
        self.of_slot: NDArray[np.int64] = np.zeros(64, dtype=np.int64)
        """Number of the request in each slot."""

    def take(self, keys: Sequence[str], slots: NDArray[np.int64]) -> list[int]:
        """A number for each; a pre-empted request keeps its own, and what its record says."""
        taken, fresh = [], []
        for key in keys:
            number = self._away.pop(key, None)
            if number is None:
                number = self._next
                while number % BOARD_SIZE in self._held:
                    number += 1
                self._next = number + 1
                fresh.append(number)
            self._live.add(number % BOARD_SIZE)
            self._held.add(number % BOARD_SIZE)
            taken.append(number)
        self.fresh = frozenset(fresh)
        if fresh:
            records = np.asarray(fresh) % BOARD_SIZE
            self._board[records] = (0, -1, *[0] * (self._board.shape[1] - 2))
            self._board[records, 0] = fresh
        self.of_slot = grown(self.of_slot, slots)
        self.of_slot[slots] = taken
        return taken

    def give(self, key: str, number: int, *, is_over: bool = False) -> None:
        """Take note that a request has gone."""
        self._live.discard(number % BOARD_SIZE)
        if is_over:
            self._held.discard(number % BOARD_SIZE)
            return
        self._away[key] = number
        if len(self._away) > _MOST_AWAY:
            self._held.discard(self._away.popitem(last=False)[1] % BOARD_SIZE)

    def finish(self, keys: Collection[str]) -> None:
        """Forget requests that are away and will not come back."""
        for key in keys if self._away else ():
            if (number := self._away.pop(key, None)) is not None:
                self._held.discard(number % BOARD_SIZE)

    @property
    def n_away(self) -> int:
        """Requests that may come back."""
        return len(self._away)

    def has_live(self, numbers: bytes) -> bool:
        """Whether one of some requests is there; by packed numbers."""
        return any(n % BOARD_SIZE in self._live for n in unpacked(numbers).tolist())

    def note_fed(self, steered: Batch, path: EnginePath) -> None:
        """Write on the board how far each steered request has been fed."""
        if not len(steered.slots):
            return
        board, record = self._board, self.of_slot[steered.slots] % BOARD_SIZE
        was = board[record, 1]
        board[record, 1] = np.where(was < 0, steered.position, np.minimum(was, steered.position))
        board[record, 2] = np.maximum(board[record, 2], steered.position + steered.n_tokens)
        self.note_path(steered.slots, path)

    def note_path(self, slots: NDArray[np.int64], path: EnginePath) -> None:
        """Write on the board how a step ran that these requests were part of."""
        self._board[self.of_slot[slots] % BOARD_SIZE, 3] |= 1 << PATHS.index(path)

    def a_path(self, slot: int) -> EnginePath:
        """One of the ways that stand on the board for the request in a slot."""
        bits = int(self._board[self.of_slot[slot] % BOARD_SIZE, 3])
        return next(path for i, path in enumerate(PATHS) if bits >> i & 1)


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
