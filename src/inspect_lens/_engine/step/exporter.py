"""From what a step left in the ring to what goes to front-ends, by group and kind of result."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import numpy as np
import torch

from inspect_lens._engine.export.send_queue import Outbox
from inspect_lens._engine.export.transport import Exporter, Numbers, Rows
from inspect_lens._engine.plan.step_plan import GroupBlock, Longs, RequestTable
from inspect_lens._engine.protocol.envelope import Envelope
from inspect_lens._engine.protocol.messages import LENS, ROWS, Opening, packed
from inspect_lens._engine.readout.reduce import Form, Part, Reducer, SumTable
from inspect_lens.errors import CapacityError
from inspect_lens.spec import EnginePath

from .capture_groups import Groups


class Sender:
    """Sends blocks, and how far drafts are settled."""

    def __init__(
        self,
        ring: torch.Tensor,
        exporter: Exporter,
        groups: Groups,
        numbers: Numbers,
        sum_table: SumTable,
        table: RequestTable,
        *,
        drop: Callable[[str], None],
        fail: Callable[[bytes, Exception], None],
    ) -> None:
        """Store what sending needs."""
        self._ring = ring
        self._exporter = exporter
        self._copier = exporter.copier
        self._groups = groups
        self._numbers = numbers
        self._table = table
        self._drop, self._fail = drop, fail
        self.sum_table = sum_table
        self.outbox = Outbox(exporter, ring, is_wanted=numbers.has_live, drop=drop, fail=fail)
        self.reducer = Reducer(exporter.copier, numbers, table)
        self.seen: list[Part] = []
        """What a logit lens made of the running step, which is sent with the rest."""
        self._forms: dict[int, Form] = {}
        """By slot: what requests want whose sampled tokens are kept."""

        self._unannounced: dict[str, tuple[int, list[Opening]]] = {}
        self._failed: list[tuple[bytes, Exception]] = []
        """Packed numbers of requests whose rows found no room; they fail as late."""
        self._gone: set[str] = set()
        """Front-ends that take nothing any more, until they are dropped: never while the rows of
        others are under way, which may lie beside theirs."""

    def check(self, reply: str) -> None:
        """See `Exporter.check`."""
        self._exporter.check(reply)

    def opened(self, reply: str, pid: int, openings: Iterable[Opening]) -> None:
        """Take note of requests of which their front-end has to be told."""
        self._unannounced.setdefault(reply, (pid, []))[1].extend(openings)

    def announce(self) -> None:
        """Tell front-ends of new requests, before the first row or record of theirs."""
        if not self._unannounced:
            return
        waiting, self._unannounced = self._unannounced, {}
        with self._dropping():
            for reply, (pid, openings) in waiting.items():
                if not self._exporter.announce(reply, pid, openings):
                    self._gone.add(reply)

    def watch(self, slot: int, envelope: Envelope, group: int) -> None:
        """Take note of a request something of which is reduced, here where there is room."""
        self.reducer.watch(slot, envelope)
        capture, rows = envelope.capture, self._groups[group].results.get(ROWS)
        if capture is None or capture.fold is None or rows is None:
            return
        if self.sum_table.open(slot, capture.fold, len(rows.ranks)):
            self._forms[slot] = Form.of(capture)

    def flush(self, slots: Longs) -> None:
        """Send what is kept of requests' sampled tokens."""
        with self._dropping():
            self._flush(slots)

    def _flush(self, slots: Longs) -> None:
        alike: dict[tuple[str | None, torch.dtype, EnginePath], list[int]] = {}
        for slot in slots[self.sum_table.known(slots)].tolist():
            if self.sum_table.count(slot):
                # The ways of its steps stand on the board.
                way = self._numbers.a_path(slot)
                key = self._table.reply_of(slot), self._forms[slot].wire, way
                alike.setdefault(key, []).append(slot)
        for (reply, wire, path), of in alike.items():
            for held in self.sum_table.take(np.asarray(of, dtype=np.int64)):
                for slot, folded in zip(held.slots.tolist(), held.folded.tolist(), strict=True):
                    self.reducer.skip_until(slot, folded)
                n, each = held.positions.shape
                part = Part(
                    held.tensor,
                    held.slots,
                    np.full(n, each, dtype=np.int64),
                    held.positions[:, 0],
                    dict(enumerate(held.positions)),
                    held.covers,
                    wire,
                )
                if reply is not None:
                    self._export(reply, part.rows(self._numbers, ROWS), path)

    def forget(self, slot: int) -> None:
        """Give back what is kept of a request; nothing is sent."""
        self.sum_table.close(slot)
        self._forms.pop(slot, None)
        self.reducer.forget(slot)

    def bytes_that_wait(self, blocks: Iterable[GroupBlock]) -> int | None:
        """Bytes of rows of a step that may be sent with those of the next ones."""
        if self.sum_table.rows_in_use or self.reducer.resumed:
            return None
        total, row_bytes = 0, self._ring.shape[1] * self._ring.element_size()
        for block in blocks:
            group = self._groups[block.group]
            if group.is_live:
                return None
            for result in group.results.values():
                is_combined = result.form is not None and result.form.combine is not None
                if is_combined or result.lens is not None:
                    return None
                if result.readout is None:
                    total += len(result.ranks) * block.n_tokens * row_bytes
        return total

    def send(
        self,
        blocks: Iterable[GroupBlock],
        first_row: int,
        path: EnginePath,
        *,
        steps: int = 1,
        apart: int = 0,
    ) -> None:
        """Send the rows of a step, or of some steps that were the same."""
        with self._dropping():
            for block in blocks:
                # Of a request that failed meanwhile nobody wants the rows, nor is its group there.
                if (self._table.owner[block.slots] >= 0).any():
                    self._send_block(block, first_row + block.base, path, steps, apart)
            seen, self.seen = self.seen, []
            for part in seen:
                self._send_part(LENS, part, path)

    def _send_block(
        self, block: GroupBlock, first: int, path: EnginePath, steps: int, apart: int
    ) -> None:
        group = self._groups[block.group]
        tokens, width = block.n_tokens // steps, self._ring.shape[1]
        rows = self._ring.as_strided(
            (group.n_rows, steps, tokens, width),
            (tokens * width, apart * width, width, 1),
            first * width,
        )
        for stream, result in group.results.items():
            if result.readout is not None:
                read = partial(result.readout, ranks=result.ranks)
                made = self._copier.apply(read, rows)
            elif result.lens is None:
                made = self._copier.taps(rows, result.ranks).flatten(1, 2)
            else:
                continue  # all ranks have read these together
            self._send(stream, result.form, block, made, path)

    def _send(
        self,
        stream: int,
        form: Form | None,
        block: GroupBlock,
        rows: torch.Tensor,
        path: EnginePath,
    ) -> None:
        """Send one kind of result of a block, (taps, tokens, width), to front-ends by slot."""
        part = Part(rows, block.slots, block.counts, block.first, block.listed)
        cut = self._groups.cut(block, stream)
        if cut is not None:
            index, counts, first, listed = cut
            if not len(index):
                return
            part = Part(self._copier.select(rows, index), block.slots, counts, first, listed)
        # Whoever comes back may find no room in the table, and has sent a sum all the same.
        if form is not None and (self.sum_table.rows_in_use or self.reducer.resumed):
            kept = self._kept(part, path)
            if kept is None:
                return
            part = kept
        made = part if form is None else self.reducer.apply(form, part)
        if made is not None:
            self._send_part(stream, made, path)

    def _send_part(self, stream: int, made: Part, path: EnginePath) -> None:
        """Send one kind of result to the front-ends of its requests."""
        whose = self._table.owner[made.slots]
        if (one := int(whose[0])) >= 0 and (whose == one).all():
            self._export(self._table.replies[one], made.rows(self._numbers, stream), path)
            return
        # Several front-ends share the block: each gets its own requests' rows only.
        for index in np.unique(whose[whose >= 0]).tolist():
            if (mine := made.only(whose == index, self._copier)) is not None:
                self._export(self._table.replies[index], mine.rows(self._numbers, stream), path)

    def _export(self, reply: str, rows: Rows, path: EnginePath) -> None:
        if reply in self._gone:
            return
        try:
            if not self.outbox.put(reply, rows, path):
                self._gone.add(reply)
        except CapacityError as error:
            # Rows of others, which the same step left, may find room.
            self._failed.append((rows.numbers, error))

    @contextmanager
    def _dropping(self) -> Iterator[None]:
        """Drop, at the end, the front-ends that turned out to take nothing."""
        try:
            yield
        finally:
            gone, self._gone = self._gone, set()
            failed, self._failed = self._failed, []
            for reply in gone:
                self._drop(reply)
            for numbers, error in failed:
                self._fail(numbers, error)

    def _kept(self, part: Part, path: EnginePath) -> Part | None:
        """Keep what is kept of a step's rows, and give back the others; None where none is left."""
        sum_table, first = self.sum_table, part.starts()
        at = np.flatnonzero(sum_table.known(part.slots) & (part.counts > 0))
        before = sum_table.last(part.slots[at])
        is_next = (part.counts[at] == 1) & (first[at] > before)
        # These are computed again from their start.
        self._flush(part.slots[at[(before >= 0) & ~is_next]])
        rest = self.reducer.without_done(part)
        if rest is None:
            return None
        first = rest.starts()
        own = sum_table.known(rest.slots) & (rest.counts == 1) & self.reducer.is_sampled(rest)
        if not own.any():
            return rest
        is_all = bool(own.all())
        mine = rest if is_all else rest.only(own, self._copier)
        assert mine is not None
        self._numbers.note_path(mine.slots, path)
        sum_table.add(mine.tensor, mine.slots, first[own])
        self._flush(sum_table.full(mine.slots))
        return None if is_all else rest.only(~own, self._copier)

    def settle(self, running: Mapping[int, int]) -> None:
        """Tell front-ends how far drafts are settled."""
        by_reply: dict[str, list[int]] = {}
        for slot in running:
            if (reply := self._table.reply_of(slot)) is not None:
                by_reply.setdefault(reply, []).append(slot)
        with self._dropping():
            for reply, slots in by_reply.items():
                numbers = packed(self._numbers.of_slot[slots])
                settled = packed(np.asarray([running[s] for s in slots], dtype=np.int64))
                if not self._exporter.settle(reply, numbers, settled):
                    self._gone.add(reply)
