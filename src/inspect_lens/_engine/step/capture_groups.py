"""Who wants rows of which taps: requests that want the same form a group."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from inspect_lens._engine.plan import GroupBlock, Longs, RequestTable, grown
from inspect_lens._engine.protocol.messages import LENS, ROWS, SCORES, Envelope
from inspect_lens._engine.protocol.readouts import (
    READOUTS,
    CaptureEnvelope,
    LensEnvelope,
    LensForm,
    ProbesEnvelope,
    PromptRead,
    Readout,
    RowPart,
)
from inspect_lens._engine.readout.readers import ProbeReader, ProbeStore
from inspect_lens._engine.readout.reduce import Form, HeadCut
from inspect_lens.spec import TapPoint, tap_order

_Rows = tuple[int, ...]


class _Read(NamedTuple):
    """What a worker does for one result."""

    rows: _Rows
    """Those that it reads, of a token's at all taps."""
    made: Hashable
    """What is made of them."""
    is_live: bool
    lent: _Rows = ()
    """Rows that a later stage of the pipeline reads."""
    borrowed: tuple[TapPoint, ...] = ()
    """Taps of earlier stages, whose rows are the last ones of `rows`."""
    heads: HeadCut | None = None
    """What is cut out of `rows` first, where heads are sent."""


_Key = tuple[_Read | None, ...]
"""Of each result what is done for it."""

_KNOWN_MOST = 1024

GATES = len(READOUTS)
"""Behind the kinds of results, what gates read of prompts; see `Envelope.read`."""


class _Wanted(NamedTuple):
    """What requests that are alike want of this worker."""

    key: _Key | None
    """Of their group; None where there is nothing here."""
    shares: list[tuple[int, int]]


@dataclass(frozen=True)
class Result:
    """One kind of result of a group."""

    ranks: tuple[int, ...]
    """Of the ring rows of a token those that it reads."""
    form: Form | None = None
    """What is made of captured rows."""
    heads: HeadCut | None = None
    """What is cut out of them first, where heads are sent."""
    readout: ProbeReader | None = None
    """What probes make of rows."""
    lens: LensForm | None = None
    """What a logit lens makes of rows."""
    lent: tuple[int, ...] = ()
    """Ring rows of a token that a later stage of the pipeline reads, and whose taps they are."""
    lent_taps: tuple[TapPoint, ...] = ()
    borrowed: tuple[int, ...] = ()
    """Ring rows of a token that are filled with rows of earlier stages, and whose taps they are."""
    borrowed_taps: tuple[TapPoint, ...] = ()
    gates: tuple[TapPoint, ...] = ()
    """Taps whose rows gates of this worker read; then nothing is sent."""
    is_live: bool = False
    """Whether it is looked at as it comes."""


@dataclass(frozen=True)
class Group:
    """Requests that want the same of the same taps."""

    taps: Longs
    """Whose rows go to the ring, ascending."""
    n_rows: int
    """Ring rows of a token there."""
    is_live: bool
    """Whether one of its results is looked at as it comes."""
    results: dict[int, Result]
    """By kind; see `READOUTS`."""

    @property
    def crosses(self) -> bool:
        """Whether rows go to other stages of a pipeline, or come from there."""
        return any(result.lent or result.borrowed for result in self.results.values())


class Window:
    """Which positions of each request one of its results has, by slot."""

    def __init__(self) -> None:
        self.lo: Longs = np.zeros(0, dtype=np.int64)
        self.hi: Longs = np.zeros(0, dtype=np.int64)
        self.listed: dict[int, Longs] = {}

    def set(self, slots: Longs, lo: Longs, hi: Longs) -> None:
        self.lo, self.hi = grown(self.lo, slots), grown(self.hi, slots)
        self.lo[slots], self.hi[slots] = lo, hi
        if self.listed:
            for slot in slots.tolist():
                self.listed.pop(slot, None)

    def select(self, block: GroupBlock) -> tuple[Longs, Longs, Longs, dict[int, Longs]] | None:
        """Cut a block to these positions; None where it has no others."""
        lo, hi = self.lo[block.slots], self.hi[block.slots]
        last = block.first + block.counts
        for i, positions in block.listed.items():
            last[i] = positions[-1] + 1
        some_listed = any(slot in self.listed for slot in block.slots.tolist())
        if not some_listed and (lo <= block.first).all() and (hi >= last).all():
            return None
        starts = np.cumsum(block.counts) - block.counts
        kept: list[Longs] = []
        counts, first = np.zeros_like(block.counts), block.first.copy()
        listed: dict[int, Longs] = {}
        for i, slot in enumerate(block.slots.tolist()):
            n = int(block.counts[i])
            positions = block.listed.get(i, block.first[i] + np.arange(n))
            wanted = (positions >= lo[i]) & (positions < hi[i])
            if slot in self.listed:
                wanted &= np.isin(positions, self.listed[slot])
            index = np.flatnonzero(wanted)
            kept.append(starts[i] + index)
            counts[i] = len(index)
            if len(index):
                first[i] = positions[index[0]]
                if slot in self.listed or i in block.listed:
                    listed[i] = positions[index]
        return np.concatenate(kept), counts, first, listed


class Groups:
    """The groups of a worker, and which positions each request's results have.

    A group lives as long as somebody belongs to it. What it has on the device goes with it, but
    for what the `ProbeStore` keeps.
    """

    def __init__(
        self,
        tap_index: dict[TapPoint, int],
        probes: ProbeStore,
        tap_rows: Longs,
        rank: int = 0,
        *,
        remote: Sequence[TapPoint] = (),
        is_last: bool = True,
    ) -> None:
        self._n_taps = len(tap_index)
        self._tap_index = tap_index | {tap: self._n_taps + i for i, tap in enumerate(remote)}
        """Taps of earlier stages of a pipeline are behind those of this one."""
        self._is_last = is_last
        self._tap_rows = tap_rows
        self._starts = np.cumsum(tap_rows) - tap_rows
        self._rank = rank
        self._probes = probes
        self._number: dict[_Key, int] = {}
        self._key: list[_Key | None] = []
        self._users: list[int] = []
        self._groups: dict[int, Group] = {}
        self._free: list[int] = []
        self.taps: list[Longs] = []
        """Taps of each group, by number."""
        self._known: dict[tuple[bytes | None, ...], _Wanted] = {}
        self._windows = tuple(Window() for _ in range(GATES + 1))
        """Of each result, and of what gates read."""

    def __getitem__(self, group: int) -> Group:
        return self._groups[group]

    def __len__(self) -> int:
        return len(self._groups)

    def cut(
        self, block: GroupBlock, stream: int
    ) -> tuple[Longs, Longs, Longs, dict[int, Longs]] | None:
        """See `Window.select`; None also where a group has one kind of result only."""
        group = self._groups[block.group]
        # Of a lens other ranks hold rows of what the first rank alone sends.
        if len(group.results) == 1 and stream != LENS:
            return None
        return self._windows[stream].select(block)

    def watch(self, table: RequestTable, slots: Longs, envelopes: Sequence[Envelope]) -> None:
        """Note which rows are wanted, all in all and for each result."""
        table.lo[slots], table.hi[slots] = np.iinfo(np.int64).max, 0
        results = zip(*[envelope.read for envelope in envelopes], strict=True)
        # What other ranks read alone is none of this one's business.
        here = self._groups[int(table.group[slots[0]])].results
        for stream, (window, of_all) in enumerate(zip(self._windows, results, strict=True)):
            # Requests of a group have the same results.
            parts = [part for part in of_all if part is not None]
            if parts and stream in here:
                lo = np.asarray([part.lo for part in parts])
                hi = np.asarray([part.hi for part in parts])
                window.set(slots, lo, hi)
                table.lo[slots] = np.minimum(table.lo[slots], lo)
                table.hi[slots] = np.maximum(table.hi[slots], hi)

    def watch_listed(self, table: RequestTable, slot: int, envelope: Envelope) -> None:
        """Note, beside, the positions that a request names."""
        here = self._groups[int(table.group[slot])].results
        for stream, part in enumerate(envelope.read):
            if part is not None and part.positions is not None and stream in here:
                positions = np.asarray(part.positions, dtype=np.int64)
                self._windows[stream].listed[slot] = positions
                if len(here) == 1:
                    table.listed[slot] = positions

    def take(self, envelope: Envelope, n: int = 1) -> int | None:
        """The group of some requests, which belong to it until `give`."""
        key = self._wanted(envelope).key
        if key is None:
            return None
        number = self._number.get(key)
        if number is None:
            wanted = [row for part in key if part is not None for row in (*part.rows, *part.lent)]
            taps = np.unique(self._starts.searchsorted(wanted, side="right") - 1)
            counts, starts = self._tap_rows[taps], self._starts[taps]
            of_each = [range(s, s + n) for s, n in zip(starts, counts, strict=True)]
            rank = {row: i for i, row in enumerate(chain.from_iterable(of_each))}
            results = {
                stream: self._result(stream, part, rank)
                for stream, part in enumerate(key)
                if part is not None
            }
            is_live = any(result.is_live for result in results.values())
            number = self._place(key, Group(taps, int(counts.sum()), is_live, results))
        self._users[number] += n
        return number

    def shares(self, envelope: Envelope) -> list[tuple[int, int]]:
        """Of each result: see `Opening.shares`."""
        return self._wanted(envelope).shares

    def _wanted(self, envelope: Envelope) -> _Wanted:
        """What a request wants of this worker; requests of a batch want the same."""
        alike = envelope.alike
        if (known := self._known.get(alike)) is not None:
            return known
        key: list[_Read | None] = []
        shares: list[tuple[int, int]] = []
        for stream, asked in enumerate(envelope.read):
            rows = () if asked is None else asked.rows
            here = [i for i, row in enumerate(rows) if self._is_here(row.tap)]
            mine = [i for i in here if rows[i].rank == self._rank]
            read = here if asked is not None and asked.is_read_by_all_ranks else mine
            lent, borrowed = self._over_stages(asked, read)
            if isinstance(asked, LensEnvelope):
                # The last stage reads what all of them have.
                read = list(range(len(rows))) if self._is_last else []
                mine = [i for i in read if rows[i].rank == self._rank]
            elif borrowed:
                read = [*read, *borrowed]
            if stream != GATES:
                shares.append((mine[0] if mine else 0, len(mine)))
            made = _made(stream, asked, tuple(rows[i].tap for i in read))
            if isinstance(asked, ProbesEnvelope):
                made = asked.names, tuple(rows[i].tap for i in read), len(borrowed)
            is_live = asked is not None and asked.is_live
            found = _Read(
                self._numbers_of(rows, read),
                made if read else None,
                is_live,
                self._numbers_of(rows, lent),
                tuple(rows[i].tap for i in borrowed),
                None if asked is None else HeadCut.of(asked.head_size, [rows[i] for i in read]),
            )
            key.append(found if read or lent else None)
        wanted = _Wanted(tuple(key) if any(key) else None, shares)
        if len(self._known) >= _KNOWN_MOST:
            self._known.clear()
        self._known[alike] = wanted
        return wanted

    def _is_here(self, tap: TapPoint) -> bool:
        return self._tap_index.get(tap, self._n_taps) < self._n_taps

    def _numbers_of(self, rows: Sequence[RowPart], which: Sequence[int]) -> _Rows:
        """Where some rows stand among those of a token at all taps."""
        starts = [int(self._starts[self._tap_index[rows[i].tap]]) for i in which]
        return tuple(start + rows[i].part for start, i in zip(starts, which, strict=True))

    def _over_stages(
        self, asked: Readout | None, read: Sequence[int]
    ) -> tuple[list[int], list[int]]:
        """Of a result's rows those that a later stage reads, and those from earlier ones."""
        # A lens reads on the last stage, which has the unembedding, and an MLP where its last layer
        # is. All else is read where it is.
        if isinstance(asked, LensEnvelope):
            if not self._is_last:
                return list(read), []
            return [], [i for i, row in enumerate(asked.rows) if not self._is_here(row.tap)]
        if not isinstance(asked, ProbesEnvelope) or not read:
            return [], []
        lent: set[TapPoint] = set()
        borrowed: set[TapPoint] = set()
        for probe in self._probes.find(asked.names):
            here = {tap for tap in probe.taps if self._is_here(tap)}
            if probe.kind != "mlp" or not here or len(here) == len(probe.taps):
                continue
            if max(probe.taps, key=tap_order) in here:
                borrowed |= set(probe.taps) - here
            else:
                lent |= here
        rows = list(enumerate(asked.rows))
        return [i for i, row in rows if row.tap in lent], [
            i for i, row in rows if row.tap in borrowed
        ]

    def _result(self, stream: int, read: _Read, rank: Mapping[int, int]) -> Result:
        """What a group does for one result; `rank` says which of its rows a row is."""
        ranks = tuple(rank[row] for row in read.rows)
        lent = self._starts.searchsorted(read.lent, side="right") - 1
        taps = list(self._tap_index) if read.lent else []
        made: Any = read.made
        result = Result(
            ranks,
            lent=tuple(rank[row] for row in read.lent),
            lent_taps=tuple(taps[int(i)] for i in lent),
            borrowed_taps=read.borrowed,
            borrowed=tuple(rank[int(self._starts[self._tap_index[tap]])] for tap in read.borrowed),
            is_live=read.is_live,
            heads=read.heads,
        )
        if not ranks:
            return result
        if stream == SCORES:
            return replace(result, readout=self._probes.readout(*made))
        if stream == LENS:
            return replace(result, lens=made)
        if stream == GATES:
            return replace(result, gates=made)
        return replace(result, form=made)

    def give(self, number: int) -> None:
        self._users[number] -= 1
        key = self._key[number]
        if not self._users[number] and key is not None:
            del self._number[key], self._groups[number]
            self._key[number] = None
            self._free.append(number)

    def _place(self, key: _Key, group: Group) -> int:
        if not self._free:
            self._free.append(len(self.taps))
            self._key.append(None)
            self._users.append(0)
            self.taps.append(group.taps)
        number = self._free.pop()
        self._number[key], self._key[number] = number, key
        self._groups[number], self.taps[number] = group, group.taps
        return number


def _made(stream: int, asked: Readout | None, taps: tuple[TapPoint, ...]) -> Hashable:
    """What a worker makes of the rows of a result: what tells groups apart beside the rows."""
    if isinstance(asked, LensEnvelope):
        return asked.form
    if isinstance(asked, PromptRead):
        return taps
    # Queries and keys are sent as they are.
    return Form.of(asked) if stream == ROWS and isinstance(asked, CaptureEnvelope) else None
