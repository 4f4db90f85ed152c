"""The tap as one Triton kernel: the same meaning as `tap_reference`, for CUDA graphs.

Launched once per tapped site and forward pass, also when nothing is asked: inside a replayed
graph the launch cannot be left out, so an idle tap loads one flag and returns. Addresses are
those of persistent buffers; what changes from step to step is in the buffers.
"""

# A kernel's body is Triton's language and not Python's.
# mypy: disable-error-code="attr-defined, no-untyped-def, untyped-decorator"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from inspect_lens._engine._bank import BankTensors

__all__ = ["launch"]

_PROGRAMS = 1056
"""Eight per multiprocessor of an H200: enough to fill the memory bus while capturing."""


@triton.jit(do_not_specialize=["site", "n_tokens"])
def _tap(
    hidden,
    residual,
    hidden_stride,
    residual_stride,
    flags,
    steer_rows,
    slots,
    map_stride,
    vectors,
    norm_flags,
    links,
    ring,
    site,
    n_tokens,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_FUSED: tl.constexpr,
):
    flag = tl.load(flags + site)
    if flag == 0:
        return
    offsets = tl.arange(0, BLOCK)
    inside = offsets < WIDTH
    for token in range(tl.program_id(0), n_tokens, tl.num_programs(0)):
        row = tl.load(steer_rows + site * map_stride + token)
        row = tl.where((flag & 1) != 0, row, 0)
        slot = tl.load(slots + site * map_stride + token)
        slot = tl.where((flag & 2) != 0, slot, -1)
        if (row != 0) | (slot >= 0):
            at = hidden + token.to(tl.int64) * hidden_stride + offsets
            mine = tl.load(at, mask=inside, other=0.0).to(tl.float32)
            other = tl.zeros_like(mine)
            if IS_FUSED:
                there = residual + token.to(tl.int64) * residual_stride + offsets
                other = tl.load(there, mask=inside, other=0.0).to(tl.float32)
            if row != 0:
                stream = mine + other
                norm = tl.sqrt(tl.sum(stream * stream, axis=0))
                factor = tl.where(tl.load(norm_flags + row) != 0, norm, 1.0)
                vector = vectors + row.to(tl.int64) * WIDTH + offsets
                delta = tl.load(vector, mask=inside, other=0.0) * factor
                second = tl.load(links + row)
                if second != 0:
                    factor = tl.where(tl.load(norm_flags + second) != 0, norm, 1.0)
                    vector = vectors + second.to(tl.int64) * WIDTH + offsets
                    delta += tl.load(vector, mask=inside, other=0.0) * factor
                edited = (mine + delta).to(hidden.dtype.element_ty)
                tl.store(at, edited, mask=inside)
                mine = edited.to(tl.float32)
            if slot >= 0:
                target = ring + slot.to(tl.int64) * WIDTH + offsets
                tl.store(target, (mine + other).to(ring.dtype.element_ty), mask=inside)


def launch(
    hidden: torch.Tensor,
    residual: torch.Tensor | None,
    *,
    site: int,
    flags: torch.Tensor,
    steer_rows: torch.Tensor,
    slots: torch.Tensor,
    bank: BankTensors,
    ring: torch.Tensor,
) -> None:
    """Edit and capture the rows of one site.

    Args:
        hidden: (tokens, hidden); the rows of steered tokens are edited in place.
        residual: (tokens, hidden) or None.
        site: index of the site.
        flags: (sites,) int32; bit 0 steers, bit 1 captures.
        steer_rows: (sites, tokens) int32 bank rows, 0 for none.
        slots: (sites, tokens) int32 ring slots, -1 for none.
        bank: the steering rows.
        ring: (rows, hidden).
    """
    n_tokens, width = hidden.shape
    kernel: Any = _tap
    kernel[(min(n_tokens, _PROGRAMS),)](
        hidden,
        hidden if residual is None else residual,
        hidden.stride(0),
        0 if residual is None else residual.stride(0),
        flags,
        steer_rows,
        slots,
        steer_rows.stride(0),
        bank.vectors,
        bank.norm,
        bank.link,
        ring,
        site,
        n_tokens,
        WIDTH=width,
        BLOCK=triton.next_power_of_2(width),
        IS_FUSED=residual is not None,
        num_warps=4 if width <= 4096 else 8,
    )
