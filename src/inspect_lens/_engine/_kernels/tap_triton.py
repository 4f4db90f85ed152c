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

from inspect_lens._engine._state import HEAD, TapState

__all__ = ["launch"]

_PROGRAMS = 1056
"""Eight per multiprocessor of an H200: enough to fill the memory bus while capturing."""


@triton.jit(do_not_specialize=["tap", "n_tokens"])
def _tap(
    hidden,
    residual,
    hidden_stride,
    residual_stride,
    header,
    base,
    vectors,
    norm_flags,
    links,
    table,
    ring,
    tap,
    n_tokens,
    HEAD: tl.constexpr,
    TAPS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_FUSED: tl.constexpr,
):
    flag = tl.load(header + HEAD + tap)
    if flag == 0:
        return
    # A graph runs over padding, which the maps do not describe.
    n_tokens = tl.minimum(n_tokens, tl.load(header))
    origin = tl.load(header + 1)
    offsets = tl.arange(0, BLOCK)
    inside = offsets < WIDTH
    for token in range(tl.program_id(0), n_tokens, tl.num_programs(0)):
        entry = header + HEAD + TAPS + 3 * token
        config = tl.load(entry, mask=(flag & 1) != 0, other=0)
        row = tl.load(table + config * TAPS + tap)
        group = tl.load(entry + 1, mask=(flag & 2) != 0, other=-1)
        first = tl.load(base + group * TAPS + tap, mask=group >= 0, other=-1)
        place = tl.load(entry + 2, mask=first >= 0, other=0)
        slot = tl.where(first >= 0, origin + first + place, -1)
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
    hidden: torch.Tensor, residual: torch.Tensor | None, *, tap: int, state: TapState
) -> None:
    """Edit and capture the rows of one tap.

    Args:
        hidden: (tokens, hidden); the rows of steered tokens are edited in place.
        residual: (tokens, hidden) or None.
        tap: index of the tap.
        state: what it reads and where rows go.
    """
    n_tokens, width = hidden.shape
    kernel: Any = _tap
    bank = state.bank
    kernel[(min(n_tokens, _PROGRAMS),)](
        hidden,
        hidden if residual is None else residual,
        hidden.stride(0),
        0 if residual is None else residual.stride(0),
        state.header,
        state.base,
        bank.vectors,
        bank.norm,
        bank.link,
        bank.table,
        state.ring,
        tap,
        n_tokens,
        HEAD=HEAD,
        TAPS=len(state.taps),
        WIDTH=width,
        BLOCK=triton.next_power_of_2(width),
        IS_FUSED=residual is not None,
        num_warps=4 if width <= 4096 else 8,
    )
