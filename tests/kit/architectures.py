"""Tiny random models of each layout that is served, and what is checked of each of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

__all__ = ["CASES", "HIDDEN", "LAYERS", "Case", "write"]

HIDDEN, LAYERS, VOCAB = 128, 4, 320


def _common(hidden: int) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": hidden // 64,
        "num_key_value_heads": max(1, hidden // 128),
        "vocab_size": VOCAB,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }


def _gated(hidden: int) -> dict[str, Any]:
    return {"intermediate_size": 2 * hidden, "head_dim": 64}


_EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "output_router_logits": False}


@dataclass(frozen=True)
class Case:
    """One architecture."""

    name: str
    layout: str
    """What its blocks return, or what else it stands for."""
    config: Callable[[int], Any]
    layers: str = "model.layers"
    """Path of the decoder layers in the Hugging Face model."""
    sites: tuple[str, ...] = ("resid_pre", "attn_out", "mlp_out", "resid_post")
    options: dict[str, Any] = field(default_factory=dict)
    """Engine options."""
    needs_gpu: bool = False
    """Whether vLLM's wheel for CPUs lacks a kernel of it."""
    is_text: bool = True
    """Whether it is a language model alone."""
    is_routed: bool = False
    """Whether tokens choose experts: a rounding error of bfloat16 may choose others."""
    has_patterns: bool = False
    """Whether attention patterns are compared, from queries and keys."""
    is_recurrent: bool = False
    """Whether a rounding error of bfloat16 is carried on from token to token, and grows."""


def _llama(hidden: int) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(**_common(hidden), **_gated(hidden))


def _qwen3(hidden: int) -> Any:
    from transformers import Qwen3Config

    return Qwen3Config(**_common(hidden), **_gated(hidden))


def _gemma3(hidden: int) -> Any:
    from transformers import Gemma3TextConfig

    # One layer of three is global, the others see a window; both kinds are there.
    return Gemma3TextConfig(
        **_common(hidden) | {"tie_word_embeddings": True},
        **_gated(hidden),
        query_pre_attn_scalar=64,
        sliding_window=32,
        layer_types=["sliding_attention", "full_attention"] * (LAYERS // 2),
    )


def _gemma4(hidden: int) -> Any:
    from transformers import Gemma4TextConfig

    return Gemma4TextConfig(
        **_common(hidden) | {"tie_word_embeddings": True},
        **_gated(hidden),
        global_head_dim=64,
        sliding_window=32,
        vocab_size_per_layer_input=VOCAB,
        hidden_size_per_layer_input=32,
        layer_types=["sliding_attention", "full_attention"] * (LAYERS // 2),
    )


def _opt(hidden: int) -> Any:
    from transformers import OPTConfig

    return OPTConfig(
        hidden_size=hidden,
        ffn_dim=2 * hidden,
        num_hidden_layers=LAYERS,
        num_attention_heads=hidden // 64,
        vocab_size=VOCAB,
        max_position_embeddings=2048,
        word_embed_proj_dim=hidden,
        tie_word_embeddings=True,
    )


def _olmo2(hidden: int) -> Any:
    from transformers import Olmo2Config

    return Olmo2Config(**_common(hidden), intermediate_size=2 * hidden)


def _mixtral(hidden: int) -> Any:
    from transformers import MixtralConfig

    return MixtralConfig(**_common(hidden), **_gated(hidden), **_EXPERTS, num_local_experts=4)


def _qwen3_moe(hidden: int) -> Any:
    from transformers import Qwen3MoeConfig

    return Qwen3MoeConfig(
        **_common(hidden),
        **_gated(hidden),
        **_EXPERTS,
        num_experts=4,
        moe_intermediate_size=hidden,
        norm_topk_prob=True,
    )


def _granite_hybrid(hidden: int) -> Any:
    from transformers import GraniteMoeHybridConfig

    return GraniteMoeHybridConfig(
        **_common(hidden),
        intermediate_size=2 * hidden,
        shared_intermediate_size=2 * hidden,
        num_local_experts=0,
        num_experts_per_tok=0,
        layer_types=["mamba", "attention"] * (LAYERS // 2),
        attention_multiplier=0.125,
        residual_multiplier=0.9,
        mamba_n_heads=2 * hidden // 64,
        mamba_d_head=64,
        mamba_d_state=32,
        mamba_n_groups=1,
        mamba_expand=2,
        mamba_chunk_size=64,
    )


def _jamba(hidden: int) -> Any:
    from transformers import JambaConfig

    return JambaConfig(
        **_common(hidden),
        intermediate_size=2 * hidden,
        num_experts=1,
        attn_layer_period=2,
        attn_layer_offset=1,
        mamba_d_state=16,
        mamba_dt_rank=8,
        use_mamba_kernels=False,
    )


def _stablelm(hidden: int) -> Any:
    from transformers import StableLmConfig

    return StableLmConfig(**_common(hidden), intermediate_size=2 * hidden)


def _idefics3(hidden: int) -> Any:
    from transformers import Idefics3Config, LlamaConfig

    vision = {
        "hidden_size": 64,
        "intermediate_size": 128,
        # As many as the language model has, so that only their kind tells the lists apart.
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 2,
        "image_size": 32,
        "patch_size": 16,
    }
    return Idefics3Config(
        vision_config=vision,
        text_config=LlamaConfig(**_common(hidden), **_gated(hidden)),
        image_token_id=VOCAB - 1,
        pad_token_id=0,
        scale_factor=2,
        tie_word_embeddings=False,
    )


CASES = (
    Case("llama", "fused residual", _llama),
    Case("qwen3", "fused residual, norms on queries and keys", _qwen3),
    Case("gemma3", "fused residual, four norms, sliding windows", _gemma3, has_patterns=True),
    Case("gemma4", "stream alone, input by layer, one list of layers under two names", _gemma4),
    Case("opt", "plain residual, no feed-forward module", _opt, layers="model.decoder.layers"),
    Case("olmo2", "plain residual, norms behind the modules", _olmo2),
    Case("mixtral", "mixture of experts", _mixtral, is_routed=True),
    Case("qwen3_moe", "mixture of experts, another router", _qwen3_moe, is_routed=True),
    Case("granite-hybrid", "state-space (Mamba 2) and attention layers", _granite_hybrid),
    Case(
        "jamba",
        "state-space (Mamba 1) and attention layers",
        _jamba,
        needs_gpu=True,
        is_recurrent=True,
    ),
    Case("stablelm", "a residual that nobody adds", _stablelm),
    Case(
        "idefics3",
        "a language model inside a multimodal wrapper",
        _idefics3,
        layers="model.text_model.layers",
        options={"limit_mm_per_prompt": {"image": 0}},
        is_text=False,
    ),
)


def write(
    case: Case, folder: Path, dtype: torch.dtype = torch.float32, *, hidden: int = HIDDEN
) -> Path:
    """Write a random checkpoint of an architecture.

    Args:
        case: the architecture.
        folder: where to.
        dtype: of the weights.
        hidden: width of the stream; heads have 64.

    Returns:
        The folder.
    """
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    torch.manual_seed(0)
    auto: Any = AutoModelForCausalLM if case.is_text else AutoModelForImageTextToText
    model = auto.from_config(case.config(hidden))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Wide enough that every layer changes the stream visibly. State matrices, norms and
            # convolutions keep their own scales.
            if parameter.dim() in (2, 3) and "A_log" not in name and "conv1d" not in name:
                parameter.normal_(0, 1.2 / parameter.shape[-1] ** 0.5)
            elif "norm" in name and name.endswith("weight"):
                # Else a norm whose weight was left out would not show.
                parameter.add_(torch.rand_like(parameter) * 0.5)
    model.to(dtype).save_pretrained(folder)
    return folder
