"""One pass in which every tap has to write a row, on every rank; see `_self_check` for the rest."""

from __future__ import annotations

import logging
import math
from typing import Any

import numpy as np
import torch

from inspect_lens._engine.step.stepper import Stepper
from inspect_lens._engine.tap.buffers import HEAD, install
from inspect_lens._engine.tap.upload import CAPTURE
from inspect_lens.errors import CompatError, UnsupportedError
from inspect_lens.spec import SITE_TABLE

__all__ = ["check_taps", "is_same_bits", "marker_of", "scale_for"]

logger = logging.getLogger("vllm.inspect_lens")


def check_taps(runner: Any, stepper: Stepper, *, is_sharded: bool = False) -> torch.Tensor:
    """Run one pass in which every tap must write a row, on every rank.

    Args:
        runner: the model runner, compiled and warm.
        stepper: of this worker.
        is_sharded: whether tensor-parallel ranks have to agree on every row.

    Returns:
        (rows of a token, hidden); the rows.

    Raises:
        CompatError: a tap did not fire, so the engine must not start.
        UnsupportedError: tensor-parallel ranks see different rows at a tap.
    """
    state = stepper.state
    taps, n = state.row_taps, len(state.row_taps)
    marker = marker_of(state.ring)
    state.ring[:n].copy_(marker)
    # One token of one group, whose rows lie one behind the other.
    state.tokens[0] = 0
    state.base[0] = torch.from_numpy(np.append(state.row_starts, 1).astype(np.int32))
    state.flags.fill_(CAPTURE)
    state.header[0], state.header[1] = 1, 0
    state.capturing = [True] * len(state.taps)
    state.is_active = True
    install(state)
    try:
        getattr(runner._dummy_run, "inspect_lens_original", runner._dummy_run)(1)
    finally:
        state.is_active = False
        state.capturing = [False] * len(state.taps)
        state.header[: HEAD + len(state.taps)] = 0
    same = is_same_bits(state.ring[:n], marker).tolist()
    silent = [f"{t.site}.{t.layer}" for t, is_silent in zip(taps, same, strict=True) if is_silent]
    # Of what ranks have shares these differ, of course.
    alike = [i for i, tap in enumerate(taps) if not SITE_TABLE[tap.site].is_sharded]
    shares = [alike[i] for i in _different_over_ranks(state.ring[alike])] if is_sharded else []
    rows = state.ring[:n].clone()
    state.ring[:n].zero_()
    if silent:
        raise CompatError(
            f"inspect_lens: the taps {', '.join(dict.fromkeys(silent))} did not fire in the "
            "start-up check. A compiled graph without taps may have been loaded: clear vLLM's "
            "compile cache, or set INSPECT_LENS_DISABLE=1 to run without the lens"
        )
    if shares:
        names = ", ".join(f"{taps[i].site}.{taps[i].layer}" for i in shares)
        raise UnsupportedError(
            f"inspect_lens: at the taps {names} of {type(runner.get_model()).__name__} each "
            "tensor-parallel rank has its own share of a sum; leave the site out of "
            "INSPECT_LENS_SITES, or use one GPU per stage"
        )
    logger.info("inspect_lens: start-up check: all %d taps fired", len(state.taps))
    return rows


def scale_for(row: torch.Tensor, *, is_sharded: bool = False) -> float:
    """Twice the size of a row's elements, as a power of two; alike on all ranks.

    Args:
        row: (hidden,) of the first tap.
        is_sharded: whether there are several tensor-parallel ranks.
    """
    size = row.float().square().mean().sqrt().reshape(1)
    if is_sharded:
        from vllm.distributed.parallel_state import get_tp_group

        size = get_tp_group().all_gather(size, dim=0).amax().reshape(1)
    rms = float(size)
    if not math.isfinite(rms) or rms <= 0:
        return 1.0
    return 2.0 ** min(12, max(-10, math.ceil(math.log2(2 * rms))))


def is_same_bits(rows: torch.Tensor, marker: torch.Tensor) -> torch.Tensor:
    """Which rows are the marker still; as bits, as a dummy pass may well compute NaN."""
    mark = marker.expand(rows.shape).contiguous().view(torch.uint8)
    return (rows.contiguous().view(torch.uint8) == mark).all(dim=-1)


def _different_over_ranks(rows: torch.Tensor) -> list[int]:
    """Which rows are not the same on all tensor-parallel ranks, rounding aside."""
    from vllm.distributed.parallel_state import get_tp_group

    mine = rows.float()
    all_ranks = get_tp_group().all_gather(mine.contiguous(), dim=0).view(-1, *mine.shape)
    error = (all_ranks - all_ranks[0]).norm(dim=-1).amax(dim=0)
    size = all_ranks.norm(dim=-1).amax(dim=0)
    # A dummy pass may compute NaN, which shows nothing.
    return [i for i, differs in enumerate((error > 0.05 * size).tolist()) if differs]


def marker_of(ring: torch.Tensor) -> torch.Tensor:
    """A row that no forward pass writes."""
    return torch.arange(1, ring.shape[1] + 1, device=ring.device).to(ring.dtype).mul_(-3)
