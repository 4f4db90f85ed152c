"""The plan of a step against ten lines of brute force."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inspect_lens._engine.plan import Batch, Named, RequestTable, StepPlan, plan_step

TAPS = 3
EVERY = 1 << 62
GROUPS = [np.asarray(g, dtype=np.int64) for g in ([0], [1, 2], [0, 1, 2])]
CONFIG_TAPS = np.asarray([[0, 0, 0], [1, 0, 0], [0, 1, 1], [1, 1, 1]], dtype=np.bool_)


@dataclass
class Rules:
    """What one request wants, as its test states it."""

    group: int | None
    captured: set[int]
    config: int
    named: dict[int, int]

    @property
    def until(self) -> int:
        return EVERY if self.config else max((p + 1 for p in self.named), default=0)

    def config_at(self, position: int) -> int:
        return self.named.get(position, self.config)


@dataclass
class Step:
    batch: Batch
    table: RequestTable
    rules: list[Rules]


@st.composite
def steps(draw: Any) -> Step:
    n = draw(st.integers(0, 5))
    counts = [draw(st.integers(1, 12)) for _ in range(n)]
    gaps = [draw(st.integers(0, 3)) for _ in range(n)]
    offsets = [sum(gaps[: i + 1]) + sum(counts[:i]) for i in range(n)]
    positions = [draw(st.integers(0, 30)) for _ in range(n)]
    table = RequestTable(capacity=2)
    rules, slots = [], []
    for _ in range(n):
        slots.append(table.take())
        rules.append(draw(requests(table, slots[-1])))
    arrays = (np.asarray(a, dtype=np.int64) for a in (slots, offsets, counts, positions))
    return Step(Batch(*arrays), table, rules)


@st.composite
def requests(draw: Any, table: RequestTable, slot: int) -> Rules:
    group, captured = None, set()
    if draw(st.booleans()):
        group = draw(st.integers(0, len(GROUPS) - 1))
        table.group[slot] = group
        if draw(st.booleans()):
            captured = draw(st.sets(st.integers(0, 40), min_size=1, max_size=6))
            table.listed[slot] = np.asarray(sorted(captured), dtype=np.int64)
            table.lo[slot], table.hi[slot] = min(captured), max(captured) + 1
        else:
            lo = draw(st.integers(0, 40))
            hi = lo + draw(st.integers(0, 40))
            captured = set(range(lo, hi))
            table.lo[slot], table.hi[slot] = lo, hi
    named = draw(st.dictionaries(st.integers(0, 40), st.integers(1, 3), max_size=5))
    rules = Rules(group, captured, draw(st.integers(0, 3)), named)
    table.config[slot], table.until[slot] = rules.config, rules.until
    table.record[slot] = 1000 + slot
    if named:
        where = sorted(named)
        table.named[slot] = Named(
            np.asarray(where, dtype=np.int64),
            np.asarray([named[p] for p in where], dtype=np.int32),
        )
    return rules


def plan_of(step: Step, **options: Any) -> StepPlan:
    options = {"ring_rows": 10_000} | options
    return plan_step(step.batch, step.table, GROUPS, CONFIG_TAPS, **options)


def owners(batch: Batch) -> dict[int, tuple[int, int]]:
    """Request and position of each token of the step."""
    return {
        int(batch.offset[i] + j): (i, int(batch.position[i] + j))
        for i in range(len(batch.slots))
        for j in range(int(batch.n_tokens[i]))
    }


@settings(deadline=None)
@given(steps())
def test_every_token_gets_the_configuration_that_its_request_names(step: Step) -> None:
    plan = plan_of(step)
    owner = owners(step.batch)
    steers = np.zeros(TAPS, dtype=bool)
    for token in range(len(plan.tokens)):
        config = 0
        if token in owner:
            i, position = owner[token]
            config = step.rules[i].config_at(position)
        assert plan.tokens[token, 0] == config
        if config:
            assert plan.tokens[token, 3] == 1000 + int(step.batch.slots[i]), "a fault is its own"
            assert plan.tokens[token, 4] == position
        steers |= CONFIG_TAPS[config]
    # A tap may be told that it steers where no token of this step needs it; never the reverse.
    assert (plan.steers | ~steers).all()
    steered = {i for i, rule in enumerate(step.rules) if int(step.batch.position[i]) < rule.until}
    assert set(plan.steered.slots.tolist()) == {int(step.batch.slots[i]) for i in steered}


@settings(deadline=None)
@given(steps())
def test_every_captured_token_has_a_ring_row_that_the_blocks_explain(step: Step) -> None:
    plan = plan_of(step)
    owner = owners(step.batch)
    used: set[int] = set()
    captures = np.zeros(TAPS, dtype=bool)
    for token in range(len(plan.tokens)):
        i, position = owner.get(token, (-1, -1))
        rules = step.rules[i] if i >= 0 else None
        wanted = rules is not None and rules.group is not None and position in rules.captured
        assert (plan.tokens[token, 1] >= 0) == wanted
        if not wanted:
            continue
        assert rules is not None
        assert rules.group is not None
        for tap in range(TAPS):
            base = int(plan.base[plan.tokens[token, 1], tap])
            assert (base >= 0) == (tap in GROUPS[rules.group])
            if base >= 0:
                row = base + int(plan.tokens[token, 2])
                assert explain(plan, row) == (tap, int(step.batch.slots[i]), position)
                used.add(row)
                captures[tap] = True
    assert used == set(range(plan.ring_rows))
    assert (plan.captures == captures).all()


def explain(plan: StepPlan, row: int) -> tuple[int, int, int]:
    """Tap, request and position that the blocks claim for a ring row."""
    for block in plan.blocks:
        taps = GROUPS[block.group]
        inside = row - block.base
        if 0 <= inside < len(taps) * block.n_tokens:
            rank, token = divmod(inside, block.n_tokens)
            ends = np.cumsum(block.counts)
            k = int(np.searchsorted(ends, token, side="right"))
            nth = token - int(ends[k] - block.counts[k])
            position = block.listed[k][nth] if k in block.listed else block.first[k] + nth
            return int(taps[rank]), int(block.slots[k]), int(position)
    raise AssertionError(row)


@settings(deadline=None)
@given(steps(), st.lists(st.integers(1, 4), min_size=TAPS, max_size=TAPS))
def test_every_part_of_a_wide_row_has_a_ring_row_of_its_own(step: Step, parts: list[int]) -> None:
    tap_rows = np.asarray(parts, dtype=np.int64)
    plan = plan_of(step, tap_rows=tap_rows)
    used = []
    for token in plan.tokens[plan.tokens[:, 1] >= 0]:
        local, place = int(token[1]), int(token[2])
        apart = int(plan.base[local, -1])
        block = plan.blocks[local]
        group = GROUPS[block.group]
        assert apart == block.n_tokens
        # In the order in which the block is sent: by tap, by part, by token.
        rows = [
            int(plan.base[local, t]) + p * apart + place for t in group for p in range(parts[t])
        ]
        assert rows == [block.base + i * apart + place for i in range(len(rows))]
        used += rows
    assert sorted(used) == list(range(plan.ring_rows))


def test_a_step_that_needs_more_rows_than_there_are_is_an_error() -> None:
    table = RequestTable()
    slot = table.take()
    table.group[slot], table.hi[slot] = 1, 99
    one = (np.asarray([v], dtype=np.int64) for v in (slot, 0, 5, 0))
    with pytest.raises(OverflowError, match="10 ring rows"):
        plan_of(Step(Batch(*one), table, []), ring_rows=9)


def test_a_slot_that_was_given_back_wants_nothing() -> None:
    table = RequestTable(capacity=1)
    slot = table.take()
    table.group[slot], table.config[slot], table.until[slot] = 1, 2, 9
    table.listed[slot] = np.zeros(1, dtype=np.int64)
    table.give(slot)
    again = {table.take() for _ in range(5)}
    assert len(again) == 5
    assert (table.group[list(again)] == -1).all()
    assert not table.until[list(again)].any()
    assert not table.listed
