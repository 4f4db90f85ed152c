"""Blocks whose norms are fused across them, put right and taken back; engines do the rest."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from inspect_lens._vllm.compat.fused_norms import undo_fusion
from inspect_lens.errors import UnsupportedError


def fused_allreduce_rms_norm(hidden: Any, residual: Any, norm: Any) -> Any:
    return "summed", norm


class Block(nn.Module):
    def forward(self, hidden_states: Any, residual: Any = None, attn_in: Any = None) -> Any:
        if attn_in is not None:
            return attn_in, residual
        return fused_allreduce_rms_norm(hidden_states, residual, self)


def test_the_first_norm_is_left_to_the_block_until_it_is_undone() -> None:
    first, second = blocks = [Block(), Block()]
    rows = torch.ones(2, 3)
    with ExitStack() as undo:
        undo_fusion([None, *blocks], undo, ranks=1, is_first_stage=True)
        assert first(rows, None, rows) == first(rows, None, attn_in=rows) == ("summed", first)
        assert second(rows, None, rows)[0] is rows
    assert first(rows, None, rows)[0] is rows


def test_every_module_that_has_the_function_gets_it_back(monkeypatch: pytest.MonkeyPatch) -> None:
    other = ModuleType("other")
    other.fused_allreduce_rms_norm = fused_allreduce_rms_norm  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "other", other)
    monkeypatch.setitem(sys.modules, "not_to_be_imported", None)
    here = sys.modules[__name__]
    original = fused_allreduce_rms_norm
    with ExitStack() as undo:
        undo_fusion([Block()], undo, ranks=2, is_first_stage=True)
        assert original not in (here.fused_allreduce_rms_norm, other.fused_allreduce_rms_norm)
    assert here.fused_allreduce_rms_norm is other.fused_allreduce_rms_norm is original


def test_blocks_that_split_tokens_over_ranks_are_refused() -> None:
    block = Block()
    block.use_sequence_parallel = True  # type: ignore[assignment]
    with pytest.raises(UnsupportedError, match="sequence parallelism: Block splits tokens"):
        undo_fusion([block], ExitStack(), ranks=2, is_first_stage=True)
