"""What the pattern of an attention layer depends on besides its queries and keys."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from .submodules import decoder_attention

__all__ = ["attention_facts"]

logger = logging.getLogger("vllm.inspect_lens")


def attention_facts(
    blocks: Sequence[nn.Module | None], n_kv_heads: int
) -> dict[int, dict[str, Any]]:
    """Read the attention layers of a worker; all tensor-parallel ranks have to, together.

    Args:
        blocks: decoder layers of the model; None for those of other pipeline stages.
        n_kv_heads: key heads of the model, over all ranks.

    Returns:
        By layer plain values, with numbers of heads over all ranks; none of a layer without softmax
        attention, or with several.
    """
    found = {}
    for layer, block in enumerate(blocks):
        module = None if block is None else decoder_attention(block)
        if module is not None:
            try:
                found[layer] = _facts(module, n_kv_heads)
            except Exception as error:  # noqa: BLE001 - an engine starts without it, too
                logger.warning("inspect_lens: no output_qk at layer %d: %s", layer, error)
    return found


def _facts(module: Any, n_kv_heads: int) -> dict[str, Any]:
    impl, group = module.impl, _tp()
    return {
        "layer_name": str(getattr(module, "layer_name", "")),
        "scale": float(getattr(impl, "scale", None) or module.head_size**-0.5),
        "logits_soft_cap": float(getattr(impl, "logits_soft_cap", None) or 0.0),
        "sliding_window": _window(getattr(module, "sliding_window", None)),
        "alibi_slopes": _over_heads(getattr(impl, "alibi_slopes", None), group),
        "sinks": _over_heads(getattr(impl, "sinks", None), group),
        # Llama 4 and its like: keys of the query's own chunk only.
        "attention_chunk_size": getattr(module, "attention_chunk_size", None),
        "use_alibi_sqrt": bool(getattr(module, "use_alibi_sqrt", False)),
        "num_heads": int(module.num_heads) * group.world_size,
        "num_kv_heads": n_kv_heads or int(module.num_kv_heads),
        "head_size": int(module.head_size),
    }


def _tp() -> Any:
    from vllm.distributed.parallel_state import get_tp_group

    return get_tp_group()


def _window(size: int | None) -> list[int]:
    """A sliding window of so many tokens as (left, right), -1 for no limit."""
    return [-1, -1] if size is None or size < 0 else [int(size) - 1, 0]


def _over_heads(value: Any, group: Any) -> list[float] | None:
    """One number per query head, over all tensor-parallel ranks."""
    if value is None:
        return None
    numbers = torch.as_tensor(value, dtype=torch.float32)
    if group.world_size > 1:
        numbers = group.all_gather(numbers.to(group.device).contiguous(), dim=0)
    found: list[float] = numbers.cpu().tolist()
    return found
