"""Sums and largest values of sampled tokens, which grow on the device until a request is over.

Which rows a request will have in the end is known late: an engine that runs ahead feeds a token or
two behind the last one. So a row joins its sum only when `lag` further ones have come; until then
it lies beside it, and at the end sum and last rows leave together: the front-end knows which of
these count. A request that is computed again from its start (pre-emption) sends what it has, and
begins anew behind it.

All of it is a handful of indexed operations in the model's stream per step, whatever the number of
requests; nothing waits, and nothing leaves the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from inspect_lens._engine.plan.step_plan import Longs
from inspect_lens._engine.protocol.capture import LAG, Fold

__all__ = ["Held", "Tally"]

_NEUTRAL: dict[Fold, float] = {"mean": 0.0, "max": float("-inf"), "last": 0.0}
_MOST: Final = 1024
"""Rows of one sum: rounding grows with them. The front-end adds sums in float64."""
_SPREAD: Final = 64
_INDICES: Final = 16
"""Index tensors that are kept on the device: while the same requests decode, they come again."""


@dataclass(frozen=True)
class Held:
    """What requests have on the device: those whose rows lie alike."""

    slots: Longs
    tensor: torch.Tensor
    """(taps, rows, width) float32; of each request in turn the sum, where there is one, and then
    its last rows."""
    positions: NDArray[np.int64]
    """(requests, rows of each); of the sum, the last one that it holds."""
    covers: Longs
    """Tokens that each row stands for."""
    folded: Longs
    """By request: one past the last position of the sum; 0 where there is none."""


class Tally:
    """The tables, and who has which rows of them."""

    def __init__(
        self, sums: torch.Tensor, latest: torch.Tensor, lag: int = LAG, most: int = _MOST
    ) -> None:
        """Store the tables.

        Args:
            sums: (rows, width) float32; may have no rows.
            latest: (lag * rows, width) in the stream's dtype; what stays apart from each sum.
            lag: rows of a request that stay apart from its sum.
            most: rows after which a request has to begin anew; some do after half of them.
        """
        self._most = most
        self._sums, self._latest = sums, latest
        self._lag = lag
        self._free: list[tuple[int, int]] = [(0, len(sums))] if len(sums) else []
        """(first row, rows) of what is free of the sums, ascending."""
        self._taps: dict[int, int] = {}
        self._fold: dict[int, Fold] = {}
        self._start: Longs = np.full(64, -1, dtype=np.int64)
        """By slot: first row of its sums, or -1. Its latest rows begin at `lag` times that."""
        self._count: Longs = np.zeros(64, dtype=np.int64)
        """By slot: rows that came since the request began, or began anew."""
        self._where: NDArray[np.int64] = np.zeros((64, lag + 1), dtype=np.int64)
        """By slot: positions of the last rows, in turn."""
        self._indices: dict[bytes, torch.Tensor] = {}

    @property
    def rows_in_use(self) -> int:
        """Sums that requests hold, one at each tap."""
        return len(self._sums) - sum(n for _, n in self._free)

    def open(self, slot: int, fold: Fold, n_taps: int) -> bool:
        """Make room for a request.

        Args:
            slot: of the request.
            fold: what is made of its rows.
            n_taps: at which they come.

        Returns:
            False where there is none: its rows have to be sent.
        """
        k = next((k for k, (_, n) in enumerate(self._free) if n >= n_taps), None)
        if k is None:
            return False
        start, n = self._free[k]
        self._free[k : k + 1] = [(start + n_taps, n - n_taps)] if n > n_taps else []
        if slot >= len(self._start):
            more = max(len(self._start), slot + 1 - len(self._start))
            self._start = np.concatenate([self._start, np.full(more, -1, dtype=np.int64)])
            self._count = np.concatenate([self._count, np.zeros(more, dtype=np.int64)])
            self._where = np.concatenate([self._where, np.zeros((more, self._lag + 1), np.int64)])
        self._start[slot], self._taps[slot], self._fold[slot] = start, n_taps, fold
        self._clear(np.asarray([slot]))
        return True

    def close(self, slot: int) -> None:
        """Give a request's rows back; one that has none is fine."""
        if not self.has(slot):
            return
        self._free.append((int(self._start[slot]), self._taps.pop(slot)))
        self._start[slot], self._count[slot] = -1, 0
        del self._fold[slot]
        self._indices.clear()
        merged: list[tuple[int, int]] = []
        for start, n in sorted(self._free):
            if merged and sum(merged[-1]) == start:
                merged[-1] = (merged[-1][0], merged[-1][1] + n)
            else:
                merged.append((start, n))
        self._free = merged

    def has(self, slot: int) -> bool:
        """Whether rows of a request are kept here."""
        return slot < len(self._start) and bool(self._start[slot] >= 0)

    def count(self, slot: int) -> int:
        """Rows that came of a request that is known here since it began, or began anew."""
        return int(self._count[slot])

    def known(self, slots: Longs) -> NDArray[np.bool_]:
        """`has`, of many."""
        inside = slots < len(self._start)
        found: NDArray[np.bool_] = inside & (self._start[np.where(inside, slots, 0)] >= 0)
        return found

    def last(self, slots: Longs) -> Longs:
        """Position of the last row of requests that are known here; -1 where none has come."""
        n = self._count[slots]
        where: Longs = self._where[slots, (n - 1) % (self._lag + 1)]
        return np.where(n > 0, where, -1)

    def full(self, slots: Longs) -> Longs:
        """Those of some requests that have to begin anew: not all that began together at once."""
        most = self._most - (slots % _SPREAD) * (self._most // (2 * _SPREAD))
        return slots[self._count[slots] >= most]

    def add(self, rows: torch.Tensor, slots: Longs, positions: Longs) -> None:
        """Take one row of each request at all taps.

        Args:
            rows: (taps, requests, width), of requests of which the same is made.
            slots: of the requests.
            positions: of their rows.
        """
        n, fold = self._count[slots], self._fold[int(slots[0])]
        index = self._index(self._start[slots], n % self._lag, rows.shape[0])
        with torch.inference_mode():
            new = rows.reshape(-1, rows.shape[-1]).to(self._latest.dtype)
            old = self._latest.index_select(0, index[1]).to(self._sums.dtype)
            if fold == "mean":
                self._sums.index_add_(0, index[0], old)
            else:
                if fold == "max":
                    torch.maximum(old, self._sums.index_select(0, index[0]), out=old)
                self._sums.index_copy_(0, index[0], old)
            self._latest.index_copy_(0, index[1], new)
        self._where[slots, n % (self._lag + 1)] = positions
        self._count[slots] = n + 1

    def take(self, slots: Longs) -> list[Held]:
        """Take what requests have, which then begin anew.

        All at once, as requests that started together end together.

        Args:
            slots: of the requests; those that have nothing here are passed over.
        """
        slots = slots[self.known(slots)]
        slots = slots[self._count[slots] > 0]
        alike: dict[tuple[int, int], list[int]] = {}
        for slot in slots.tolist():
            parts = min(int(self._count[slot]), self._lag + 1)
            alike.setdefault((self._taps[slot], parts), []).append(slot)
        made = [self._take(np.asarray(of), *key) for key, of in alike.items()]
        self._clear(slots)
        return made

    def _take(self, slots: Longs, taps: int, parts: int) -> Held:
        n, start, lag = self._count[slots][:, None], self._start[slots][:, None], self._lag
        last = min(parts, lag)
        kept = n - last + np.arange(last)
        turns = kept % (lag + 1)
        covers = np.ones((len(slots), parts), dtype=np.int64)
        if parts > lag:
            turns = np.concatenate([(n - lag - 1) % (lag + 1), turns], axis=1)
            covers[:, :1] = n - lag
        width = self._sums.shape[1]
        with torch.inference_mode():
            # A copy: the rows of the tables are somebody else's before these have left.
            made = self._sums.new_empty(taps, len(slots), parts, width)
            index = self._at_taps(lag * start + kept % lag * taps, taps)
            latest = self._latest.index_select(0, index)
            made[:, :, parts - last :] = latest.view(taps, len(slots), last, width)
            if parts > lag:
                sums = self._sums.index_select(0, self._at_taps(start, taps))
                made[:, :, 0] = sums.view(taps, len(slots), width)
        where = self._where[slots[:, None], turns]
        folded = where[:, 0] + 1 if parts > lag else np.zeros(len(slots), dtype=np.int64)
        return Held(slots, made.flatten(1, 2), where, covers.reshape(-1), folded)

    def _clear(self, slots: Longs) -> None:
        of_fold: dict[Fold, list[int]] = {}
        for slot in slots.tolist():
            of_fold.setdefault(self._fold[slot], []).append(slot)
        with torch.inference_mode():
            for fold, own in of_fold.items():
                for table, each in ((self._sums, 1), (self._latest, self._lag)):
                    rows = [
                        np.arange(each * self._start[s], each * (self._start[s] + self._taps[s]))
                        for s in own
                    ]
                    if len(rows) == 1:
                        table[int(rows[0][0]) : int(rows[0][-1]) + 1].fill_(_NEUTRAL[fold])
                    else:
                        index = self._on_device(np.concatenate(rows))
                        table.index_fill_(0, index, _NEUTRAL[fold])
        self._count[slots] = 0

    def _at_taps(self, first: Longs, taps: int) -> torch.Tensor:
        """Rows of a table at all taps, (taps * entries), from those at the first one."""
        return self._on_device((first.reshape(-1) + np.arange(taps)[:, None]).reshape(-1))

    def _on_device(self, rows: Longs) -> torch.Tensor:
        index = torch.from_numpy(rows)
        if self._sums.device.type == "cuda":
            index = index.pin_memory().to(self._sums.device, non_blocking=True)
        return index

    def _index(self, start: Longs, turn: Longs, taps: int) -> torch.Tensor:
        """Rows of the tables: (sums and the oldest rows beside them, taps * requests)."""
        key = b"%d:" % taps + start.tobytes() + turn.tobytes()
        if (known := self._indices.get(key)) is not None:
            return known
        sums = (start + np.arange(taps)[:, None]).reshape(-1)
        oldest = (self._lag * start + turn * taps + np.arange(taps)[:, None]).reshape(-1)
        index = self._on_device(np.stack([sums, oldest]))
        if len(self._indices) >= _INDICES:
            self._indices.clear()
        self._indices[key] = index
        return index
