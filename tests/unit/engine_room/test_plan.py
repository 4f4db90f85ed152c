"""The plan of a step against ten lines of brute force."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from inspect_lens._engine._plan import Batch, CaptureRule, SteerRule, StepPlan, plan_step

SITES = 3
EVERY = 1 << 62


@st.composite
def capture_rules(draw: Any) -> CaptureRule:
    sites = tuple(sorted(draw(st.sets(st.integers(0, SITES - 1), min_size=1))))
    if draw(st.booleans()):
        positions = sorted(draw(st.sets(st.integers(0, 40), min_size=1, max_size=6)))
        return CaptureRule(
            sites, positions[0], positions[-1] + 1, np.asarray(positions, dtype=np.int64)
        )
    lo = draw(st.integers(0, 40))
    return CaptureRule(sites, lo, lo + draw(st.integers(0, 40)), None)


@st.composite
def steer_rules(draw: Any) -> SteerRule:
    sites = tuple(sorted(draw(st.sets(st.integers(0, SITES - 1), min_size=1))))
    every, named = [], []
    last = 0
    for _ in sites:
        every.append(draw(st.integers(0, 3)))
        where = sorted(draw(st.sets(st.integers(0, 40), max_size=5)))
        last = max(last, EVERY if every[-1] else 0, *(p + 1 for p in where), 0)
        rows = [draw(st.integers(1, 9)) for _ in where]
        named.append(
            (np.asarray(where, dtype=np.int64), np.asarray(rows, dtype=np.int32)) if where else None
        )
    return SteerRule(sites, tuple(every), tuple(named), last)


@st.composite
def steps(draw: Any) -> tuple[Batch, dict[str, CaptureRule], dict[str, SteerRule]]:
    n = draw(st.integers(0, 5))
    keys = [f"r{i}" for i in range(n)]
    counts = [draw(st.integers(1, 12)) for _ in keys]
    gaps = [draw(st.integers(0, 3)) for _ in keys]
    offsets = [sum(gaps[: i + 1]) + sum(counts[:i]) for i in range(n)]
    batch = Batch(
        keys=keys,
        offset=np.asarray(offsets, dtype=np.int64),
        n_tokens=np.asarray(counts, dtype=np.int64),
        position=np.asarray([draw(st.integers(0, 30)) for _ in keys], dtype=np.int64),
    )
    capture = {k: draw(capture_rules()) for k in keys if draw(st.booleans())}
    steer = {k: draw(steer_rules()) for k in keys if draw(st.booleans())}
    return batch, capture, steer


def maps(plan: StepPlan, tokens: int) -> tuple[Any, Any]:
    rows = np.zeros((SITES, tokens), dtype=int)
    slots = np.full((SITES, tokens), -1)
    for site, index, values in plan.steer:
        rows[site, index] = values
    for site, index, first in plan.capture:
        slots[site, index] = np.arange(first, first + len(index))
    return rows, slots


@given(steps())
def test_every_token_gets_the_row_and_the_slot_that_its_rules_say(
    step: tuple[Batch, dict[str, CaptureRule], dict[str, SteerRule]],
) -> None:
    batch, capture, steer = step
    total = int((batch.offset + batch.n_tokens).max(initial=0)) + 2
    plan = plan_step(batch, capture, steer, ring_rows=10_000)
    rows, slots = maps(plan, total)
    owner = {
        int(batch.offset[i] + j): (key, int(batch.position[i] + j))
        for i, key in enumerate(batch.keys)
        for j in range(int(batch.n_tokens[i]))
    }
    used: set[int] = set()
    for site in range(SITES):
        for token in range(total):
            key, position = owner.get(token, ("", -1))
            assert rows[site, token] == expected_row(steer.get(key), site, position)
            wanted = is_captured(capture.get(key), site, position)
            assert (slots[site, token] >= 0) == wanted
            if wanted:
                assert place(plan, int(slots[site, token])) == (site, key, position)
                used.add(int(slots[site, token]))
    assert used == set(range(plan.ring_rows))


def expected_row(rule: SteerRule | None, site: int, position: int) -> int:
    if rule is None or site not in rule.sites:
        return 0
    i = rule.sites.index(site)
    named = rule.named[i]
    if named is not None and position in named[0]:
        return int(named[1][list(named[0]).index(position)])
    return rule.every[i]


def is_captured(rule: CaptureRule | None, site: int, position: int) -> bool:
    if rule is None or site not in rule.sites:
        return False
    if rule.positions is not None:
        return position in rule.positions
    return rule.lo <= position < rule.hi


def place(plan: StepPlan, slot: int) -> tuple[int, str, int]:
    """What the block headers say lies in a ring slot."""
    for block in plan.blocks:
        inside = slot - block.base
        if 0 <= inside < len(block.sites) * block.n_tokens:
            rank, token = divmod(inside, block.n_tokens)
            for request in block.requests:
                if request.start <= token < request.start + len(request.positions):
                    where = int(request.positions[token - request.start])
                    return block.sites[rank], request.key, where
    raise AssertionError(slot)


@given(steps())
def test_steered_positions_are_those_with_a_row(
    step: tuple[Batch, dict[str, CaptureRule], dict[str, SteerRule]],
) -> None:
    batch, capture, steer = step
    plan = plan_step(batch, capture, steer, ring_rows=10_000)
    for i, key in enumerate(batch.keys):
        rule = steer.get(key)
        first, count = int(batch.position[i]), int(batch.n_tokens[i])
        expected = [
            p
            for p in range(first, first + count)
            if any(expected_row(rule, site, p) for site in range(SITES))
        ]
        if rule is None or first >= rule.until:
            assert key not in plan.steered
            assert not expected
        else:
            assert plan.steered[key].tolist() == expected


def test_a_step_that_needs_more_rows_than_there_are_is_an_error() -> None:
    batch = Batch(["a"], np.asarray([0]), np.asarray([5]), np.asarray([0]))
    rule = CaptureRule((0, 1), 0, 99, None)
    with pytest.raises(OverflowError, match="10 ring rows"):
        plan_step(batch, {"a": rule}, {}, ring_rows=9)
