"""A worker whose taps are not as wide as the stream, with edits in its table."""

from __future__ import annotations

import torch

from inspect_lens._engine.protocol.messages import Envelope, seal
from inspect_lens._engine.protocol.readouts import share_of
from inspect_lens._engine.tap.buffers import TapState
from inspect_lens._engine.tap.edit_table import Bank
from inspect_lens.spec import (
    EditBase,
    EngineFacts,
    LensRequest,
    Site,
    SiteWidth,
    check_request,
    rows_for,
)
from tests.kit.facts import engine_facts

__all__ = ["admitted_at", "wide_facts", "wide_state"]

LAYERS = (0, 1, 2)


def wide_facts(site: Site, width: int, heads: int, row: int, ranks: int = 1) -> EngineFacts:
    """Three layers with a tap at a site; ranks share its rows."""
    return engine_facts(
        n_layers=3, hidden=row, layers=LAYERS, sites=(site,), ring_rows=512, bank_rows=512,
        widths=(SiteWidth(site, width, ranks, heads),), ranks=ranks,
    )  # fmt: skip


def wide_state(
    facts: EngineFacts, dtype: torch.dtype, device: torch.device, rank: int = 0
) -> TapState:
    """Buffers of one rank of such an engine."""
    (width,) = facts.widths
    return TapState(
        taps=facts.taps,
        hidden=facts.hidden,
        dtype=dtype,
        max_tokens=16,
        max_groups=2,
        ring_rows=64,
        bank_rows=facts.bank_rows,
        device=device,
        tap_rows=[rows_for(width, facts.hidden)] * len(facts.taps),
        shares=[share_of(width, facts.ranks, rank)] * len(facts.taps),
    )


def admitted_at(edit: EditBase, facts: EngineFacts, state: TapState) -> int:
    """Put an edit of all tokens, or of all sampled ones, into the table; returns its row there."""
    request = LensRequest(edits=[edit])
    check_request(request, facts)
    envelope = Envelope.unpack(
        dict(seal(request, facts, reply="", n_prompt=4, max_tokens=4).pack())
    )
    bank = Bank(state.bank, state.shares)
    steering = bank.admit(envelope, {tap: i for i, tap in enumerate(state.taps)})
    bank.flush()
    return steering.config if steering.named is None else steering.named.behind
