"""From logits to the few numbers that a logit lens returns."""

from __future__ import annotations

from typing import Final

import torch

from inspect_lens._engine.protocol.lens import LensForm

__all__ = ["LOGIT_BYTES", "read_logits", "rows_at_once"]

LOGIT_BYTES: Final = 64 << 20
"""Of the float32 logits of the rows that are read at once."""


def rows_at_once(vocab: int) -> int:
    """Rows whose logits are made at once.

    Args:
        vocab: tokens of the vocabulary.
    """
    return max(1, LOGIT_BYTES // (4 * vocab))


def read_logits(logits: torch.Tensor, form: LensForm) -> torch.Tensor:
    """Read the logits of some rows.

    Args:
        logits: (rows, vocabulary) of any dtype.
        form: what is asked for.

    Returns:
        (rows, columns) float32; see `LensForm.columns`. A log-probability is computed in float32,
        and a rank counts the tokens with a larger logit.
    """
    wide = logits.float()
    total = torch.logsumexp(wide, dim=-1, keepdim=True)
    out = torch.empty(len(wide), form.columns, dtype=torch.float32, device=wide.device)
    k, n = form.top_k, len(form.tokens)
    if k:
        values, ids = torch.topk(wide, k, dim=-1)
        out[:, :k] = ids
        torch.sub(values, total, out=out[:, k : 2 * k])
    for i, token in enumerate(form.tokens):
        # One token at a time: all of them together would need as many times the memory.
        own = wide[:, token, None]
        out[:, 2 * k + i] = (own - total)[:, 0]
        out[:, 2 * k + n + i] = (wide > own).sum(dim=-1)
    return out
