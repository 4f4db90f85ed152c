"""Queries and keys as attention layers get them, and what else their pattern depends on."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from inspect_lens._engine.hooks.runner import HookRunner
from inspect_lens._engine.protocol.exceptions import ends_process
from inspect_lens._vllm.model.submodules import decoder_attention
from inspect_lens.errors import UnsupportedError

__all__ = ["QKReader"]

logger = logging.getLogger("vllm.inspect_lens")

_NAMES = ((0, "query"), (1, "key"))
"""Arguments of vLLM's attention layer."""


class QKReader:
    """Knows the attention layer of each decoder layer of this worker."""

    def __init__(self, blocks: Sequence[nn.Module | None], n_kv_heads: int) -> None:
        """Find the attention layers.

        Args:
            blocks: decoder layers of the model; None for those of other pipeline stages.
            n_kv_heads: key heads of the model, over all ranks.
        """
        self._n_kv_heads = n_kv_heads
        self._modules: dict[int, Any] = {
            layer: module
            for layer, block in enumerate(blocks)
            if block is not None and (module := decoder_attention(block)) is not None
        }
        self._metas: dict[int, Mapping[str, Any]] = {}
        for layer, module in self._modules.items():
            try:
                # Now, when all ranks are here: numbers of heads may have to be gathered.
                self._metas[layer] = self._meta(module)
            except Exception as error:  # noqa: BLE001 - an engine starts without it, too
                logger.warning("inspect_lens: no output_qk at layer %d: %s", layer, error)

    def meta(self, layer: int) -> Mapping[str, Any] | None:
        """What a layer's pattern depends on besides queries and keys.

        Args:
            layer: decoder layer.

        Returns:
            Plain values, with numbers of heads over all ranks; None where the layer has no
            softmax attention, or several.
        """
        return self._metas.get(layer)

    def _meta(self, module: Any) -> Mapping[str, Any]:
        impl, group = module.impl, _tp()
        return {
            "layer_name": str(getattr(module, "layer_name", "")),
            "scale": float(getattr(impl, "scale", None) or module.head_size**-0.5),
            "logits_soft_cap": float(getattr(impl, "logits_soft_cap", None) or 0.0),
            "sliding_window": _window(getattr(module, "sliding_window", None)),
            "alibi_slopes": _over_heads(getattr(impl, "alibi_slopes", None), group),
            "sinks": _over_heads(getattr(impl, "sinks", None), group),
            "use_alibi_sqrt": bool(getattr(module, "use_alibi_sqrt", False)),
            "num_heads": int(module.num_heads) * group.world_size,
            "num_kv_heads": self._n_kv_heads or int(module.num_kv_heads),
            "head_size": int(module.head_size),
        }

    def arm(self, layer: int, hooks: HookRunner) -> Any:
        """Read a layer's queries and keys in the step that follows.

        Args:
            layer: decoder layer with softmax attention.
            hooks: takes the rows.

        Returns:
            The handle that removes it.
        """
        module = self._modules[layer]

        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            try:
                query, key = (kwargs.get(n, args[i] if i < len(args) else None) for i, n in _NAMES)
                if query is None or key is None:
                    raise UnsupportedError(f"layer {layer} has no keys of its own")
                q = query.reshape(-1, module.num_heads, module.head_size)
                k = key.reshape(-1, module.num_kv_heads, module.head_size)
                hooks.read_qk(layer, lambda a, b: (self._all_heads(q[a:b]), self._keys(k[a:b])))
            except BaseException as error:
                if ends_process(error, in_user_code=True):
                    raise
                hooks.fail_step(error)

        return module.register_forward_pre_hook(hook, with_kwargs=True)

    def _all_heads(self, rows: torch.Tensor) -> torch.Tensor:
        """Heads of all tensor-parallel ranks, in order; memory of its own."""
        group = _tp()
        if group.world_size == 1:
            return rows.clone()
        gathered: torch.Tensor = group.all_gather(rows.contiguous(), dim=1)
        return gathered

    def _keys(self, rows: torch.Tensor) -> torch.Tensor:
        gathered = self._all_heads(rows)
        copies = gathered.shape[1] // self._n_kv_heads if self._n_kv_heads else 1
        # With fewer key heads than ranks, neighbouring ranks hold the same one.
        return gathered[:, :: max(copies, 1)].contiguous() if copies > 1 else gathered


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
