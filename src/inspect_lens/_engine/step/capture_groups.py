"""Who wants rows of which taps: requests that want the same form a group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from inspect_lens._engine.plan.step_plan import GroupBlock, Longs, RequestTable, grown
from inspect_lens._engine.protocol.capture import CaptureEnvelope
from inspect_lens._engine.protocol.envelope import Envelope
from inspect_lens._engine.protocol.messages import LENS, QK, ROWS, SCORES
from inspect_lens._engine.protocol.readouts import READOUTS, LensForm
from inspect_lens._engine.readout.readers import ProbeReader, ProbeStore
from inspect_lens._engine.readout.reduce import Form
from inspect_lens.spec import TapPoint

__all__ = ["Group", "Groups"]


_Rows = tuple[int, ...]
_Key = tuple[_Rows, _Rows, tuple[str, ...] | None, _Rows, Form | None, bool, LensForm | None]
"""Taps, those of a token's rows at all taps that are captured, names of probes, those that have
queries and keys, what is made of captured rows, whether scores are looked at as they come, and what
a logit lens makes of rows."""

_KNOWN_MOST = 1024


@dataclass(frozen=True, slots=True)
class _Wanted:
    """What requests that are alike want of this worker."""

    key: _Key | None
    """Of their group; None where there is nothing here."""
    probe_taps: tuple[TapPoint, ...]
    shares: list[tuple[int, int]]


@dataclass(frozen=True)
class Result:
    """One kind of result of a group."""

    ranks: tuple[int, ...]
    """Of the ring rows of a token those that it reads."""
    form: Form | None = None
    """What is made of captured rows."""
    readout: ProbeReader | None = None
    """What probes make of rows."""
    lens: LensForm | None = None
    """What a logit lens makes of rows."""


@dataclass(frozen=True)
class Group:
    """Requests that want the same of the same taps."""

    taps: Longs
    """Whose rows go to the ring, ascending."""
    n_rows: int
    """Ring rows of a token there."""
    is_live: bool
    """Whether scores are looked at as they come."""
    results: dict[int, Result]
    """By kind; see `READOUTS`."""


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
    ) -> None:
        """Begin without groups."""
        self._tap_index = tap_index
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
        self._windows = tuple(Window() for _ in READOUTS)
        """Of each result."""

    def __getitem__(self, group: int) -> Group:
        return self._groups[group]

    def __len__(self) -> int:
        return len(self._groups)

    def cut(
        self, block: GroupBlock, stream: int
    ) -> tuple[Longs, Longs, Longs, dict[int, Longs]] | None:
        """See `Window.select`; None also where a group has one kind of result only.

        But for a lens: other ranks hold rows of what the first rank alone sends.
        """
        group = self._groups[block.group]
        if len(group.results) == 1 and stream != LENS:
            return None
        return self._windows[stream].select(block)

    def watch(self, table: RequestTable, slots: Longs, envelopes: Sequence[Envelope]) -> None:
        """Note which rows are wanted, all in all and for each result."""
        table.lo[slots], table.hi[slots] = np.iinfo(np.int64).max, 0
        results = zip(*[envelope.results for envelope in envelopes], strict=True)
        for window, of_all in zip(self._windows, results, strict=True):
            # Requests of a group have the same results.
            parts = [part for part in of_all if part is not None]
            if parts:
                lo = np.asarray([part.lo for part in parts])
                hi = np.asarray([part.hi for part in parts])
                window.set(slots, lo, hi)
                table.lo[slots] = np.minimum(table.lo[slots], lo)
                table.hi[slots] = np.maximum(table.hi[slots], hi)

    def watch_listed(self, table: RequestTable, slot: int, envelope: Envelope) -> None:
        """Note, beside, the positions that a request names."""
        parts = envelope.results
        for window, part in zip(self._windows, parts, strict=True):
            if part is not None and part.positions is not None:
                window.listed[slot] = positions = np.asarray(part.positions, dtype=np.int64)
                if parts.count(None) == len(parts) - 1:
                    table.listed[slot] = positions

    def take(self, envelope: Envelope, n: int = 1) -> int | None:
        """The group of some requests, which belong to it until `give`."""
        wanted = self._wanted(envelope)
        key, probe_taps = wanted.key, wanted.probe_taps
        if key is None:
            return None
        number = self._number.get(key)
        if number is None:
            taps, rows, names, qk, form, is_live, lens = key
            here = np.asarray(taps, dtype=np.int64)
            counts, starts = self._tap_rows[here], self._starts[here]
            of_each = [range(s, s + n) for s, n in zip(starts, counts, strict=True)]
            rank = {row: i for i, row in enumerate(chain.from_iterable(of_each))}
            results: dict[int, Result] = {}
            if rows:
                results[ROWS] = Result(tuple(rank[row] for row in rows), form=form)
            if names is not None:
                read = tuple(rank[self._start(t)] for t in probe_taps)
                results[SCORES] = Result(read, readout=self._probes.readout(names, probe_taps))
            if qk:
                results[QK] = Result(tuple(rank[row] for row in qk))
            if lens:
                results[LENS] = Result(tuple(rank[self._start(t)] for t in lens.taps), lens=lens)
            number = self._place(key, Group(here, int(counts.sum()), is_live, results))
        self._users[number] += n
        return number

    def shares(self, envelope: Envelope) -> list[tuple[int, int]]:
        """Of each result: see `Opening.shares`."""
        return self._wanted(envelope).shares

    def _wanted(self, envelope: Envelope) -> _Wanted:
        """What a request wants of this worker; requests of a batch want the same."""
        capture, probes = envelope.capture, envelope.probes
        alike = envelope.alike
        if (known := self._known.get(alike)) is not None:
            return known
        here = self._tap_index
        mine, rows, taps = self._captured(capture)
        mine_qk, qk, taps_qk = self._captured(envelope.qk)
        probed = () if probes is None else probes.taps
        read = [i for i, t in enumerate(probed) if t in here and not self._rank]
        probe_taps = tuple(probed[i] for i in read)
        taps |= taps_qk | {here[t] for t in probe_taps}
        names = probes.names if probes is not None and probe_taps else None
        form = Form.of(capture) if capture is not None and rows else None
        is_live = probes is not None and probes.is_live
        # All ranks read the rows, each with its part of the vocabulary, and the first sends.
        lens = None if envelope.lens is None else envelope.lens.form
        seen = () if lens is None else lens.taps
        taps |= {here[t] for t in seen}
        told = () if self._rank else range(len(seen))
        made = _Wanted(
            (tuple(sorted(taps)), rows, names, qk, form, is_live, lens) if taps else None,
            probe_taps,
            [_share(mine), _share(read), _share(mine_qk), _share(told)],
        )
        if len(self._known) >= _KNOWN_MOST:
            self._known.clear()
        self._known[alike] = made
        return made

    def _captured(self, asked: CaptureEnvelope | None) -> tuple[list[int], _Rows, set[int]]:
        """Which rows of a capture this worker sends, which of its own these are, and their taps."""
        here, rows = self._tap_index, () if asked is None else asked.rows
        mine = [i for i, r in enumerate(rows) if r.rank == self._rank and r.tap in here]
        own = tuple(int(self._starts[here[rows[i].tap]]) + rows[i].part for i in mine)
        return mine, own, {here[rows[i].tap] for i in mine}

    def _start(self, tap: TapPoint) -> int:
        """The first of a token's rows at a tap."""
        return int(self._starts[self._tap_index[tap]])

    def give(self, number: int) -> None:
        """Take note that a request has gone."""
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


def _share(at: Sequence[int]) -> tuple[int, int]:
    """First of what this worker has, and how many it has."""
    return (at[0] if at else 0), len(at)
