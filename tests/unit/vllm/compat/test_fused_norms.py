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


class Partly(nn.Module):
    """Of MiniMax-M3: whether it leaves its sum, and whether its first norm gets one, is told."""

    def __init__(self, *, leaves: bool, gets: bool) -> None:
        super().__init__()
        self.ffn_all_reduce_deferred, self.fuse_input_allreduce = leaves, gets

    def forward(self, hidden_states: Any, residual: Any = None) -> Any:
        return fused_allreduce_gemma_rms_norm(hidden_states, residual, lambda *_: "added")


def fused_allreduce_gemma_rms_norm(hidden: Any, residual: Any, norm: Any) -> Any:
    return "summed", norm


def test_only_what_a_block_leaves_is_summed(monkeypatch: pytest.MonkeyPatch) -> None:
    place = "vllm.distributed.communication_op.tensor_model_parallel_all_reduce"
    monkeypatch.setattr(place, lambda part: f"all of {part}")
    before = fused_allreduce_gemma_rms_norm
    with ExitStack() as undo:
        for leaves in ((False, False), (True, False)):
            first, second = (
                Partly(leaves=leave, gets=gets)
                for leave, gets in zip(leaves, (False, *leaves), strict=False)
            )
            undo_fusion([first, second], undo, ranks=2, is_first_stage=False)
            # A stage in the middle gets the whole sum, but its first block calls no fused norm.
            assert first(1)[0] == ("all of summed" if leaves[0] else "summed")
            assert second(2)[0] == ("a" if leaves[0] else "summed")
    assert fused_allreduce_gemma_rms_norm is before


def test_engines_of_one_process_share_what_is_put_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stage that is not the last leaves a whole sum behind, which is nobody else's."""
    place = "vllm.distributed.communication_op.tensor_model_parallel_all_reduce"
    monkeypatch.setattr(place, lambda part: part)
    before, kept = fused_allreduce_rms_norm, ExitStack()
    one, other = Block(), Block()
    with kept:
        for block in (one, other):
            undo_fusion([block], kept, ranks=2, is_first_stage=True)
        assert one(1, 2)[0] == "summed"
        assert other(1, 2)[0] == "summed"
        assert one(1, 2)[0] == "summed"
    assert fused_allreduce_rms_norm is before
    assert other(1, 2) == ("summed", other)


def test_blocks_that_split_tokens_over_ranks_are_refused() -> None:
    block = Block()
    block.use_sequence_parallel = True  # type: ignore[assignment]
    with pytest.raises(UnsupportedError, match="sequence parallelism: Block splits tokens"):
        undo_fusion([block], ExitStack(), ranks=2, is_first_stage=True)
