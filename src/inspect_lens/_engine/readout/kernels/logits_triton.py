"""What a lens needs of long rows of logits as one Triton kernel, which reads them once.

PyTorch would make them float32 first, and go over that six times: at a thousand rows, this takes
longer than the product that made them.
"""

# A kernel's body is Triton's language and not Python's.
# mypy: disable-error-code="attr-defined, no-untyped-def, untyped-decorator"

from __future__ import annotations

from typing import Any, Final

import torch
import triton
import triton.language as tl

_BLOCK: Final = 4096
_SHARES: Final = 8
"""Of a row, each read by a program of its own: a few rows fill no GPU."""


@triton.jit
def _scan(
    logits,
    peaks,
    totals,
    stride,
    VOCAB: tl.constexpr,
    PIECES: tl.constexpr,
    SHARE: tl.constexpr,
    BLOCK: tl.constexpr,
    PIECE: tl.constexpr,
):
    row, share = tl.program_id(0).to(tl.int64), tl.program_id(1)
    piece = tl.arange(0, BLOCK // PIECE)
    inside = piece[:, None] * PIECE + tl.arange(0, PIECE)[None, :]
    largest = tl.full((), -float("inf"), tl.float32)
    total = tl.zeros((), tl.float32)
    for begin in range(share * SHARE, tl.minimum((share + 1) * SHARE, VOCAB), BLOCK):
        at = begin + inside
        x = tl.load(logits + row * stride + at, mask=at < VOCAB, other=-float("inf"))
        x = x.to(tl.float32)
        peak = tl.max(x, axis=1)
        number = begin // PIECE + piece
        tl.store(peaks + row * PIECES + number, peak, mask=number < PIECES)
        larger = tl.maximum(largest, tl.max(peak, axis=0))
        # What is infinite is no point to count from.
        base = tl.where(tl.abs(larger) == float("inf"), 0.0, larger)
        total = total * tl.exp(largest - base) + tl.sum(tl.sum(tl.exp(x - base), axis=1), axis=0)
        largest = larger
    base = tl.where(tl.abs(largest) == float("inf"), 0.0, largest)
    tl.store(totals + row * tl.num_programs(1) + share, tl.log(total) + base)


def launch(logits: torch.Tensor, piece: int) -> tuple[torch.Tensor, torch.Tensor]:
    rows, vocab = logits.shape
    pieces = vocab // piece
    peaks = torch.empty(rows, pieces, dtype=torch.float32, device=logits.device)
    totals = torch.empty(rows, _SHARES, dtype=torch.float32, device=logits.device)
    kernel: Any = _scan
    kernel[(rows, _SHARES)](
        logits,
        peaks,
        totals,
        logits.stride(0),
        VOCAB=vocab,
        PIECES=pieces,
        SHARE=-(-vocab // (_SHARES * _BLOCK)) * _BLOCK,
        BLOCK=_BLOCK,
        PIECE=piece,
        num_warps=4,
    )
    return peaks, totals
