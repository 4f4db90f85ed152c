"""Models that fuse a norm with what comes before it: taps get the stream all the same.

DeepSeek V3.2, GLM-5 and MiniMax-M3 on a GPU (`vllm.models`). With tensor parallelism a block leaves
its last sum over ranks to the norm in front of the next one; of MiniMax-M3 some blocks do, and none
on a pipeline. So what it returns is a share, which here is summed up where the block ends, and the
norm that follows then adds only. That is what vLLM does by itself where it has no FlashInfer, at
another place. Without tensor parallelism DeepSeek's first norm is computed together with the
embedding, from a stream that no edit has reached; the block then computes it again.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

from torch import nn

from inspect_lens.errors import UnsupportedError

__all__ = ["undo_fusion"]

_SUMMING_NORMS = ("fused_allreduce_rms_norm", "fused_allreduce_gemma_rms_norm")
"""Functions that sum a tensor over ranks, add it to the residual, and apply a norm."""
_LEAVES_SUM = "ffn_all_reduce_deferred"
"""Attribute of a block: whether the second function has to complete what it returns."""
_GETS_SHARE = "fuse_input_allreduce"
"""Attribute of a block: whether its first norm calls that function."""
_FIRST_NORM = "attn_in"
"""Argument of a block: its first norm of the embedding, or None."""
_SPLITS_TOKENS = "use_sequence_parallel"
"""Attribute of a block whose stream has other tokens on each rank."""


class _Sum:
    """Whether the share that the next norm gets has been summed up."""

    def __init__(self, original: Callable[..., Any]) -> None:
        self._original = original
        self._is_whole = False

    def norm(self, hidden: Any, residual: Any, norm: nn.Module) -> Any:
        """Stands in for vLLM's function."""
        if self._is_whole:
            self._is_whole = False
            return norm(hidden, residual)
        return self._original(hidden, residual, norm)

    def begin(self, *, is_whole: bool) -> None:
        """Stages of a pipeline send the whole sum to the next one."""
        self._is_whole = is_whole

    def complete(self, output: tuple[Any, ...]) -> tuple[Any, ...]:
        from vllm.distributed.communication_op import tensor_model_parallel_all_reduce

        self._is_whole = True
        return (tensor_model_parallel_all_reduce(output[0]), *output[1:])


def undo_fusion(
    blocks: Sequence[nn.Module | None], undo: ExitStack, *, ranks: int, is_first_stage: bool
) -> None:
    """Make blocks get and return the whole stream, before taps are put into them.

    Args:
        blocks: decoder layers of a model; None for those of other stages.
        undo: gets what takes it back.
        ranks: of tensor parallelism.
        is_first_stage: of a pipeline.
    """
    here = [block for block in blocks if block is not None]
    if not here:
        return
    if any(getattr(block, _SPLITS_TOKENS, False) for block in here):
        raise UnsupportedError(
            f"sequence parallelism: {type(here[0]).__name__} splits tokens over ranks; leave "
            "--enable-expert-parallel out, or use one of tensor and data parallelism"
        )
    names = list(inspect.signature(here[0].forward).parameters)
    if _FIRST_NORM in names:
        before = names.index(_FIRST_NORM)

        def drop(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return args[:before], {**kwargs, _FIRST_NORM: None}

        undo.callback(here[0].register_forward_pre_hook(drop, with_kwargs=True).remove)
    forward = inspect.unwrap(type(here[0]).forward)
    name = next((one for one in _SUMMING_NORMS if one in forward.__code__.co_names), None)
    shares = [block for block in here if getattr(block, _LEAVES_SUM, name == _SUMMING_NORMS[0])]
    if ranks == 1 or name is None or not shares:
        return
    original = forward.__globals__[name]
    # Engines of one process share it: their passes come one after another, and each begins anew.
    total = getattr(original, "__self__", None) or _Sum(original)
    # The model in front of the last norm has it from another import than its blocks may have.
    for module in [*sys.modules.values()]:
        # None stands for a module that nobody is to import.
        if getattr(module, "__dict__", {}).get(name) is original:
            undo.callback(setattr, module, name, original)
            setattr(module, name, total.norm)

    def begin(*_: Any) -> None:
        total.begin(is_whole=not is_first_stage and getattr(here[0], _GETS_SHARE, True))

    def complete(_block: Any, _args: Any, output: Any) -> Any:
        return total.complete(output)

    undo.callback(here[0].register_forward_pre_hook(begin).remove)
    for block in shares:
        undo.callback(block.register_forward_hook(complete).remove)
