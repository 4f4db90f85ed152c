"""From what a step left in the ring to what goes to front-ends: rounds of steps, blocks, pieces.

A GPU serves copies to the host in the order in which they are asked for, whatever the streams: seen
on an H200, where a copy of 4 KiB took 2.4 ms behind 128 MiB, and 9.7 ms behind 512. The tokens that
a step has sampled come to the host in the same way, and the engine plans the next step but one with
them. So what a step leaves is asked for behind its tokens, and of the rows of a long prompt no more
at a time than a step has time for (`Outbox`).

To ask for a copy, and to tell a front-end of it, costs the step loop's thread more than all else
that a repeated step takes, whatever the size. Nobody looks at most rows before their request is
over, so those of a few steps wait in the ring, side by side, for one copy and one message
(`Rounds`). They are sent before anything else changes: when somebody comes or goes, or a step is
planned anew.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from inspect_lens._engine.export.transport import Copier, Exporter, Numbers, Rows
from inspect_lens._engine.plan import GroupBlock, Longs, RequestTable, StepPlan
from inspect_lens._engine.protocol.messages import LENS, ROWS, Envelope, Opening, packed
from inspect_lens._engine.readout.reduce import Form, Part, Reducer, SumTable
from inspect_lens.errors import CapacityError
from inspect_lens.spec import EnginePath

from .capture_groups import Groups

_AT_ONCE = 32 << 20
"""Bytes that are sent with their step: two thirds of a millisecond."""
_PIECE = 128 << 20
"""Bytes of what is sent bit by bit, where one tap does not have more: asking for each takes time of
the step loop's thread."""
_MORE = 64 << 20
"""Bytes that leave in front of a step beside as many as come with one, to make up for prompts."""
_STEPS = 4
"""Steps of which the least that one of them brings is what comes with a step."""


@dataclass(frozen=True, slots=True)
class _Piece:
    reply: str
    rows: Rows
    path: EnginePath
    taps: range
    nbytes: int


@dataclass(eq=False)
class Outbox:
    """Sends rows at once, or lets them wait for their turn."""

    _exporter: Exporter
    _ring: torch.Tensor
    _is_wanted: Callable[[bytes], bool]
    _drop: Callable[[str], None]
    _fail: Callable[[bytes, Exception], None]

    def __post_init__(self) -> None:
        self._waiting: deque[_Piece | Callable[[], None]] = deque()
        self._came = 0
        """Bytes that had to wait since the last step began."""
        self._steps: deque[int] = deque(_STEPS * [0], maxlen=_STEPS)
        """The same, of the last steps."""

    def put(self, reply: str, rows: Rows, path: EnginePath) -> bool:
        """Send rows now where they are few."""
        tensor = rows.tensor
        taps = tensor.shape[0]
        per_tap = tensor[0].numel() * rows.dtype.itemsize
        if taps * per_tap <= _AT_ONCE or (
            tensor.untyped_storage().data_ptr() != self._ring.untyped_storage().data_ptr()
        ):
            return self._exporter.send(reply, rows, path)
        at_once = max(1, _PIECE // per_tap)
        for tap in range(0, taps, at_once):
            some = range(tap, min(taps, tap + at_once))
            self._waiting.append(_Piece(reply, rows, path, some, len(some) * per_tap))
        self._came += taps * per_tap
        return True

    def then(self, work: Callable[[], None]) -> None:
        """Do something when all that waits by now has been sent."""
        if self._waiting:
            self._waiting.append(work)
        else:
            work()

    def begin_step(self) -> None:
        """Send what a step has time for."""
        self._steps.append(self._came)
        self._came = 0
        if self._waiting:
            self._send(min(self._steps) + _MORE)

    def send_all(self) -> None:
        if self._waiting:
            self._send(None)

    def _send(self, nbytes: int | None) -> None:
        waiting = self._waiting
        while waiting:
            piece = waiting[0]
            if not isinstance(piece, _Piece):
                waiting.popleft()
                piece()
                continue
            if nbytes is not None:
                if nbytes <= 0:
                    return
                nbytes -= piece.nbytes
            waiting.popleft()
            if not self._is_wanted(piece.rows.numbers):
                continue
            try:
                if not self._exporter.send(piece.reply, piece.rows, piece.path, piece.taps):
                    self._drop(piece.reply)
            except Exception as error:  # noqa: BLE001 - a fault fails its own requests
                self._fail(piece.rows.numbers, error)


@dataclass(eq=False)
class Sender:
    """Sends blocks, and how far drafts are settled."""

    _ring: torch.Tensor
    _exporter: Exporter
    _groups: Groups
    _numbers: Numbers
    sum_table: SumTable
    _table: RequestTable
    _drop: Callable[[str], None]
    _fail: Callable[[bytes, Exception], None]

    def __post_init__(self) -> None:
        self._copier, numbers = self._exporter.copier, self._numbers
        self.outbox = Outbox(self._exporter, self._ring, numbers.has_live, self._drop, self._fail)
        self.reducer = Reducer(self._copier, numbers, self._table)
        self.seen: list[Part] = []
        """What a logit lens made of the running step, which is sent with the rest."""
        self.read: Callable[[Sequence[GroupBlock], int, int, int], list[Part]] | None = None
        """Makes the same of steps that are sent, where it needs no other rank."""
        self.rows_read = 1
        """Rows of which it makes that at once."""
        self._forms: dict[int, Form] = {}
        """By slot: what requests want whose sampled tokens are kept."""
        self._unannounced: dict[str, tuple[int, list[Opening]]] = {}
        self._failed: list[tuple[bytes, Exception]] = []
        """Packed numbers of requests whose rows found no room; they fail as late."""
        self._gone: set[str] = set()
        """Front-ends that take nothing any more, until they are dropped: never while the rows of
        others are under way, which may lie beside theirs."""

    def check(self, reply: str) -> None:
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
            if group.is_live or group.crosses:
                return None
            for result in group.results.values():
                is_combined = result.form is not None and result.form.combine is not None
                if is_combined or result.gates:
                    return None
                if result.lens is not None:
                    if self.read is None:
                        return None
                    # Each product reads the whole unembedding: as many rows as one of them takes.
                    total += len(result.ranks) * block.n_tokens * _MOST_BYTES // self.rows_read
                elif result.readout is None:
                    cut = result.heads
                    each = row_bytes if cut is None else cut.size * self._ring.element_size()
                    total += len(result.ranks) * block.n_tokens * each
        return total

    def send(
        self,
        blocks: Sequence[GroupBlock],
        first_row: int,
        path: EnginePath,
        *,
        steps: int = 1,
        apart: int = 0,
    ) -> None:
        """Send the rows of a step, or of some steps that were the same."""
        with self._dropping():
            # Of a request that failed meanwhile nobody wants the rows, nor is its group there.
            blocks = [b for b in blocks if (self._table.owner[b.slots] >= 0).any()]
            for block in blocks:
                self._send_block(block, first_row + block.base, path, steps, apart)
            seen, self.seen = self.seen, []
            asking = [b for b in blocks if LENS in self._groups[b.group].results]
            if asking and self.read is not None:
                try:
                    seen = self.read(asking, first_row, steps, apart)
                except Exception as error:  # noqa: BLE001 - the boundary: a fault fails its own requests
                    slots = np.concatenate([block.slots for block in asking])
                    self._failed.append((packed(self._numbers.of_slot[slots]), error))
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
            elif result.heads is not None:
                cut = partial(result.heads, ranks=result.ranks)
                made = self._copier.apply(cut, rows).flatten(1, 2)
            elif result.ranks and result.lens is None and not result.gates:
                made = self._copier.taps(rows, result.ranks).flatten(1, 2)
            else:
                continue  # all ranks or gates have read these together, or another stage does
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


_MOST_STEPS = 8
_MOST_BYTES = 16 << 20
"""Of rows that wait: as much as is copied in a third of a millisecond. See `Outbox`: what a step
has sampled may have to wait for that."""


class Rounds:
    """Gives steps their places in the ring, and sends what lies there when a round is over."""

    def __init__(self, ring: Ring, sender: Sender) -> None:
        self._ring = ring
        self._sender = sender
        self._span = Span()
        self._plan: StepPlan | None = None
        """Of the step that all of the round repeat."""
        self._first = 0
        """Steps between that one and the first one of the round."""
        self._length = 0
        """Steps that the round has room for."""
        self._n_begun = self._n_ended = self._n_sent = 0
        """Steps of the round."""
        self._path: EnginePath = "eager"
        """In which those have run that wait."""

    @property
    def slots(self) -> set[int]:
        """Requests of which something may wait."""
        return set() if self._plan is None else self._plan.captured

    def begin(self, plan: StepPlan) -> int:
        """Place a step with a plan of its own."""
        self._plan = plan
        self._start(0, 1)
        return self._span.first_row

    def again(self, done: int, left: int) -> int:
        """Place a step that repeats the one that was planned last."""
        assert self._plan is not None
        if self._n_begun == self._length:
            self._start(done, self._steps_together(self._plan, left + 1))
        else:
            self._n_begun += 1
        return self._span.first_row + (self._n_begun - 1) * self._plan.ring_rows

    def current(self) -> tuple[list[GroupBlock], int]:
        """Blocks of the step that was placed last, and the ring row from which they are counted."""
        plan = self._plan
        if plan is None:
            return [], 0
        done = self._n_begun - 1
        blocks = [_repeated(block, self._first + done, 1) for block in plan.blocks]
        return blocks, self._span.first_row + done * plan.ring_rows

    def end(self, path: EnginePath, *, is_last: bool) -> None:
        """Take note that the step that was placed last has run."""
        if path != self._path:
            self._send()
        self._path, self._n_ended = path, self._n_begun
        if is_last or self._n_begun == self._length:
            self.close()

    def close(self) -> None:
        """Send what waits; the next step begins a round."""
        self._length = self._n_begun
        self._send()
        if self._n_ended == self._n_begun:
            self._release()

    def _start(self, first: int, length: int) -> None:
        assert self._plan is not None
        # Of a step that never ended.
        self._release()
        span = self._ring.take(length * self._plan.ring_rows)
        self._first, self._length, self._span = first, length, span
        self._n_begun, self._n_ended, self._n_sent = 1, 0, 0

    def _release(self) -> None:
        """Give the span back, as soon as all copies out of it have been asked for."""
        if self._span.parts:
            span, self._span = self._span, Span(self._span.first_row)
            self._sender.outbox.then(partial(self._ring.release, span))

    def _steps_together(self, plan: StepPlan, remaining: int) -> int:
        """Steps of a round; the last ones are short, as clients wait for what is copied then."""
        if not plan.ring_rows:
            return 1
        most = min(_MOST_STEPS, (remaining + 1) // 2, self._ring.most_rows // plan.ring_rows)
        if most < 2 or (nbytes := self._sender.bytes_that_wait(plan.blocks)) is None:
            return 1
        return max(1, min(most, _MOST_BYTES // max(nbytes, 1)))

    def _send(self) -> None:
        a, b = self._n_sent, self._n_ended
        if a == b:
            return
        # Taken note of first: what cannot be sent is not tried again.
        self._n_sent = b
        plan = self._plan
        assert plan is not None
        if plan.blocks:
            self._sender.send(
                [_repeated(block, self._first + a, b - a) for block in plan.blocks],
                self._span.first_row + a * plan.ring_rows,
                self._path,
                steps=b - a,
                apart=plan.ring_rows,
            )


def _repeated(block: GroupBlock, done: int, steps: int) -> GroupBlock:
    """A block of one token of each request, so many steps later, and in the steps behind it."""
    if steps == 1 and not done:
        return block
    later = np.arange(done, done + steps)
    return GroupBlock(
        block.group,
        block.base,
        steps * block.n_tokens,
        np.tile(block.slots, steps),
        np.tile(block.counts, steps),
        (later[:, None] + block.first).reshape(-1),
        {},
    )


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive parts of the ring that a step or a few fill; none where no rows are kept."""

    first_row: int = 0
    parts: range = range(0)


_NONE = Span()


class Ring:
    """Hands out spans in turn, and has the device wait for the copies out of them."""

    def __init__(
        self, parts: int, part_rows: int, copier: Copier, drain: Callable[[], None] = lambda: None
    ) -> None:
        self._parts = parts
        self._part_rows = part_rows
        self._half = max(1, parts // 2)
        self._copier = copier
        self._drain = drain
        self._taken: set[int] = set()
        """Parts that were not given back."""
        self._next = 0
        self._released = [0] * parts
        """By part: the number of the span that gave it back last, or 0."""
        self._spans = 0

    @property
    def most_rows(self) -> int:
        return self._half * self._part_rows

    def take(self, rows: int) -> Span:
        """A span for a step or a few, from the next part on, or the next half where it has to."""
        if not rows:
            return _NONE
        n = -(-rows // self._part_rows)
        if n > self._half:
            raise OverflowError(f"a step fills {rows} ring rows and may fill {self.most_rows}")
        first = self._next
        if first % self._half + n > self._half:
            first = (first // self._half + 1) * self._half % self._parts
        self._next = (first + n) % self._parts
        parts = range(first, first + n)
        if not self._taken.isdisjoint(parts):
            self._drain()
        self._taken.update(parts)
        # Copies are made in order: behind those of the part that was given back last there are
        # none out of the others. Of one that never was, there are none at all.
        last = max(parts, key=self._released.__getitem__)
        if self._released[last]:
            self._copier.wait_for(last)
        return Span(first * self._part_rows, parts)

    def release(self, span: Span) -> None:
        """Take a span back when all copies out of it have been asked for."""
        self._spans += 1
        self._taken.difference_update(span.parts)
        for part in span.parts:
            self._copier.release(part)
            self._released[part] = self._spans
