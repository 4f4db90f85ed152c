"""Histories: what a running gate decided at each sampled token of a request, and its average.

A program of the kernel works on one token, and the tokens of a chunk run side by side. So an
average over tokens is taken where they come one by one: over sampled tokens. A chunk holds several
of them only where a request that was pre-empted is computed again, and then all but the last were
decided before. A decision is written once, so they stand. Speculative decoding breaks this, and is
refused.
"""

from __future__ import annotations

import torch

from inspect_lens._engine.protocol.gate_history import (
    AVERAGE,
    COUNT,
    COUNT_SHIFT,
    FIRST,
    HEAD,
    IS_OPEN,
    LAST_SHIFT,
    RECENT,
    RECENT_BITS,
    ROOM,
)
from inspect_lens.spec import N_LATCHES, NEXT_TOKEN, SAME_TOKEN

from .latches import Latches

__all__ = ["decide", "factors"]


def decide(
    vectors: torch.Tensor,
    latches: Latches,
    owners: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    scores: torch.Tensor,
    params: torch.Tensor,
) -> None:
    """Take note of what running gates make of tokens: the definition of what the kernel does.

    Args:
        vectors: (rows, hidden) float32; the table in which histories lie.
        latches: where they lie there, and where front-ends are told.
        owners: (n,) int64 each: records, registers from `SAME_TOKEN` on, and positions; among them
            one token at most of each request and gate that is not decided.
        scores: (n,) float32; what the gates read.
        params: (n, 4) float32; steepness, threshold, the threshold at which it closes, and the
            weight of the newest score.
    """
    records, registers, positions = owners
    slots = (registers - SAME_TOKEN) % N_LATCHES
    flat = vectors.view(-1)
    start = latches.history[records, slots].long() * vectors.shape[1]
    at, is_inside = _place(flat, start, positions)
    new = is_inside & flat[at].isnan()
    if not bool(new.any()):
        return
    start, at, x = start[new], at[new], scores[new]
    a, b, c, weight = params[new].unbind(-1)
    was = flat[start + AVERAGE]
    mean = torch.where(was.isnan(), x, weight * x + (1 - weight) * was)
    mean = torch.where(mean.isnan(), was, mean)
    is_open = (mean > b) | ((flat[start + IS_OPEN] != 0) & (mean >= c))
    step = is_open.to(flat.dtype)
    # NaN would mean that nothing is decided yet.
    flat[at] = torch.where(torch.isinf(a), step, torch.sigmoid(a * (mean - b))).nan_to_num(nan=0.0)
    count = flat[start + COUNT] + step
    recent = (flat[start + RECENT].long() * 2 + is_open) % (1 << RECENT_BITS)
    flat[start + AVERAGE], flat[start + IS_OPEN] = mean, step
    flat[start + COUNT], flat[start + RECENT] = count, recent.to(flat.dtype)
    records, slots, positions = records[new], slots[new], positions[new]
    begins = is_open & (count == 1)
    latches.noted[records[begins], slots[begins]] = positions[begins] + 1
    seen = at - start - HEAD + 1
    note = (seen << LAST_SHIFT) | (count.long() << COUNT_SHIFT) | recent
    latches.noted[records, N_LATCHES + slots] = note


def factors(
    vectors: torch.Tensor,
    latches: Latches,
    records: torch.Tensor,
    registers: torch.Tensor,
    positions: torch.Tensor,
) -> torch.Tensor:
    """What the edits of tokens are multiplied with: what was decided at them, or one before.

    Args:
        vectors: see `decide`.
        latches: see `decide`.
        records: (n,) int64.
        registers: (n,) int64; from `NEXT_TOKEN` on, of gates that decide on the next token.
        positions: (n,) int64.

    Returns:
        (n,) float32; 0 where nothing was decided.
    """
    flat = vectors.view(-1)
    slots = (registers - SAME_TOKEN) % N_LATCHES
    start = latches.history[records, slots].long() * vectors.shape[1]
    at, is_inside = _place(flat, start, positions - (registers >= NEXT_TOKEN).long())
    found = flat[at]
    return torch.where(is_inside & ~found.isnan(), found, torch.zeros_like(found))


def _place(
    flat: torch.Tensor, start: torch.Tensor, positions: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Where the factors of tokens lie, and whether they lie anywhere."""
    index = positions - flat[start + FIRST].long()
    is_inside = (index >= 0) & (index < flat[start + ROOM].long())
    return torch.where(is_inside, start + HEAD + index, start), is_inside
