"""The tap in plain aten: what a tap means, and the implementation that runs on a CPU."""

from __future__ import annotations

import torch

from inspect_lens._engine._bank import BankTensors

__all__ = ["capture_rows", "ring_rows", "steer_rows"]


def steer_rows(
    hidden: torch.Tensor,
    residual: torch.Tensor | None,
    rows: torch.Tensor,
    bank: BankTensors,
) -> None:
    """Edit the stream of steered tokens in place.

    The sum is taken in float32 and rounded once, so the edited value is the nearest value of
    the dtype to `h + sum`. Tokens without a row are not written at all: they keep their bits.

    Args:
        hidden: (tokens, hidden); edited.
        residual: (tokens, hidden) or None; the other half of the stream in layers that
            leave the addition to the next norm.
        rows: (tokens,) int32; bank row per token, 0 for none.
        bank: the steering rows.
    """
    (index,) = rows.nonzero(as_tuple=True)
    if not len(index):
        return
    row = rows[index].long()
    mine = hidden[index].float()
    stream = mine if residual is None else mine + residual[index].float()
    norm = torch.linalg.vector_norm(stream, dim=-1, keepdim=True)
    delta = torch.zeros_like(mine)
    for _ in range(2):
        factor = torch.where(bank.norm[row].unsqueeze(-1) != 0, norm, torch.ones_like(norm))
        delta += bank.vectors[row] * factor
        row = bank.link[row].long()
    hidden[index] = (mine + delta).to(hidden.dtype)


def capture_rows(
    hidden: torch.Tensor,
    residual: torch.Tensor | None,
    slots: torch.Tensor,
    ring: torch.Tensor,
) -> None:
    """Write the stream of captured tokens to the ring.

    Args:
        hidden: (tokens, hidden).
        residual: (tokens, hidden) or None.
        slots: (tokens,) int32; ring slot per token, -1 for none.
        ring: (rows, hidden); written.
    """
    (index,) = (slots >= 0).nonzero(as_tuple=True)
    if not len(index):
        return
    stream = hidden[index]
    if residual is not None:
        stream = (stream.float() + residual[index].float()).to(ring.dtype)
    ring[slots[index].long()] = stream.to(ring.dtype)


def ring_rows(tokens: torch.Tensor, base: torch.Tensor, origin: int) -> torch.Tensor:
    """Ring row of each token at one tap.

    Args:
        tokens: (tokens, 3) int32; the second column is the group, -1 for none, and the third
            the place in the group's block.
        base: (groups,) int32; row of each group's first token at this tap, from `origin` on, or
            -1.
        origin: ring row at which the step's rows begin.

    Returns:
        (tokens,) int32; -1 for tokens without one.
    """
    group = tokens[:, 1]
    first = base.index_select(0, group.clamp(min=0))
    return torch.where((group >= 0) & (first >= 0), origin + first + tokens[:, 2], -1)
