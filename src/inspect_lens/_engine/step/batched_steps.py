"""Rounds of steps that repeat: what they leave in the ring is sent together, a few steps at once.

To ask a GPU for a copy, and to tell a front-end of it, costs the step loop's thread more than all
else that a repeated step takes, whatever the size. Nobody looks at most rows before their request
is over, so those of a few steps wait in the ring, side by side, for one copy and one message. They
are sent before anything else changes: when somebody comes or goes, or a step is planned anew.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from inspect_lens._engine.export.device_copy import Copier
from inspect_lens._engine.plan.step_plan import GroupBlock, StepPlan
from inspect_lens.spec import EnginePath

from .exporter import Sender

_MOST_STEPS = 8
_MOST_BYTES = 16 << 20
"""Of rows that wait: as much as is copied in a third of a millisecond. See `Outbox`: what a step
has sampled may have to wait for that."""


class Rounds:
    """Gives steps their places in the ring, and sends what lies there when a round is over."""

    def __init__(self, ring: Ring, sender: Sender) -> None:
        """Begin with nothing."""
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
        """Rows of the largest span."""
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
