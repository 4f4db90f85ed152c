"""Llama with the fusions of DeepSeek V3.2 and MiniMax-M3 on a GPU, which no wheel for CPUs can run.

With tensor parallelism a block returns a share of a sum over ranks, and the next norm completes it;
without, DeepSeek's first norm is computed where the embedding is. Of MiniMax-M3 not every block
leaves its sum, and none does on a pipeline.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from vllm.distributed import (
    get_pp_group,
    get_tensor_model_parallel_world_size,
    tensor_model_parallel_all_reduce,
)
from vllm.model_executor.layers.fused_allreduce_gemma_rms_norm import (
    fused_allreduce_gemma_rms_norm,
)
from vllm.model_executor.models.llama import LlamaDecoderLayer, LlamaForCausalLM, LlamaModel
from vllm.models.common.ops.fused_allreduce_rms_norm import fused_allreduce_rms_norm
from vllm.sequence import IntermediateTensors


class FusedLayer(LlamaDecoderLayer):  # type: ignore[misc]
    """Leaves both of its sums over ranks to the norm behind them."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.self_attn.o_proj.reduce_results = False
        self.mlp.down_proj.reduce_results = False

    def forward(
        self,
        positions: torch.Tensor,
        hidden_states: torch.Tensor,
        residual: torch.Tensor | None,
        attn_in: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if residual is None:
            residual = hidden_states
            hidden_states = attn_in if attn_in is not None else self.input_layernorm(hidden_states)
        else:
            hidden_states, residual = fused_allreduce_rms_norm(
                hidden_states, residual, self.input_layernorm
            )
        hidden_states = self.self_attn(positions=positions, hidden_states=hidden_states)
        hidden_states, residual = fused_allreduce_rms_norm(
            hidden_states, residual, self.post_attention_layernorm
        )
        return self.mlp(hidden_states), residual


class PartlyFusedLayer(LlamaDecoderLayer):  # type: ignore[misc]
    """Leaves attention's sum to the norm behind it, and every second block the other sum, too."""

    fuse_input_allreduce = False

    def __init__(self, *, prefix: str, **options: Any) -> None:
        super().__init__(prefix=prefix, **options)
        self.self_attn.o_proj.reduce_results = False
        is_odd = int(prefix.rpartition(".")[2]) % 2 == 1
        self.mlp.down_proj.reduce_results = is_odd or get_pp_group().world_size > 1

    @property
    def ffn_all_reduce_deferred(self) -> bool:
        return not self.mlp.down_proj.reduce_results

    def forward(
        self, positions: torch.Tensor, hidden_states: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if residual is None:
            hidden_states, residual = self.input_layernorm(hidden_states), hidden_states
        elif self.fuse_input_allreduce:
            hidden_states, residual = fused_allreduce_gemma_rms_norm(
                hidden_states, residual, self.input_layernorm
            )
        else:
            hidden_states, residual = self.input_layernorm(hidden_states, residual)
        hidden_states = self.self_attn(positions=positions, hidden_states=hidden_states)
        hidden_states, residual = fused_allreduce_gemma_rms_norm(
            hidden_states, residual, self.post_attention_layernorm
        )
        return self.mlp(hidden_states), residual


class OtherLayer(FusedLayer):
    """Another way to complete a sum, which nobody knows."""

    def forward(  # type: ignore[override]
        self, positions: torch.Tensor, hidden_states: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if residual is not None:
            hidden_states = tensor_model_parallel_all_reduce(hidden_states)
            hidden_states, residual = self.input_layernorm(hidden_states, residual)
        else:
            hidden_states, residual = self.input_layernorm(hidden_states), hidden_states
        hidden_states = self.self_attn(positions=positions, hidden_states=hidden_states)
        hidden_states = tensor_model_parallel_all_reduce(hidden_states)
        hidden_states, residual = self.post_attention_layernorm(hidden_states, residual)
        return self.mlp(hidden_states), residual


class FusedLlamaModel(LlamaModel):  # type: ignore[misc]
    """Calls the function in front of the last norm, too."""

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor | IntermediateTensors:
        residual = attn_in = None
        if get_pp_group().is_first_rank:
            hidden_states = self.embed_input_ids(input_ids)
            if get_tensor_model_parallel_world_size() == 1:
                attn_in = self.layers[0].input_layernorm(hidden_states)
        else:
            assert intermediate_tensors is not None
            hidden_states = intermediate_tensors["hidden_states"]
            residual = intermediate_tensors["residual"]
        for layer in self.layers[self.start_layer : self.end_layer]:
            hidden_states, residual = layer(positions, hidden_states, residual, attn_in)
            attn_in = None
        if not get_pp_group().is_last_rank:
            return IntermediateTensors({"hidden_states": hidden_states, "residual": residual})
        return fused_allreduce_rms_norm(hidden_states, residual, self.norm)[0]


class PartlyFusedLlamaModel(LlamaModel):  # type: ignore[misc]
    """Knows which block leaves a sum to the next norm."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        leaves_sum = False
        for layer in self.layers[self.start_layer : self.end_layer]:
            layer.fuse_input_allreduce = leaves_sum
            leaves_sum = layer.ffn_all_reduce_deferred
        self.fuse_final_norm_allreduce = leaves_sum

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor | IntermediateTensors:
        residual = None
        if get_pp_group().is_first_rank:
            hidden_states = self.embed_input_ids(input_ids)
        else:
            assert intermediate_tensors is not None
            hidden_states = intermediate_tensors["hidden_states"]
            residual = intermediate_tensors["residual"]
        for layer in self.layers[self.start_layer : self.end_layer]:
            hidden_states, residual = layer(positions, hidden_states, residual)
        if not get_pp_group().is_last_rank:
            return IntermediateTensors({"hidden_states": hidden_states, "residual": residual})
        if self.fuse_final_norm_allreduce:
            return fused_allreduce_gemma_rms_norm(hidden_states, residual, self.norm)[0]
        return self.norm(hidden_states, residual)[0]


class PartlyFusedLlamaForCausalLM(LlamaForCausalLM):  # type: ignore[misc]
    """Llama with these layers."""

    def _init_model(self, vllm_config: Any, prefix: str = "", **_: Any) -> nn.Module:
        return PartlyFusedLlamaModel(
            vllm_config=vllm_config, prefix=prefix, layer_type=PartlyFusedLayer
        )


class FusedLlamaForCausalLM(LlamaForCausalLM):  # type: ignore[misc]
    """Llama with these layers."""

    def _init_model(self, vllm_config: Any, prefix: str = "", **_: Any) -> nn.Module:
        return FusedLlamaModel(vllm_config=vllm_config, prefix=prefix, layer_type=FusedLayer)


class OtherLlamaForCausalLM(LlamaForCausalLM):  # type: ignore[misc]
    """Llama whose blocks return shares; the last of them is never completed."""

    def _init_model(self, vllm_config: Any, prefix: str = "", **_: Any) -> LlamaModel:
        return LlamaModel(vllm_config=vllm_config, prefix=prefix, layer_type=OtherLayer)
