"""Rows times weights as one Triton kernel, which reads rows once and in the dtype they have.

PyTorch would need them in float32, in another order and contiguous first: twice the bytes, written
and read again.
"""

# A kernel's body is Triton's language and not Python's.
# mypy: disable-error-code="attr-defined, no-untyped-def, untyped-decorator"

from __future__ import annotations

from typing import Any, Final

import torch
import triton
import triton.language as tl

_TOKENS: Final = 64
_INNER: Final = 64
_NARROW, WIDE = 16, 64
"""Columns of a tile: two sizes, so that nothing has to be compiled while requests run."""


@triton.jit(do_not_specialize=["tap_rows", "step_rows", "taps", "step_tokens", "tokens", "columns"])
def _multiply(
    rows,
    ranks,
    weight,
    shares,
    tap_rows,
    step_rows,
    taps,
    step_tokens,
    tokens,
    columns,
    WIDTH: tl.constexpr,
    SHARE: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
):
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    share = tl.program_id(1)
    column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    is_token, is_column = token < tokens, column < columns
    row = (token // step_tokens).to(tl.int64) * step_rows + token % step_tokens
    total = tl.zeros((TOKENS, COLUMNS), dtype=tl.float32)
    for tap in range(taps):
        first = row + tl.load(ranks + tap) * tap_rows
        for begin in range(share * SHARE, share * SHARE + SHARE, INNER):
            at = begin + tl.arange(0, INNER)
            is_in = at < WIDTH
            left = tl.load(
                rows + first[:, None] * WIDTH + at[None, :],
                mask=is_token[:, None] & is_in[None, :],
                other=0.0,
            )
            right = tl.load(
                weight + (tap * WIDTH + at[:, None]) * columns + column[None, :],
                mask=is_in[:, None] & is_column[None, :],
                other=0.0,
            )
            # Three products of 10 bits each: as exact as float32, and what the units can do.
            total = tl.dot(left.to(tl.float32), right, total, input_precision="tf32x3")
    target = shares + (share * tokens + token.to(tl.int64)[:, None]) * columns + column[None, :]
    tl.store(target, total, mask=is_token[:, None] & is_column[None, :])


def launch(
    rows: torch.Tensor, ranks: torch.Tensor, weight: torch.Tensor, shares: torch.Tensor
) -> None:
    """Multiply rows with the weights of their taps; the sum of the shares is the product."""
    _, steps, tokens, width = rows.shape
    parts, columns = shares.shape[0], weight.shape[-1]
    share = -(-width // (parts * _INNER)) * _INNER
    wide = _NARROW if columns <= _NARROW else WIDE
    kernel: Any = _multiply
    kernel[(triton.cdiv(steps * tokens, _TOKENS), parts, triton.cdiv(columns, wide))](
        rows,
        ranks,
        weight,
        shares,
        rows.stride(0) // width,
        rows.stride(1) // width,
        len(ranks),
        tokens,
        steps * tokens,
        columns,
        WIDTH=width,
        SHARE=share,
        TOKENS=_TOKENS,
        COLUMNS=wide,
        INNER=_INNER,
        num_warps=4,
    )
