"""What one step does, worked out from the batch layout: numpy only, no loop over requests.

Each token of a step gets five numbers, alike for all taps: the steering configuration to apply
(0: none), the capture group it belongs to (-1: none), its place within the group's block, the
record of its request, where a tap notes that it could not steer the token or that a gate fired,
and the position.
What a configuration or a group means at one tap stands in small tables beside them. Requests that
want rows of the same taps form a group; a group's rows lie in the ring as one block
(rows of a token, tokens, hidden), which leaves the device in one contiguous copy. A token has a row
at each tap, and more of them where a tap is wider than the stream: the parts of its row, in order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int32]
Longs = NDArray[np.int64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True)
class Batch:
    """The layout of one step, for the requests that use the lens only.

    All arrays are parallel, one entry per request, in batch order.
    """

    slots: Longs
    """The request's row in the `RequestTable`."""
    offset: Longs
    """Index of the request's first token in the step."""
    n_tokens: Longs
    """Tokens of the request in this step."""
    position: Longs
    """Absolute position of the request's first token of this step."""

    def take(self, index: NDArray[Any]) -> Batch:
        return Batch(
            self.slots[index], self.offset[index], self.n_tokens[index], self.position[index]
        )


@dataclass(frozen=True)
class Named:
    """Tokens of a request that are steered by position or phase."""

    positions: Longs
    """Sorted."""
    configs: Ints
    """Steering configuration of each."""
    edge: int = 0
    """Where another phase begins, or 0."""
    behind: int = 0
    """Steering configuration of tokens from there on that nothing names."""


_COLUMNS = {
    "group": -1, "lo": 0, "hi": 0, "config": 0, "record": 0, "n_prompt": 0, "owner": -1, "until": 0,
}  # fmt: skip
"""Arrays of the table, and what they hold for a slot that nobody has."""


class RequestTable:
    """What the plan has to know of each live request, as parallel arrays."""

    def __init__(self, capacity: int = 256) -> None:
        self.group: Ints = np.full(capacity, -1, dtype=np.int32)
        """Capture group, or -1."""
        self.lo: Longs = np.zeros(capacity, dtype=np.int64)
        self.hi: Longs = np.zeros(capacity, dtype=np.int64)
        """Captured positions are those of [lo, hi), or the listed ones within."""
        self.config: Ints = np.zeros(capacity, dtype=np.int32)
        """Steering configuration of tokens that nothing names."""
        self.record: Ints = np.zeros(capacity, dtype=np.int32)
        """Board record of a request that is steered."""
        self.n_prompt: Longs = np.zeros(capacity, dtype=np.int64)
        self.owner: Longs = np.full(capacity, -1, dtype=np.int64)
        """Index of the request's front-end in `replies`, or -1."""
        self.replies: list[str] = []
        """Addresses of front-ends: as many as processes that sent requests, which stay known."""
        self.until: Longs = np.zeros(capacity, dtype=np.int64)
        """One past the last steered position; 0 for a request that does not steer."""
        self.listed: dict[int, Longs] = {}
        """Sorted explicit positions of requests that capture some."""
        self.named: dict[int, Named] = {}
        """Of requests that steer some positions differently."""
        self.latched: set[int] = set()
        """Requests with gates whose decisions last, so that taps have to know the positions."""
        self.by_id: set[int] = set()
        """Requests with edits of sampled tokens that have some ids."""
        self.spliced: set[int] = set()
        """Requests that put an autoencoder into the stream."""
        self._free = list(range(capacity - 1, -1, -1))

    def take(self) -> int:
        """A slot that captures and steers nothing."""
        if not self._free:
            size = len(self.group)
            for name, fill in _COLUMNS.items():
                column = getattr(self, name)
                setattr(self, name, np.concatenate([column, np.full_like(column, fill)]))
            self._free = list(range(2 * size - 1, size - 1, -1))
        return self._free.pop()

    def set_owner(self, slots: Longs, reply: str) -> None:
        """Note whose requests some slots have."""
        if reply not in self.replies:
            self.replies.append(reply)
        self.owner[slots] = self.replies.index(reply)

    def reply_of(self, slot: int) -> str | None:
        """Address of the front-end of a slot's request; None where there is none."""
        index = int(self.owner[slot])
        return None if index < 0 else self.replies[index]

    def give(self, slot: int) -> None:
        """Clear a slot and give it back."""
        self.group[slot] = self.owner[slot] = -1
        self.config[slot] = self.until[slot] = 0
        self.listed.pop(slot, None)
        self.named.pop(slot, None)
        self.latched.discard(slot)
        self.by_id.discard(slot)
        self.spliced.discard(slot)
        self._free.append(slot)


@dataclass(frozen=True)
class GroupBlock:
    """Rows of all requests that belong to one group: (rows of a token, tokens)."""

    group: int
    base: int
    """First row, counted from where the step's rows begin."""
    n_tokens: int
    slots: Longs
    """Requests, in the order of their rows."""
    counts: Longs
    """Rows of each request at each tap."""
    first: Longs
    """Position of each request's first row."""
    listed: dict[int, Longs]
    """By index in `slots`: the positions, where they need not be consecutive."""


@dataclass(frozen=True)
class StepPlan:
    """The maps of one step and where its rows will lie."""

    tokens: Ints
    """(tokens, 5): steering configuration, capture group of this step, place in its block, and, of
    requests that are steered, the board record and the position."""
    base: Ints
    """(groups of this step, taps + 1): row of the first token at a tap, counted from where the
    step's rows begin, -1 for no capture; and last, how far the parts of a wide row lie apart."""
    steers: Bools
    """(taps,): whether the step steers there."""
    captures: Bools
    """(taps,): whether the step captures there."""
    blocks: list[GroupBlock]
    """One per group of this step."""
    steered: Batch
    """Requests of the step that are not past their last steered position."""
    ring_rows: int
    """Ring rows that the step fills."""

    @property
    def is_active(self) -> bool:
        """Whether any tap has something to do, or a row has a place."""
        return bool(self.blocks or self.steers.any())

    @property
    def captured(self) -> set[int]:
        """Slots of requests whose rows are kept."""
        return {slot for block in self.blocks for slot in block.slots.tolist()}


def plan_step(
    batch: Batch,
    table: RequestTable,
    group_taps: list[Longs],
    config_taps: Bools,
    *,
    ring_rows: int,
    tap_rows: Longs | None = None,
) -> StepPlan:
    n = int((batch.offset + batch.n_tokens).max(initial=0))
    tokens = np.empty((n, 5), dtype=np.int32)
    tokens[:, 0], tokens[:, 1], tokens[:, 3:] = 0, -1, 0
    steered = batch.take(np.flatnonzero(batch.position < table.until[batch.slots]))
    steers = _steer(steered, table, tokens, config_taps)
    if tap_rows is None:
        tap_rows = np.ones(config_taps.shape[1], dtype=np.int64)
    blocks, base, used = _capture(batch, table, tokens, group_taps, tap_rows)
    if used > ring_rows:
        raise OverflowError(f"a step needs {used} ring rows and there are {ring_rows}")
    if (n_taps := config_taps.shape[1]) < len(tap_rows):
        # Rows of taps of other stages are not this one's to write.
        base = np.delete(base, np.s_[n_taps:-1], axis=1)
    captures: Bools = np.logical_or.reduce(base[:, :-1] >= 0, axis=0)
    return StepPlan(tokens, base, steers, captures, blocks, steered, used)


def _steer(steered: Batch, table: RequestTable, tokens: Ints, config_taps: Bools) -> Bools:
    if not len(steered.slots):
        return np.zeros(config_taps.shape[1], dtype=np.bool_)
    configs = table.config[steered.slots]
    index = _expand(steered.offset, steered.n_tokens)
    tokens[index, 0] = np.repeat(configs, steered.n_tokens)
    tokens[index, 3] = np.repeat(table.record[steered.slots], steered.n_tokens)
    tokens[index, 4] = index + np.repeat(steered.position - steered.offset, steered.n_tokens)
    used = [configs]
    if table.named:
        for i, slot in enumerate(steered.slots.tolist()):
            named = table.named.get(slot)
            if named is None:
                continue
            position = int(steered.position[i])
            stop = position + int(steered.n_tokens[i])
            if 0 < named.edge < stop:
                shift = int(steered.offset[i]) - position
                tokens[max(named.edge, position) + shift : stop + shift, 0] = named.behind
                used.append(np.asarray([named.behind], dtype=np.int32))
            a, b = named.positions.searchsorted((position, stop))
            tokens[named.positions[a:b] + (int(steered.offset[i]) - position), 0] = named.configs[
                a:b
            ]
            used.append(named.configs[a:b])
    steers: Bools = np.logical_or.reduce(config_taps[np.unique(np.concatenate(used))], axis=0)
    return steers


def _capture(
    batch: Batch, table: RequestTable, tokens: Ints, group_taps: list[Longs], tap_rows: Longs
) -> tuple[list[GroupBlock], Ints, int]:
    group = table.group[batch.slots]
    start = np.maximum(table.lo[batch.slots], batch.position)
    stop = np.minimum(table.hi[batch.slots], batch.position + batch.n_tokens)
    counts = np.where(group >= 0, np.maximum(stop - start, 0), 0)
    listed: dict[int, Longs] = {}
    if table.listed:
        for i, slot in enumerate(batch.slots.tolist()):
            if (positions := table.listed.get(slot)) is not None and counts[i]:
                a, b = positions.searchsorted((start[i], stop[i]))
                listed[i], counts[i] = positions[a:b], b - a
    present = np.unique(group[counts > 0])
    base = np.full((len(present), len(tap_rows) + 1), -1, dtype=np.int32)
    blocks: list[GroupBlock] = []
    first_row = 0
    for local, gid in enumerate(present.tolist()):
        members = np.flatnonzero((group == gid) & (counts > 0))
        mine = counts[members]
        total = int(mine.sum())
        shift = batch.offset[members] - batch.position[members]
        index = _expand(start[members] + shift, mine)
        own = {k: listed[i] for k, i in enumerate(members.tolist()) if i in listed}
        if own:
            ends = np.cumsum(mine)
            for k, positions in own.items():
                index[ends[k] - mine[k] : ends[k]] = positions + shift[k]
        tokens[index, 1] = local
        tokens[index, 2] = np.arange(total, dtype=np.int32)
        taps = group_taps[gid]
        behind = np.cumsum(tap_rows[taps])
        base[local, taps] = first_row + (behind - tap_rows[taps]) * total
        base[local, -1] = total
        blocks.append(
            GroupBlock(gid, first_row, total, batch.slots[members], mine, start[members], own)
        )
        first_row += int(behind[-1]) * total
    return blocks, base, first_row


def _expand(first: Longs, counts: Longs) -> Longs:
    """first[0], first[0]+1, … for counts[0] entries, then the same for the next."""
    total = int(counts.sum())
    if total == len(counts) and (counts == 1).all():
        return first.copy()
    ends = np.cumsum(counts)
    index: Longs = np.arange(total, dtype=np.int64) + np.repeat(first - (ends - counts), counts)
    return index


def grown(values: Longs, slots: Longs, fill: int = 0) -> Longs:
    """A table that has these slots: itself, or a longer one with the same values."""
    if (n := int(slots.max()) + 1) <= len(values):
        return values
    return np.concatenate([values, np.full(max(n - len(values), len(values)), fill)])


@dataclass
class _Request:
    n_prompt: int
    """Prompt tokens are never drafts."""
    until: int
    """Up to where it has to be reported."""
    reported: int = 0


class Drafts:
    """The requests of one worker that may be fed drafts, by slot."""

    def __init__(self) -> None:
        self._requests: dict[int, _Request] = {}
        self.running: dict[int, int] = {}
        """By slot: one past the last position that the running step settles."""

    def add(self, slot: int, n_prompt: int, until: int) -> None:
        self._requests[slot] = _Request(n_prompt, until)

    def remove(self, slot: int) -> None:
        """Forget a request; one that is not followed is fine."""
        self._requests.pop(slot, None)

    def begin(self, batch: Batch, is_drafted: Callable[[int], bool] = lambda slot: True) -> None:
        """Work out what a step settles, for requests that still have to report."""
        self.running = {}
        if not self._requests:
            return
        for i, slot in enumerate(batch.slots.tolist()):
            request = self._requests.get(slot)
            if request is not None and request.reported < request.until:
                position = int(batch.position[i])
                end = position + int(batch.n_tokens[i])
                first = position + 1 if is_drafted(slot) else end
                self.running[slot] = min(end, max(first, request.n_prompt))
                request.reported = self.running[slot]


@dataclass
class Repeat:
    """The last step's plan, for as long as the steps that follow are the same one token later."""

    keys: list[str]
    """Requests of the whole step, in batch order."""
    position: Longs
    """Of the token that each of them fed last."""
    left: int
    """Steps for which nobody enters or leaves what is captured or steered."""
    plan: StepPlan
    done: int = 0
    """Steps that were the same."""

    @classmethod
    def of(
        cls,
        plan: StepPlan,
        batch: Batch,
        table: RequestTable,
        *,
        keys: Sequence[str],
        n_tokens: NDArray[Any],
        position: NDArray[Any],
    ) -> Self | None:
        """What follows a step; None where the next one needs a plan of its own in any case."""
        if not plan.is_active or not (n_tokens == 1).all():
            return None
        left = _steps_left(batch, table)
        if left < 1:
            return None
        at = np.array(position, dtype=np.int64)
        return cls(list(keys), at, left, plan)

    def continues(
        self, keys: Sequence[str], n_tokens: NDArray[Any], position: NDArray[Any]
    ) -> bool:
        """Whether a step is the last one, a token later."""
        return (
            self.left > 0
            and self.keys == keys
            and bool((n_tokens == 1).all())
            and bool((position == self.position + 1).all())
        )

    def advance(self) -> Batch:
        """Go on by the step that continues; returns the steered requests of that."""
        self.left -= 1
        self.done += 1
        self.position += 1
        was = self.plan.steered
        if not len(was.slots):
            return was
        return Batch(was.slots, was.offset, was.n_tokens, was.position + self.done)


def _steps_left(batch: Batch, table: RequestTable) -> int:
    """Steps of one token each until a request begins or ends to be captured or steered."""
    at = batch.position
    for wanted in (table.listed, table.named):
        if wanted and _any_ahead(batch, wanted):
            return 0
    slots = batch.slots
    far = np.iinfo(np.int64).max
    lo, hi, until = table.lo[slots], table.hi[slots], table.until[slots]
    capture = np.where(at < lo, lo - at, np.where(at < hi, hi - at, far))
    capture = np.where(table.group[slots] >= 0, capture, far)
    steer = np.where(at < until, until - at, far)
    return int(np.minimum(capture, steer).min(initial=far)) - 1


def _any_ahead(batch: Batch, wanted: dict[int, Any]) -> bool:
    """Whether a request names positions, or has a phase, that it has not passed."""
    for slot, at in zip(batch.slots.tolist(), batch.position.tolist(), strict=True):
        named = wanted.get(slot)
        if isinstance(named, Named):
            if named.edge > at:
                return True
            named = named.positions
        if named is not None and len(named) and named[-1] >= at:
            return True
    return False
