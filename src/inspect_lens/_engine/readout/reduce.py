"""What is made of a block's rows where they are, so that only what was asked for leaves the device.

A prompt's rows of one step become one row per tap. A request that is pre-empted computes its
prompt a second time, so what has been reduced is remembered by position, under the number that the
request keeps, and is not reduced again. Rows of sampled tokens stay on the device in a `Tally`.
They are sent as they are where it has no room, and where the engine cannot tell which of them the
request will have: rejected drafts are written again, and a stop string is found by the front-end.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from inspect_lens._engine.export.device_copy import Copier
from inspect_lens._engine.export.ids import Numbers
from inspect_lens._engine.export.transport import Rows
from inspect_lens._engine.plan.slot_tables import grown
from inspect_lens._engine.plan.step_plan import Longs
from inspect_lens._engine.protocol.capture import CaptureEnvelope, Operation
from inspect_lens._engine.protocol.envelope import Envelope
from inspect_lens._engine.protocol.shared_memory import BOARD_SIZE

__all__ = ["Form", "Part", "Reducer"]

Piece = tuple[int, int, int]
"""Rows [a, b) of a block, and where they go; more than one row of the block becomes one."""


@dataclass(frozen=True)
class Form:
    """What a request wants of its rows."""

    operation: Operation
    wire: torch.dtype
    """dtype of what is sent."""

    @classmethod
    def of(cls, capture: CaptureEnvelope) -> Form:
        """The form of a capture."""
        return cls(capture.operation, getattr(torch, capture.wire))


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

    def __init__(self, copier: Copier, numbers: Numbers) -> None:
        self._copier = copier
        self._numbers = numbers
        self._n_prompt: Longs = np.zeros(64, dtype=np.int64)
        """By slot."""
        self._done: NDArray[np.int64] = np.zeros((BOARD_SIZE, 3), dtype=np.int64)
        """Per record: the request's number and token, and one past the last position that was
        reduced."""
        self.resumed: set[int] = set()
        """Slots of requests that came back after something of theirs had been reduced."""

    def set(self, slots: Longs, n_prompt: Longs) -> None:
        """Take note of how many prompt tokens requests have."""
        self._n_prompt = grown(self._n_prompt, slots)
        self._n_prompt[slots] = n_prompt

    def watch(self, slot: int, envelope: Envelope) -> None:
        """Take note of a request something of which is reduced; a pre-empted one goes on.

        Args:
            slot: of the request, whose number is known.
            envelope: what it asks for.
        """
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
        """Note that rows of a request in front of a position are part of something that was sent.

        Args:
            slot: of a request that was watched with a token.
            position: one past the last of them.
        """
        record = self._done[self._numbers.of_slot[slot] % BOARD_SIZE]
        record[2] = max(record[2], position)

    def is_sampled(self, part: Part) -> NDArray[np.bool_]:
        """Which requests' first rows are of sampled tokens."""
        return part.starts() >= self._n_prompt[part.slots]

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
        """Make of rows what was asked for.

        Args:
            form: what that is.
            part: rows as the model made them.

        Returns:
            What is to be sent; None where that is nothing.
        """
        if form.operation == "norm":
            return replace(part, tensor=self._copier.apply(_norm, part.tensor), dtype=form.wire)
        if form.operation != "none":
            is_decode = (part.first >= self._n_prompt[part.slots]) | (part.counts == 0)
            if not is_decode.all():
                return self._partial(form, part)
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
        reduce = partial(_reduce, form.operation, pieces, np.asarray(covers))
        made = self._copier.apply(reduce, part.tensor)
        return Part(made, part.slots, counts, first, listed, np.asarray(covers), form.wire)

    def _split(self, slot: int, where: Longs) -> tuple[int, int]:
        """Which of a request's rows [head, tail) are the prompt's and have to be reduced."""
        record = self._done[self._numbers.of_slot[slot] % BOARD_SIZE]
        head, tail = where.searchsorted((record[2], self._n_prompt[slot])).tolist()
        if head < tail:
            record[2] = where[tail - 1] + 1
        return head, tail


def _norm(rows: torch.Tensor) -> torch.Tensor:
    norms: torch.Tensor = torch.linalg.vector_norm(rows, dim=-1, keepdim=True, dtype=torch.float32)
    return norms


def _reduce(
    operation: Operation, pieces: list[Piece], covers: Longs, rows: torch.Tensor
) -> torch.Tensor:
    """(taps, rows, width) out of a block; sums are float32, the largest keep their dtype."""
    taps, _, width = rows.shape
    dtype = torch.float32 if operation == "mean" else rows.dtype
    out = torch.empty(taps, len(covers), width, dtype=dtype, device=rows.device)
    for a, b, at in pieces:
        if covers[at] == 1:
            out[:, at : at + b - a] = rows[:, a:b]
        elif operation == "mean":
            torch.sum(rows[:, a:b], dim=1, dtype=torch.float32, out=out[:, at])
        else:
            torch.amax(rows[:, a:b], dim=1, out=out[:, at])
    return out
