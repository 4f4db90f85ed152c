"""What one step does, worked out from the batch layout. Pure numpy, no torch, no state.

Per tapped site and token two numbers are needed: the steering row to apply (0: none) and the
ring slot to write (-1: none). Requests that capture the same layers form a group; a group's
rows lie in the ring as one block (layers, tokens, hidden), so that a step leaves the device in
one contiguous copy per group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "Batch",
    "CaptureRule",
    "GroupBlock",
    "RequestRows",
    "SteerRule",
    "StepPlan",
    "plan_step",
]

Ints = NDArray[np.int32]
Longs = NDArray[np.int64]


@dataclass(frozen=True)
class CaptureRule:
    """Which rows of a request are captured."""

    sites: tuple[int, ...]
    """Indices of tapped sites, ascending by layer."""
    lo: int
    hi: int
    positions: Longs | None
    """Sorted explicit positions, or None for all of [lo, hi)."""


@dataclass(frozen=True)
class SteerRule:
    """Which steering row each token of a request gets, per site."""

    sites: tuple[int, ...]
    """Indices of tapped sites."""
    every: tuple[int, ...]
    """Row for tokens that are not named, one per site; 0 for none."""
    named: tuple[tuple[Longs, Ints] | None, ...]
    """Per site: sorted positions and their rows, or None."""
    until: int
    """One past the last position that any site steers; large when every token is."""


@dataclass(frozen=True)
class Batch:
    """The layout of one step, for the requests that use the lens only.

    All arrays are parallel, one entry per request, in batch order.
    """

    keys: Sequence[str]
    offset: Longs
    """Index of the request's first token in the step."""
    n_tokens: Longs
    """Tokens of the request in this step."""
    position: Longs
    """Absolute position of the request's first token of this step."""


@dataclass(frozen=True)
class RequestRows:
    """A request's share of a group block."""

    key: str
    start: int
    """Index of its first token within the block."""
    positions: Longs
    """Absolute positions of its tokens."""


@dataclass(frozen=True)
class GroupBlock:
    """Rows of all requests that capture the same sites."""

    sites: tuple[int, ...]
    base: int
    """First ring slot."""
    n_tokens: int
    requests: tuple[RequestRows, ...]


@dataclass(frozen=True)
class StepPlan:
    """The maps of one step and where its rows will lie."""

    steer: list[tuple[int, Longs, Ints]]
    """(site, token indices, rows)."""
    capture: list[tuple[int, Longs, int]]
    """(site, token indices, first ring slot); slots are consecutive."""
    blocks: list[GroupBlock]
    steered: dict[str, Longs]
    """Positions steered in this step, per request that is not past its last one."""
    ring_rows: int
    """Ring rows that the step fills."""


def plan_step(
    batch: Batch,
    capture: dict[str, CaptureRule],
    steer: dict[str, SteerRule],
    *,
    ring_rows: int,
    first_row: int = 0,
) -> StepPlan:
    """Work out one step.

    Args:
        batch: the requests of the step that use the lens.
        capture: rules by request key.
        steer: rules by request key.
        ring_rows: ring rows that the step may fill.
        first_row: the first of them.

    Returns:
        The plan.

    Raises:
        OverflowError: the step needs more ring rows than there are. The front-end's limits
            make that impossible, so it is a bug where it happens.
    """
    steer_writes: list[tuple[int, Longs, Ints]] = []
    steered: dict[str, Longs] = {}
    groups: dict[tuple[int, ...], list[tuple[str, int, Longs]]] = {}
    for i, key in enumerate(batch.keys):
        offset, count, position = (
            int(batch.offset[i]),
            int(batch.n_tokens[i]),
            int(batch.position[i]),
        )
        if (rule := steer.get(key)) is not None and position < rule.until:
            steered[key] = _plan_steer(rule, offset, count, position, steer_writes)
        if (wanted := capture.get(key)) is not None:
            positions = _captured_positions(wanted, position, count)
            if len(positions):
                groups.setdefault(wanted.sites, []).append((key, offset - position, positions))
    capture_writes, blocks, used = _plan_groups(groups, first_row)
    if used > ring_rows:
        raise OverflowError(f"a step needs {used} ring rows and there are {ring_rows}")
    return StepPlan(steer_writes, capture_writes, blocks, steered, used)


def _plan_steer(
    rule: SteerRule,
    offset: int,
    count: int,
    position: int,
    writes: list[tuple[int, Longs, Ints]],
) -> Longs:
    touched = np.zeros(count, dtype=bool)
    for site, every, named in zip(rule.sites, rule.every, rule.named, strict=True):
        rows = np.full(count, every, dtype=np.int32)
        if named is not None:
            positions, named_rows = named
            a, b = np.searchsorted(positions, (position, position + count))
            rows[positions[a:b] - position] = named_rows[a:b]
        (index,) = rows.nonzero()
        if len(index):
            writes.append((site, index + offset, rows[index]))
            touched[index] = True
    return touched.nonzero()[0] + position


def _captured_positions(rule: CaptureRule, position: int, count: int) -> Longs:
    if rule.positions is not None:
        a, b = np.searchsorted(rule.positions, (position, position + count))
        return rule.positions[a:b]
    return np.arange(max(rule.lo, position), max(0, min(rule.hi, position + count)), dtype=np.int64)


def _plan_groups(
    groups: dict[tuple[int, ...], list[tuple[str, int, Longs]]],
    first_row: int,
) -> tuple[list[tuple[int, Longs, int]], list[GroupBlock], int]:
    writes: list[tuple[int, Longs, int]] = []
    blocks: list[GroupBlock] = []
    base = first_row
    for sites, members in groups.items():
        tokens = np.concatenate([positions + shift for _, shift, positions in members])
        requests: list[RequestRows] = []
        start = 0
        for key, _, positions in members:
            requests.append(RequestRows(key, start, positions))
            start += len(positions)
        for rank, site in enumerate(sites):
            writes.append((site, tokens, base + rank * start))
        blocks.append(GroupBlock(sites, base, start, tuple(requests)))
        base += len(sites) * start
    return writes, blocks, base - first_row
