"""Rows that cross the stages of a pipeline, beside what the engine itself sends.

A lens reads rows of all layers where the unembedding is, which only the last stage has, and an MLP
reads its layers together. So a stage lends rows: after its forward pass it takes them out of its
ring, and the engine's next message to the next stage carries them, with a list of whose they are.
That stage has a place for them in its own ring, where everything is read as if its own taps had
written it. It passes on what comes, for the stages behind it.

Both stages plan the same step, each by what it knows. So the list names the requests, and what is
missing in it, as after a fault of one stage, fails its request. A step in which nothing crosses
sends nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from inspect_lens._engine.export.transport import Copier
from inspect_lens._engine.plan import GroupBlock, Longs
from inspect_lens._engine.protocol.readouts import CROSSING_PIECE, crossing_bytes
from inspect_lens.errors import CaptureError
from inspect_lens.spec import TapPoint

from .capture_groups import Groups, Result

LIST_KEY: Final = "inspect_lens.list"
ROWS_KEY: Final = "inspect_lens.rows"
"""Of tensors beside those of the engine."""


class Lent(msgspec.Struct, array_like=True):
    """Rows of some requests at some taps: (taps, tokens), one behind the other."""

    kind: int
    """Of the result that they are for; see `READOUTS`."""
    taps: list[TapPoint]
    keys: list[str]
    """Requests, in the order of their tokens."""
    counts: list[int]
    """Tokens of each."""
    first: list[int]
    """Position of the first token of each."""
    start: int
    """The first of the rows."""


@dataclass(frozen=True)
class Crossing:
    """What goes from one stage to the next with a step."""

    lists: list[Lent]
    flat: torch.Tensor
    """The rows, one behind the other, and some numbers more: see `_padding`."""
    hidden: int

    @property
    def rows(self) -> torch.Tensor:
        """(rows, hidden)."""
        n = len(self.flat) // self.hidden
        return self.flat[: n * self.hidden].view(n, self.hidden)

    def tensors(self, ranks: int) -> dict[str, torch.Tensor]:
        told = msgspec.json.encode(self.lists)
        told += b" " * _padding(len(told), ranks)
        listed = torch.frombuffer(bytearray(told), dtype=torch.uint8)
        return {LIST_KEY: listed, ROWS_KEY: self.flat}

    @classmethod
    def of(cls, tensors: Mapping[str, torch.Tensor], hidden: int) -> Crossing:
        # Ray may have moved it to the device.
        told = tensors[LIST_KEY].cpu().numpy().tobytes()
        return cls(msgspec.json.decode(told, type=list[Lent]), tensors[ROWS_KEY], hidden)

    @classmethod
    def room_for(cls, lists: list[Lent], n: int, ring: torch.Tensor, ranks: int) -> Crossing:
        """Memory for so many rows like those of the ring."""
        hidden = ring.shape[1]
        size = n * hidden
        flat = ring.new_empty(size + _padding(size, ranks))
        flat[size:] = 0
        return cls(lists, flat, hidden)


def _padding(n: int, ranks: int) -> int:
    """How many more numbers there have to be, so that `ranks` do not divide them without rest."""
    # The engine has tensor-parallel ranks each send a share of what they divide, as it is the same
    # on all of them. Here each rank sends what it has: a request may have failed on one of them.
    return (1 - n) % ranks


@dataclass(frozen=True)
class _Part:
    """The tokens of a step whose rows cross for one result, all of one block."""

    kind: int
    result: Result
    keys: list[str]
    """Requests; empty for those that have failed."""
    counts: Longs
    first: Longs
    at: NDArray[np.int64]
    """Ring row of each token at the first of the block's taps."""
    n_tokens: int
    """Tokens of the block: ring rows from one tap to the next."""

    def rows(self, ranks: Sequence[int]) -> NDArray[np.int64]:
        """(taps, tokens); ring rows at some of the block's taps."""
        rows: NDArray[np.int64] = self.at + self.n_tokens * np.asarray(ranks)[:, None]
        return rows


class Stages:
    """The part of one worker in what crosses the stages."""

    def __init__(
        self, *, is_first: bool = False, is_last: bool, ranks: int = 1, most_rows: int | None = None
    ) -> None:
        self.is_first = is_first
        self.is_last = is_last
        self._ranks = ranks
        self._most_rows = most_rows
        self._came: Crossing | None = None
        """With the running step."""
        self._going: Crossing | None = None

    def nbytes(self, row_bytes: int) -> int:
        """Bytes on the device that steps may need at once."""
        held = (self._most_rows or 0) * row_bytes
        return crossing_bytes(held, is_first=self.is_first, is_last=self.is_last)

    def take(self, tensors: dict[str, torch.Tensor] | None, hidden: int) -> None:
        """Take what came with a step out of what the engine has received."""
        self._came = self._going = None
        if tensors is None or LIST_KEY not in tensors:
            return
        # Taken out first: the model does not know them.
        ours = {key: tensors.pop(key) for key in (LIST_KEY, ROWS_KEY)}
        self._came = Crossing.of(ours, hidden)
        if not self.is_last:
            self._going = self._came

    def give(self) -> dict[str, torch.Tensor]:
        """What leaves with a step."""
        going, self._came, self._going = self._going, None, None
        return {} if going is None else going.tensors(self._ranks)

    def cross(
        self,
        groups: Groups,
        blocks: Iterable[GroupBlock],
        first_row: int,
        ring: torch.Tensor,
        copier: Copier,
        key_of: Callable[[int], str],
    ) -> list[str]:
        """Put what came where it is read, and keep what is lent; returns whose rows are missing."""
        parts = list(_parts(groups, blocks, first_row, key_of))
        if not parts:
            return []
        missing = self._borrow(parts, ring, copier)
        self._lend(parts, ring, copier)
        return missing

    def _borrow(self, parts: Sequence[_Part], ring: torch.Tensor, copier: Copier) -> list[str]:
        out_of: list[NDArray[np.int64]] = []
        into: list[NDArray[np.int64]] = []
        missing: list[str] = []
        came = [] if self._came is None else self._came.lists
        for part in parts:
            if taps := part.result.borrowed_taps:
                starts = _found([lent for lent in came if lent.kind == part.kind], taps, part)
                counts = part.counts
                is_here: NDArray[np.bool_] = np.logical_and.reduce(starts >= 0, axis=0)
                asked = zip(part.keys, counts.tolist(), is_here.tolist(), strict=True)
                missing += [key for key, n, found in asked if key and n and not found]
                tokens = np.repeat(is_here, counts)
                within = np.arange(len(tokens)) - np.repeat(np.cumsum(counts) - counts, counts)
                every = np.repeat(starts, counts, axis=1) + within
                out_of.append(every[:, tokens].reshape(-1))
                into.append(part.rows(part.result.borrowed)[:, tokens].reshape(-1))
        if into and self._came is not None:
            source, target = np.concatenate(out_of), np.concatenate(into)
            step = max(1, CROSSING_PIECE // (ring.shape[1] * ring.element_size()))
            for a in range(0, len(source), step):
                moved = copier.select(self._came.rows[None], source[a : a + step])[0]
                copier.scatter(moved, target[a : a + step], ring)
        return missing

    def _lend(self, parts: Sequence[_Part], ring: torch.Tensor, copier: Copier) -> None:
        going = self._going
        lists = [] if going is None else list(going.lists)
        taken: list[NDArray[np.int64]] = []
        n_before = n = 0 if going is None else len(going.rows)
        for part in parts:
            taps = part.result.lent_taps
            if taps:
                numbers = part.counts.tolist(), part.first.tolist()
                lists.append(Lent(part.kind, list(taps), part.keys, *numbers, n))
                rows = part.rows(part.result.lent)
                taken.append(rows.reshape(-1))
                n += rows.size
        if not taken:
            return
        if self._most_rows is not None and n > self._most_rows:
            raise CaptureError(
                f"a step has {n} rows for other stages of the pipeline, and {self._most_rows} fit; "
                "read a lens and MLP probes in requests of their own, or start the engine with a "
                "larger INSPECT_LENS_RING_BYTES"
            )
        made = Crossing.room_for(lists, n, ring, self._ranks)
        if going is not None:
            made.rows[:n_before] = going.rows
        copier.gather(ring, np.concatenate(taken), made.rows[n_before:])
        self._going = made


def _parts(
    groups: Groups, blocks: Iterable[GroupBlock], first_row: int, key_of: Callable[[int], str]
) -> Iterator[_Part]:
    for block in blocks:
        group = groups[block.group]
        if not group.crosses:
            continue
        keys = [key_of(slot) for slot in block.slots.tolist()]
        for kind, result in group.results.items():
            if not result.lent and not result.borrowed:
                continue
            index, counts, first = np.arange(block.n_tokens), block.counts, block.first
            if (cut := groups.cut(block, kind)) is not None:
                index, counts, first = cut[:3]
            if len(index):
                at = first_row + block.base + index
                yield _Part(kind, result, keys, counts, first, at, block.n_tokens)


def _found(lists: Iterable[Lent], taps: Sequence[TapPoint], part: _Part) -> NDArray[np.int64]:
    """(taps, requests); the first row of each, or -1 where it did not come."""
    starts = np.full((len(taps), len(part.keys)), -1, dtype=np.int64)
    for lent in lists:
        counts, first = np.asarray([lent.counts, lent.first], dtype=np.int64)
        place = {key: i for i, key in enumerate(lent.keys) if key}
        at = np.asarray([place.get(key, -1) for key in part.keys], dtype=np.int64)
        fits = (at >= 0) & (counts[at] == part.counts) & (first[at] == part.first)
        columns = lent.start + (np.cumsum(counts) - counts)[at]
        step = int(counts.sum())
        ranks = {tap: i for i, tap in enumerate(lent.taps)}
        for tap, own in zip(taps, starts, strict=True):
            if tap in ranks:
                own[fits] = columns[fits] + ranks[tap] * step
    return starts


def missing_rows() -> CaptureError:
    """Why a request fails whose rows did not come."""
    return CaptureError(
        "an earlier stage of the pipeline has not sent rows of this request, which has failed "
        "there; try it alone, or read less in one request"
    )
