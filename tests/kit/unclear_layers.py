"""Llama as a stranger may write it: its layers are not found, nor is their source understood."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from vllm.model_executor.models.llama import LlamaDecoderLayer, LlamaForCausalLM, LlamaModel


class UnclearLayer(LlamaDecoderLayer):  # type: ignore[misc]
    """Returns what Llama's layer does; the analysis of its source cannot follow a loop."""

    def forward(
        self, positions: torch.Tensor, hidden_states: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        for _ in range(1):
            hidden, added = super().forward(positions, hidden_states, residual)
        return hidden, added


class LyingLayer(LlamaDecoderLayer):  # type: ignore[misc]
    """Returns the whole stream beside a half of it that nothing adds, behind a loop as well."""

    def forward(
        self, positions: torch.Tensor, hidden_states: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        for _ in range(1):
            hidden, left = super().forward(positions, hidden_states, None)
        return hidden + left, left.clone()


class UnclearLlamaModel(LlamaModel):  # type: ignore[misc]
    """Has three lists of as many modules, two of them with attention."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        # Behind `layers`, so that weights are loaded under the usual names.
        self.mixers = nn.ModuleList(layer.self_attn for layer in self.layers)
        self.transforms = nn.ModuleList(layer.mlp for layer in self.layers)


class UnclearLlamaForCausalLM(LlamaForCausalLM):  # type: ignore[misc]
    """Llama with these layers."""

    layer: type[nn.Module] = UnclearLayer

    def _init_model(self, vllm_config: Any, prefix: str = "", **_: Any) -> LlamaModel:
        return UnclearLlamaModel(vllm_config=vllm_config, prefix=prefix, layer_type=self.layer)


class LyingLlamaForCausalLM(UnclearLlamaForCausalLM):
    """A pair of two tensors that is no sum."""

    layer = LyingLayer
