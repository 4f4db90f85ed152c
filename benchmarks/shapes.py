"""Sizes of real models as `config.json`: weights are random, and nothing is downloaded."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

__all__ = ["SHAPES", "Shape"]


@dataclass(frozen=True)
class Shape:
    """One model's sizes."""

    config: dict[str, Any]
    dtype: str
    kv_gib: float
    """Key-value cache of each engine: what 1000 requests of the fixed loads need, if it fits."""
    max_model_len: int = 2048

    @property
    def layers(self) -> int:
        """Decoder layers."""
        return int(self.config["num_hidden_layers"])

    @property
    def hidden(self) -> int:
        """Width of the residual stream."""
        return int(self.config["hidden_size"])

    @property
    def vocab(self) -> int:
        """Number of token ids."""
        return int(self.config["vocab_size"])

    @property
    def layer(self) -> int:
        """The layer that arms of one layer use: a third of the way up."""
        return self.layers // 3

    def first(self, layers: int) -> Shape:
        """The same with its first layers alone."""
        cut: dict[str, Any] = {"num_hidden_layers": layers}
        if "layer_types" in self.config:
            cut["layer_types"] = self.config["layer_types"][:layers]
        return replace(self, config={**self.config, **cut})

    def write(self, folder: Path) -> Path:
        """Write the folder that engines load."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config))
        return folder


def _llama(hidden: int, middle: int, layers: int, heads: int, vocab: int) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": middle,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": max(1, heads // 4),
        "head_dim": hidden // heads,
        "vocab_size": vocab,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def _moe(base: dict[str, Any], middle: int, experts: int, chosen: int) -> dict[str, Any]:
    return {
        **base,
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "moe_intermediate_size": middle,
        "num_experts": experts,
        "num_experts_per_tok": chosen,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


_FP8: Final = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "weight_block_size": [128, 128],
}

SHAPES = {
    "llama-8b": Shape(_llama(4096, 14336, 32, 32, 128256), "bfloat16", kv_gib=24),
    "llama-70b-48": Shape(
        {**_llama(8192, 28672, 48, 64, 128256), "num_key_value_heads": 8}, "bfloat16", kv_gib=3
    ),
    "glm-4.5-air-23": Shape(
        {
            **_llama(4096, 10944, 23, 96, 151552),
            "architectures": ["Glm4MoeForCausalLM"],
            "model_type": "glm4_moe",
            "num_key_value_heads": 8,
            "head_dim": 128,
            "attention_bias": True,
            "partial_rotary_factor": 0.5,
            "moe_intermediate_size": 1408,
            "n_routed_experts": 128,
            "n_shared_experts": 1,
            "num_experts_per_tok": 8,
            "first_k_dense_replace": 1,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.0,
            "use_qk_norm": False,
        },
        "bfloat16",
        kv_gib=4,
    ),
    "gpt-oss-120b": Shape(
        {
            **_llama(2880, 2880, 36, 64, 201088),
            "architectures": ["GptOssForCausalLM"],
            "model_type": "gpt_oss",
            "num_key_value_heads": 8,
            "head_dim": 64,
            "attention_bias": True,
            "num_local_experts": 128,
            "num_experts_per_tok": 4,
            "sliding_window": 128,
            "layer_types": ["sliding_attention", "full_attention"] * 18,
            "swiglu_limit": 7.0,
            "rope_theta": 150000,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 32.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 4096,
            },
            "max_position_embeddings": 131072,
            "quantization_config": {"quant_method": "mxfp4"},
        },
        "bfloat16",
        kv_gib=4,
    ),
    "glm-5-10": Shape(
        {
            **_llama(6144, 12288, 10, 64, 154880),
            "architectures": ["GlmMoeDsaForCausalLM"],
            "model_type": "glm_moe_dsa",
            "num_key_value_heads": 64,
            "kv_lora_rank": 512,
            "q_lora_rank": 2048,
            "qk_nope_head_dim": 192,
            "qk_rope_head_dim": 64,
            "v_head_dim": 256,
            "index_head_dim": 128,
            "index_n_heads": 32,
            "index_topk": 2048,
            "indexer_rope_interleave": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000000},
            "first_k_dense_replace": 3,
            "moe_intermediate_size": 2048,
            "n_routed_experts": 256,
            "n_shared_experts": 1,
            "num_experts_per_tok": 8,
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
            "n_group": 1,
            "topk_group": 1,
            "num_nextn_predict_layers": 0,
            "quantization_config": _FP8,
        },
        "bfloat16",
        kv_gib=4,
    ),
    "qwen3-235b-40": Shape(
        {
            **_moe(_llama(4096, 12288, 40, 64, 151936), 1536, 128, 8),
            "num_key_value_heads": 4,
            "head_dim": 128,
            "quantization_config": _FP8,
        },
        "bfloat16",
        kv_gib=4,
    ),
    "qwen3-0.6b": Shape(
        {
            **_llama(1024, 3072, 28, 16, 151936),
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "num_key_value_heads": 8,
            "head_dim": 128,
            "tie_word_embeddings": True,
        },
        "bfloat16",
        kv_gib=8,
    ),
    "qwen3-moe-12": Shape(
        {
            **_moe(_llama(2048, 6144, 12, 32, 151936), 768, 128, 8),
            "num_key_value_heads": 4,
            "head_dim": 128,
        },
        "bfloat16",
        kv_gib=8,
    ),
    "tiny-moe": Shape(
        _moe(_llama(256, 512, 4, 4, 512), 256, 4, 2), "float32", kv_gib=0.0625, max_model_len=256
    ),
    "tiny": Shape(_llama(256, 512, 4, 4, 512), "float32", kv_gib=0.0625, max_model_len=256),
}
SHAPES["gpt-oss-120b-24"] = SHAPES["gpt-oss-120b"].first(24)
SHAPES["qwen3-235b-20"] = SHAPES["qwen3-235b-40"].first(20)
"""Llama-8B, Qwen3-0.6B and gpt-oss-120b (MXFP4) are whole. Others have fewer layers, so that two
engines fit on two cards: Llama-70B 48 of its 80, GLM-4.5-Air 23 of its 46, GLM-5 (FP8) 10 of its
78, Qwen3-235B-A22B (FP8) 40 of its 94, and Qwen3-30B-A3B 12 of its 48; of gpt-oss-120b 24 of 36
layers, and of Qwen3-235B-A22B 20, fit twice on one card. The two tiny ones, one of them with
experts, are run on a CPU in a second."""
