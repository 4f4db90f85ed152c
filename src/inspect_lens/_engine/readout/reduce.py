"""What is made of a block's rows where they are, so that only what was asked for leaves the device.

A prompt's rows of one step become one row per tap. A request that is pre-empted computes its
prompt a second time, so what has been reduced is remembered by position, under the number that the
request keeps, and is not reduced again. Rows of sampled tokens stay on the device in a `SumTable`.
They are sent as they are where it has no room, and where the engine cannot tell which of them the
request will have: rejected drafts are written again, and a stop string is found by the front-end.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from inspect_lens._engine.export.transport import Copier, Numbers, Rows
from inspect_lens._engine.plan import Longs, RequestTable
from inspect_lens._engine.protocol.messages import BOARD_SIZE, Envelope
from inspect_lens._engine.protocol.readouts import LAG, CaptureEnvelope, Combine, Fold, RowPart
from inspect_lens._engine.tap.memory import uploaded
from inspect_lens.spec import Reduction

Piece = tuple[int, int, int]
"""Rows [a, b) of a block, and where they go; more than one row of the block becomes one."""


@dataclass(frozen=True)
class Form:
    """What a request wants of its rows."""

    reduction: Reduction
    combine: Combine | None
    wire: torch.dtype

    @classmethod
    def of(cls, capture: CaptureEnvelope) -> Form:
        return cls(capture.reduction, capture.combine, getattr(torch, capture.wire))


@dataclass(frozen=True)
class HeadCut:
    """Cuts heads out of the ring's rows, so that no other number of these is sent."""

    size: int
    columns: tuple[int, ...]
    """Of each head, where it begins in its first row."""

    @classmethod
    def of(cls, size: int, rows: Sequence[RowPart]) -> HeadCut | None:
        """The cut for some heads; None where rows are sent whole."""
        return cls(size, tuple(row.column for row in rows)) if size and rows else None

    def __call__(self, rows: torch.Tensor, ranks: tuple[int, ...]) -> torch.Tensor:
        """(heads, …, size) of (rows, …, width); `ranks` says in which row each head begins."""
        width = rows.shape[-1]
        # A head begins anywhere in a row, and what of it is left lies in the next one.
        piece = math.gcd(width, self.size)
        row, column = _pieces(ranks, self.columns, self.size // piece, width, piece, rows.device)
        pieces = rows.view(*rows.shape[:-1], -1, piece).movedim(-2, 1)
        found: torch.Tensor = pieces[row, column].view(len(ranks), -1, *rows.shape[1:-1], piece)
        return found.movedim(1, -2).flatten(-2)


@lru_cache(maxsize=64)
def _pieces(
    ranks: tuple[int, ...],
    columns: tuple[int, ...],
    n: int,
    width: int,
    piece: int,
    device: torch.device,
) -> torch.Tensor:
    """(2, heads * n); row and place in it of the pieces of heads, brought to the device once."""
    begin = (np.asarray(ranks) * width + np.asarray(columns)) // piece
    at = (begin[:, None] + np.arange(n)).reshape(-1)
    return uploaded(np.stack(np.divmod(at, width // piece)), device)


@dataclass(slots=True)
class Part:
    """Rows of one kind of result of a block, and whose they are."""

    tensor: torch.Tensor
    """(taps, rows, width)."""
    slots: Longs
    counts: Longs
    """Rows of each request."""
    first: Longs
    """Position of each request's first row."""
    listed: dict[int, Longs]
    """By index in `slots`: the positions, where they need not be consecutive."""
    covers: Longs | None = None
    """Tokens that each row stands for, up to its own; None where that is one."""
    dtype: torch.dtype | None = None
    """In which the rows are sent; None as they are."""

    def starts(self) -> Longs:
        """Position of each request's first row, also where positions are listed."""
        first = self.first
        if self.listed:
            first = first.copy()
            for i, where in self.listed.items():
                if len(where):
                    first[i] = where[0]
        return first

    def only(self, own: NDArray[np.bool_], copier: Copier) -> Part | None:
        """The rows of some of the requests; None where they have none."""
        at = np.flatnonzero(own)
        if not self.counts[at].sum():
            return None
        rows = np.flatnonzero(np.repeat(own, self.counts))
        return Part(
            copier.select(self.tensor, rows),
            self.slots[at],
            self.counts[at],
            self.first[at],
            {k: self.listed[i] for k, i in enumerate(at.tolist()) if i in self.listed},
            None if self.covers is None else self.covers[rows],
            self.dtype,
        )

    def rows(self, numbers: Numbers, stream: int) -> Rows:
        """As it is sent."""
        return Rows.of(
            self.tensor,
            numbers.of_slot[self.slots],
            self.counts,
            self.first,
            self.listed,
            stream,
            self.covers,
            self.dtype,
        )


class Reducer:
    """Brings parts into the form that was asked for, and remembers what it has reduced."""

    def __init__(self, copier: Copier, numbers: Numbers, table: RequestTable) -> None:
        self._copier, self._numbers, self._table = copier, numbers, table
        self._done: NDArray[np.int64] = np.zeros((BOARD_SIZE, 3), dtype=np.int64)
        """Per record: the request's number and token, and one past the last position that was
        reduced."""
        self.resumed: set[int] = set()
        """Slots of requests that came back after something of theirs had been reduced."""

    def watch(self, slot: int, envelope: Envelope) -> None:
        """Take note of a request something of which is reduced; a pre-empted one goes on."""
        if envelope.capture is not None and envelope.capture.token:
            number, token = int(self._numbers.of_slot[slot]), envelope.capture.token
            record = self._done[number % BOARD_SIZE]
            if record[0] != number or record[1] != token:
                record[:] = number, token, 0
            elif record[2] > 0:
                self.resumed.add(slot)

    def forget(self, slot: int) -> None:
        """Take note that a slot is free; what was reduced is remembered by number."""
        self.resumed.discard(slot)

    def skip_until(self, slot: int, position: int) -> None:
        """Note that rows of a request before a position are part of something that was sent."""
        record = self._done[self._numbers.of_slot[slot] % BOARD_SIZE]
        record[2] = max(record[2], position)

    def is_sampled(self, part: Part) -> NDArray[np.bool_]:
        """Which requests' first rows are of sampled tokens."""
        return part.starts() >= self._table.n_prompt[part.slots]

    def without_done(self, part: Part) -> Part | None:
        """The rows that are not part of something that was sent; None where there are none."""
        numbers = self._numbers.of_slot[part.slots]
        record = self._done[numbers % BOARD_SIZE]
        done = np.where(record[:, 0] == numbers, record[:, 2], 0)
        if not ((part.starts() < done) & (part.counts > 0)).any():
            return part
        kept: list[Longs] = []
        counts, first = np.zeros_like(part.counts), part.first.copy()
        listed: dict[int, Longs] = {}
        start = 0
        for i, n in enumerate(part.counts.tolist()):
            where = part.listed.get(i)
            if where is None:
                where = np.arange(part.first[i], part.first[i] + n)
            head = int(where.searchsorted(done[i]))
            kept.append(np.arange(start + head, start + n))
            counts[i] = n - head
            if head < n:
                first[i] = where[head]
                if i in part.listed:
                    listed[i] = where[head:]
            start += n
        rows = np.concatenate(kept)
        if not len(rows):
            return None
        tensor = self._copier.select(part.tensor, rows)
        return Part(tensor, part.slots, counts, first, listed, None, part.dtype)

    def apply(self, form: Form, part: Part) -> Part | None:
        """Make of rows what was asked for."""
        if form.combine is not None:
            is_decode = (part.first >= self._table.n_prompt[part.slots]) | (part.counts == 0)
            if not is_decode.all():
                return self._partial(form, part)
        if form.reduction.makes_numbers:
            make = partial(form.reduction.on_device, torch)
            return replace(part, tensor=self._copier.apply(make, part.tensor), dtype=form.wire)
        return part if part.tensor.dtype == form.wire else replace(part, dtype=form.wire)

    def _partial(self, form: Form, part: Part) -> Part | None:
        """Reduce the rows of prompts, each request's to one, and keep the others."""
        pieces: list[Piece] = []
        counts, first = np.zeros_like(part.counts), part.first.copy()
        listed: dict[int, Longs] = {}
        covers: list[int] = []
        start = 0
        for i, (slot, n) in enumerate(zip(part.slots.tolist(), part.counts.tolist(), strict=True)):
            where = part.listed.get(i)
            if where is None:
                where = np.arange(part.first[i], part.first[i] + n)
            head, tail = self._split(slot, where)
            kept = where[tail:]
            if head < tail:
                pieces.append((start + head, start + tail, len(covers)))
                covers.append(tail - head)
                kept = where[tail - 1 :]
            if tail < n:
                pieces.append((start + tail, start + n, len(covers)))
                covers += [1] * (n - tail)
            counts[i] = len(kept)
            if len(kept):
                first[i] = kept[0]
            if i in part.listed:
                listed[i] = kept
            start += n
        if not covers:
            return None
        reduce = partial(_reduce, form, pieces, np.asarray(covers))
        made = self._copier.apply(reduce, part.tensor)
        return Part(made, part.slots, counts, first, listed, np.asarray(covers), form.wire)

    def _split(self, slot: int, where: Longs) -> tuple[int, int]:
        """Which of a request's rows [head, tail) are the prompt's and have to be reduced."""
        record = self._done[self._numbers.of_slot[slot] % BOARD_SIZE]
        head, tail = where.searchsorted((record[2], self._table.n_prompt[slot])).tolist()
        if head < tail:
            record[2] = where[tail - 1] + 1
        return head, tail


def _reduce(form: Form, pieces: list[Piece], covers: Longs, rows: torch.Tensor) -> torch.Tensor:
    """(taps, rows, columns) out of a block; sums are float32, the largest keep their dtype."""
    taps, _, width = rows.shape
    is_sum, columns = form.combine == "sum", form.reduction.columns(width)
    dtype = torch.float32 if is_sum else rows.dtype
    out = torch.empty(taps, len(covers), columns, dtype=dtype, device=rows.device)
    for a, b, at in pieces:
        part = form.reduction.on_device(torch, rows[:, a:b])
        if covers[at] == 1:
            out[:, at : at + b - a] = part
        elif is_sum:
            torch.sum(part, dim=1, dtype=torch.float32, out=out[:, at])
        else:
            torch.amax(part, dim=1, out=out[:, at])
    return out


_NEUTRAL: dict[Fold, float] = {"sum": 0.0, "max": float("-inf"), "last": 0.0}
_MOST: Final = 1024
"""Rows of one sum: rounding grows with them. The front-end adds sums in float64."""
_SPREAD: Final = 64
_INDICES: Final = 16
"""Index tensors that are kept on the device: while the same requests decode, they come again."""


@dataclass(frozen=True)
class SumRows:
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


class SumTable:
    """The tables, and who has which rows of them."""

    def __init__(
        self, sums: torch.Tensor, latest: torch.Tensor, lag: int = LAG, most: int = _MOST
    ) -> None:
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
        """Take one row of each request at all taps."""
        n, fold = self._count[slots], self._fold[int(slots[0])]
        index = self._index(self._start[slots], n % self._lag, rows.shape[0])
        with torch.inference_mode():
            new = rows.reshape(-1, rows.shape[-1]).to(self._latest.dtype)
            old = self._latest.index_select(0, index[1]).to(self._sums.dtype)
            if fold == "sum":
                self._sums.index_add_(0, index[0], old)
            else:
                if fold == "max":
                    torch.maximum(old, self._sums.index_select(0, index[0]), out=old)
                self._sums.index_copy_(0, index[0], old)
            self._latest.index_copy_(0, index[1], new)
        self._where[slots, n % (self._lag + 1)] = positions
        self._count[slots] = n + 1

    def take(self, slots: Longs) -> list[SumRows]:
        """Take what requests have, of all that end together, which then begin anew."""
        slots = slots[self.known(slots)]
        slots = slots[self._count[slots] > 0]
        alike: dict[tuple[int, int], list[int]] = {}
        for slot in slots.tolist():
            parts = min(int(self._count[slot]), self._lag + 1)
            alike.setdefault((self._taps[slot], parts), []).append(slot)
        made = [self._take(np.asarray(of), *key) for key, of in alike.items()]
        self._clear(slots)
        return made

    def _take(self, slots: Longs, taps: int, parts: int) -> SumRows:
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
        return SumRows(slots, made.flatten(1, 2), where, covers.reshape(-1), folded)

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
