"""From logits to the few numbers that a logit lens returns."""

from __future__ import annotations

from typing import Final

import torch

from inspect_lens._engine.protocol.lens import LensForm

__all__ = ["LOGIT_BYTES", "read_logits", "rows_at_once"]

LOGIT_BYTES: Final = 256 << 20
"""Of the float32 logits of rows read at once. More pieces read the matrix more often."""
_PIECE: Final = 256
"""Logits whose largest stands for all of them, at first."""


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
        values, ids = _largest(wide, k)
        out[:, :k] = ids
        torch.sub(values, total, out=out[:, k : 2 * k])
    for i, token in enumerate(form.tokens):
        # One token at a time: all of them together would need as many times the memory.
        own = wide[:, token, None]
        out[:, 2 * k + i] = (own - total)[:, 0]
        out[:, 2 * k + n + i] = (wide > own).sum(dim=-1)
    return out


def _largest(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`torch.topk` of long rows, which it would read several times.

    The k largest lie in the k pieces with the largest maxima, or in what is left behind the last
    whole piece. Where these are more than a quarter of the row, it is no saving.
    """
    n_pieces = logits.shape[1] // _PIECE
    if n_pieces < 4 * k:
        return torch.topk(logits, k, dim=-1)
    pieces = logits[:, : n_pieces * _PIECE].view(len(logits), n_pieces, _PIECE)
    chosen = torch.topk(pieces.amax(dim=-1), k, dim=-1).indices
    inside = torch.arange(_PIECE, device=logits.device)
    ids = (chosen[:, :, None] * _PIECE + inside).flatten(1)
    rest = torch.arange(n_pieces * _PIECE, logits.shape[1], device=logits.device)
    ids = torch.cat([ids, rest.expand(len(logits), -1)], dim=1)
    values, at = torch.topk(logits.gather(1, ids), k, dim=-1)
    return values, ids.gather(1, at)
