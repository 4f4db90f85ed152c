"""Tiny random models of each layout that is served, and what is checked of each of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from .tiny_models import write_words

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
    title: str
    """As people call it."""
    layout: str
    """What its blocks return, or what else it stands for."""
    config: Callable[[int], Any]
    layers: str = "model.layers"
    """Path of the decoder layers in the Hugging Face model."""
    sites: tuple[str, ...] = ("resid_pre", "attn_out", "mlp_out", "resid_post")
    options: dict[str, Any] = field(default_factory=dict)
    """Engine options."""
    reads: dict[str, Any] = field(default_factory=dict)
    """What vLLM takes other fields of the configuration for than Hugging Face does."""
    remark: str = ""
    """Why something is missing or read otherwise, for the table of models."""
    refusal: str = ""
    """What an error says, where no lens is served."""
    is_by_transformers: bool = False
    """Whether vLLM runs transformers' own class, and changes it in its process."""
    cpu_options: dict[str, Any] = field(default_factory=dict)
    """Engine options on a CPU."""
    dtype_on_cpu: str = "float32"
    """For which vLLM's wheel for CPUs has the kernels."""
    needs_gpu: bool = False
    """Whether vLLM's wheel for CPUs lacks a kernel of it."""
    is_text: bool = True
    """Whether it is a language model alone."""
    is_routed: bool = False
    """Whether tokens choose experts: a rounding error of bfloat16 may choose others."""
    has_patterns: bool = False
    """Whether attention patterns are compared, from queries and keys."""
    has_latent_attention: bool = False
    """Whether attention keeps no keys per head (MLA), so that queries and keys are refused."""
    publish: Callable[[Path], None] | None = None
    """Makes what transformers saved what is published."""
    query_norm: float = 1.0
    """Factor of the weights of the norm on queries. Where it alone scales them, as a trained model
    has learnt, attention would be to one token, which rounding may choose."""


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


def _gpt_oss(hidden: int) -> Any:
    from transformers import GptOssConfig

    return GptOssConfig(
        **_common(hidden),
        **_gated(hidden),
        **_EXPERTS,
        num_local_experts=4,
        sliding_window=32,
        layer_types=["sliding_attention", "full_attention"] * (LAYERS // 2),
    )


def _glm4_moe(hidden: int) -> Any:
    from transformers import Glm4MoeConfig

    return Glm4MoeConfig(
        **_common(hidden),
        **_gated(hidden),
        **_EXPERTS,
        moe_intermediate_size=hidden,
        n_routed_experts=4,
        n_shared_experts=1,
        first_k_dense_replace=1,
        routed_scaling_factor=1.5,
        use_qk_norm=True,
        num_mtp_layers=0,
    )


def _latent(hidden: int) -> dict[str, Any]:
    # Widths of heads are the published ones, which alone kernels have.
    given = _common(hidden) | {"num_key_value_heads": hidden // 64}
    return given | {
        "intermediate_size": 2 * hidden,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "moe_intermediate_size": hidden,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 1.5,
        "n_group": 4,
        "topk_group": 2,
        # As published. Unscaled and eager, vLLM's kernel for CPUs takes heads for tokens.
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 32.0,
            "original_max_position_embeddings": 64,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 0.707,
            "mscale_all_dim": 0.707,
        },
    }


def _deepseek_v2(hidden: int) -> Any:
    from transformers import DeepseekV2Config

    return DeepseekV2Config(**_latent(hidden), q_lora_rank=None, topk_method="group_limited_greedy")


def _deepseek_v3(hidden: int) -> Any:
    from transformers import DeepseekV3Config

    # Of published checkpoints: Hugging Face has no fields for the last two, vLLM other defaults.
    return DeepseekV3Config(
        **_latent(hidden),
        q_lora_rank=64,
        num_mtp_layers=0,
        scoring_func="sigmoid",
        topk_method="noaux_tc",
    )


def _sparse(hidden: int) -> dict[str, Any]:
    # Of published checkpoints: vLLM reads the last two, for which Hugging Face has no fields.
    return _latent(hidden) | {
        # Kernels are for the published numbers of heads, or half of them.
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "index_n_heads": 64,
        "index_topk": 512,
        "q_lora_rank": 64,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
    }


def _deepseek_v32(hidden: int) -> Any:
    from transformers import DeepseekV32Config

    return DeepseekV32Config(**_sparse(hidden))


def _glm_moe_dsa(hidden: int) -> Any:
    from transformers import GlmMoeDsaConfig

    plain = {"rope_type": "default", "rope_theta": 1e6}
    given = _sparse(hidden) | {"n_group": 1, "topk_group": 1, "rope_parameters": plain}
    # From the third layer on, every second one takes the choice of the layer before it.
    given |= {"index_topk_freq": 2, "index_n_heads": 32, "indexer_rope_interleave": True}
    return GlmMoeDsaConfig(**given)


def _minimax_m2(hidden: int) -> Any:
    from transformers import MiniMaxM2Config

    # Of published checkpoints: vLLM needs the first two, Hugging Face has no fields for them.
    # Before 5.18, transformers rotates whole heads unless told otherwise, as by `rope_parameters`.
    return MiniMaxM2Config(
        **_common(hidden),
        **_gated(hidden) | {"intermediate_size": hidden},
        **_EXPERTS,
        rotary_dim=32,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 5e6,
            "partial_rotary_factor": 0.5,
        },
        scoring_func="sigmoid",
        use_routing_bias=True,
        use_qk_norm=True,
        num_local_experts=4,
    )


def _phi3(hidden: int) -> Any:
    from transformers import Phi3Config

    return Phi3Config(**_common(hidden), intermediate_size=2 * hidden)


def _llama4(hidden: int) -> Any:
    from transformers import Llama4TextConfig

    # Layers with experts and without, with rotary embedding and without; the former see a chunk.
    return Llama4TextConfig(
        **_common(hidden),
        **_gated(hidden),
        intermediate_size_mlp=2 * hidden,
        num_local_experts=4,
        num_experts_per_tok=1,
        interleave_moe_layer_step=2,
        no_rope_layer_interval=2,
        attention_chunk_size=32,
        floor_scale=32,
        attn_scale=0.1,
    )


def _gemma2(hidden: int) -> Any:
    from transformers import Gemma2Config

    return Gemma2Config(
        **_common(hidden) | {"tie_word_embeddings": True},
        **_gated(hidden),
        query_pre_attn_scalar=64,
        sliding_window=32,
        layer_types=["sliding_attention", "full_attention"] * (LAYERS // 2),
    )


def _gemma3n(hidden: int) -> Any:
    from transformers import Gemma3nTextConfig

    return Gemma3nTextConfig(
        **_common(hidden) | {"tie_word_embeddings": True},
        **_gated(hidden),
        sliding_window=32,
        vocab_size_per_layer_input=VOCAB,
        hidden_size_per_layer_input=32,
        laurel_rank=16,
        num_kv_shared_layers=0,
        activation_sparsity_pattern=[0.0] * LAYERS,
        layer_types=["sliding_attention", "full_attention"] * (LAYERS // 2),
    )


def _cohere(hidden: int) -> Any:
    from transformers import CohereConfig

    return CohereConfig(
        **_common(hidden) | {"tie_word_embeddings": True},
        intermediate_size=2 * hidden,
        use_qk_norm=True,
    )


def _cohere2(hidden: int) -> Any:
    from transformers import Cohere2Config

    return Cohere2Config(
        **_common(hidden) | {"tie_word_embeddings": True},
        intermediate_size=2 * hidden,
        sliding_window=32,
        layer_types=["sliding_attention", "full_attention"] * (LAYERS // 2),
    )


def _exaone4(hidden: int) -> Any:
    from transformers import Exaone4Config

    return Exaone4Config(
        **_common(hidden),
        intermediate_size=2 * hidden,
        sliding_window=32,
        sliding_window_pattern=2,
        layer_types=["sliding_attention", "full_attention"] * (LAYERS // 2),
    )


def _smollm3(hidden: int) -> Any:
    from transformers import SmolLM3Config

    return SmolLM3Config(
        **_common(hidden), intermediate_size=2 * hidden, no_rope_layers=[1, 0] * (LAYERS // 2)
    )


def _gpt_neox(hidden: int) -> Any:
    from transformers import GPTNeoXConfig

    # It has a key for each head; vLLM's backend would read another number here.
    given = _common(hidden) | {"num_key_value_heads": hidden // 64}
    return GPTNeoXConfig(**given, intermediate_size=2 * hidden)


def _gpt2(hidden: int) -> Any:
    from transformers import GPT2Config

    return GPT2Config(
        n_embd=hidden,
        n_layer=LAYERS,
        n_head=hidden // 64,
        n_positions=2048,
        vocab_size=VOCAB,
        bos_token_id=1,
        eos_token_id=2,
    )


def _falcon_h1(hidden: int) -> Any:
    from transformers import FalconH1Config

    return FalconH1Config(
        **_common(hidden),
        intermediate_size=2 * hidden,
        mamba_d_ssm=2 * hidden,
        mamba_n_heads=2 * hidden // 64,
        mamba_d_head=64,
        mamba_d_state=32,
        mamba_n_groups=1,
        mamba_chunk_size=64,
        mamba_rms_norm=True,
        mamba_norm_before_gate=False,
    )


def _nemotron_h(hidden: int) -> Any:
    from transformers import NemotronHConfig

    given = _common(hidden) | {"head_dim": 64}
    del given["num_hidden_layers"]
    return NemotronHConfig(
        **given,
        layers_block_type=["mamba", "mlp", "attention", "mlp"],
        intermediate_size=2 * hidden,
        mamba_num_heads=2 * hidden // 64,
        mamba_head_dim=64,
        ssm_state_size=32,
        n_groups=1,
        chunk_size=64,
    )


def _linear(hidden: int) -> dict[str, Any]:
    return {
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
        "linear_num_key_heads": hidden // 64,
        "linear_num_value_heads": 2 * hidden // 64,
        "layer_types": ["linear_attention", "full_attention"] * (LAYERS // 2),
    }


def _qwen3_next(hidden: int) -> Any:
    from transformers import Qwen3NextConfig

    return Qwen3NextConfig(
        **_common(hidden),
        **_gated(hidden),
        **_EXPERTS,
        **_linear(hidden),
        num_experts=4,
        moe_intermediate_size=hidden,
        shared_expert_intermediate_size=hidden,
    )


def _qwen3_5(hidden: int) -> Any:
    from transformers import Qwen3_5TextConfig

    return Qwen3_5TextConfig(**_common(hidden), **_gated(hidden), **_linear(hidden))


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


def _kimi_k25(hidden: int) -> Any:
    from transformers import Kimi_K25Config

    vision = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 2,
        "patch_size": 16,
    }
    return Kimi_K25Config(
        vision_config=vision,
        text_config=_deepseek_v3(hidden),
        image_token_id=VOCAB - 1,
        pad_token_id=0,
        tie_word_embeddings=False,
    )


def _publish_kimi_k25(folder: Path) -> None:
    """Names as published: transformers 5.19 saves other ones, which vLLM does not know."""
    from safetensors.torch import load_file, save_file

    file = folder / "model.safetensors"
    state = {
        name.replace("language_model.model.blocks.", "language_model.model.layers.").removeprefix(
            "model."
        ): tensor
        for name, tensor in load_file(file).items()
    }
    save_file(state, file, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["architectures"] = ["KimiK25ForConditionalGeneration"]
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    write_words(folder, VOCAB)
    images = {
        "merge_kernel_size": 2, "patch_size": 16, "temporal_merge_kernel_size": 4,
        "image_mean": [0.5] * 3, "image_std": [0.5] * 3, "in_patch_limit": 64,
        "in_patch_limit_each_frame": 64, "in_patch_limit_video": 64,
        "patch_limit_on_one_side": 64, "fixed_output_tokens": None,
    }  # fmt: skip
    (folder / "preprocessor_config.json").write_text(json.dumps({"media_proc_cfg": images}))


_CHOSEN = (
    "compared on texts of at most 100 tokens, of which all are chosen: vLLM chooses in FP8, and "
    "Hugging Face does not; vLLM serves it on GPUs only, with DeepGEMM"
)
_LATENT_SITES = ("resid_pre", "z", "attn_out", "mlp_out", "resid_post")
_OWN_KERNEL = {"gdn_prefill_backend": "triton"}
_OWN_KERNEL_SAID = "on GPUs with vLLM's own kernel (`gdn_prefill_backend`), not with FlashInfer's"
_SCALED = (
    "with scaled rotary embedding (YaRN), as published; unscaled and with `enforce_eager`, vLLM "
    "rotates wrongly on CPUs"
)

_INDEXED = Case(
    "deepseek_v32",
    "DeepSeek-V3.2",
    "latent attention (MLA) to tokens that an indexer chooses, experts by group",
    _deepseek_v32,
    sites=_LATENT_SITES,
    options={"block_size": 64},
    remark=_CHOSEN,
    is_routed=True,
    needs_gpu=True,
    has_latent_attention=True,
)

CASES = (
    Case("llama", "Llama", "fused residual", _llama),
    Case("qwen3", "Qwen3", "fused residual, norms on queries and keys", _qwen3),
    Case(
        "gemma3",
        "Gemma 3",
        "fused residual, four norms, sliding windows",
        _gemma3,
        has_patterns=True,
    ),
    Case(
        "gemma4",
        "Gemma 4",
        "stream alone, input by layer, one list of layers under two names",
        _gemma4,
        query_norm=0.125,
    ),
    Case(
        "opt",
        "OPT",
        "plain residual, feed-forward as two projections",
        _opt,
        layers="model.decoder.layers",
    ),
    Case(
        "olmo2",
        "OLMo 2",
        "plain residual, norms behind the modules",
        _olmo2,
        is_by_transformers=True,
    ),
    Case("mixtral", "Mixtral", "mixture of experts", _mixtral, is_routed=True),
    Case(
        "qwen3_moe", "Qwen3-MoE", "mixture of experts, another router", _qwen3_moe, is_routed=True
    ),
    Case(
        "granite-hybrid",
        "Granite 4 hybrid",
        "state-space (Mamba 2) and attention layers",
        _granite_hybrid,
    ),
    Case(
        "jamba",
        "Jamba",
        "state-space (Mamba 1) and attention layers",
        _jamba,
        needs_gpu=True,
        remark="vLLM's wheel for CPUs lacks the kernel",
    ),
    Case("stablelm", "StableLM", "a residual that nobody adds", _stablelm),
    Case("phi3", "Phi 3", "fused residual, projections in one", _phi3),
    Case(
        "smollm3",
        "SmolLM3",
        "plain residual, layers without rotary embedding",
        _smollm3,
        is_by_transformers=True,
    ),
    Case("gemma2", "Gemma 2", "fused residual, four norms, capped attention", _gemma2),
    Case(
        "gemma3n",
        "Gemma 3n",
        "four streams",
        _gemma3n,
        refusal="output of Gemma3nDecoderLayer",
        remark="none of them is a residual stream to which layers only add",
    ),
    Case(
        "cohere",
        "Command R (Cohere)",
        "one norm for attention and feed-forward, norms on queries and keys",
        _cohere,
    ),
    Case(
        "cohere2",
        "Command R7B (Cohere 2)",
        "one norm for attention and feed-forward, sliding windows",
        _cohere2,
        reads={"sliding_window": 33},
        remark="vLLM's windows are one token wider than those of Hugging Face",
    ),
    Case("exaone4", "Exaone 4", "a residual that nobody adds, norms behind the modules", _exaone4),
    Case(
        "gpt_neox",
        "GPT-NeoX",
        "attention and feed-forward side by side",
        _gpt_neox,
        layers="gpt_neox.layers",
        is_by_transformers=True,
    ),
    Case("gpt2", "GPT-2", "learnt positions", _gpt2, layers="transformer.h"),
    Case("gpt_oss", "gpt-oss", "attention sinks, experts with biases", _gpt_oss, is_routed=True),
    Case(
        "glm4_moe",
        "GLM-4.5 (MoE)",
        "experts behind dense layers, one shared",
        _glm4_moe,
        is_routed=True,
    ),
    Case(
        "deepseek_v2",
        "DeepSeek-V2",
        "latent attention (MLA), experts by group behind dense layers",
        _deepseek_v2,
        sites=_LATENT_SITES,
        # vLLM's other one, for CPUs with AMX, is for bfloat16 alone, and is chosen all the same.
        cpu_options={"attention_backend": "CPU_MLA"},
        remark=_SCALED,
        is_routed=True,
        has_latent_attention=True,
    ),
    Case(
        "deepseek_v3",
        "DeepSeek-V3",
        "latent attention (MLA) with low-rank queries, experts by group, chosen with a bias",
        _deepseek_v3,
        sites=_LATENT_SITES,
        # vLLM's other one, for CPUs with AMX, is for bfloat16 alone, and is chosen all the same.
        cpu_options={"attention_backend": "CPU_MLA"},
        remark=_SCALED,
        is_routed=True,
        has_latent_attention=True,
    ),
    _INDEXED,
    replace(
        _INDEXED,
        name="glm_moe_dsa",
        title="GLM-5",
        layout="latent attention (MLA) to tokens that an indexer chooses, for two layers at once",
        config=_glm_moe_dsa,
    ),
    Case(
        "minimax_m2",
        "MiniMax-M2",
        "experts chosen with a bias, norms over all heads, half of a head rotated",
        _minimax_m2,
        is_routed=True,
        needs_gpu=True,
        remark="vLLM's router for CPUs takes scores by softmax alone, where there are no groups",
    ),
    Case(
        "llama4",
        "Llama 4 (text)",
        "chunked attention, experts in every second layer",
        _llama4,
        is_routed=True,
        reads={"attn_temperature_tuning": False},
        remark="up to a `max_model_len` of 32,768 vLLM does not scale queries of late positions "
        "(`attn_temperature_tuning`)",
    ),
    Case(
        "falcon_h1",
        "Falcon H1",
        "attention and state space side by side",
        _falcon_h1,
        sites=("resid_pre", "mlp_out", "resid_post"),
        remark="no one module has what both add",
    ),
    Case(
        "nemotron_h",
        "Nemotron H",
        "one module in each layer",
        _nemotron_h,
        sites=("resid_pre", "resid_post"),
        reads={"time_step_min": 1e-12},
        remark="a layer is attention, state space or feed-forward; vLLM has no least time step, "
        "for which Hugging Face takes `time_step_min`",
    ),
    Case(
        "qwen3_next",
        "Qwen3-Next",
        "linear attention and experts",
        _qwen3_next,
        options=_OWN_KERNEL,
        is_routed=True,
        dtype_on_cpu="bfloat16",
        remark=f"vLLM's kernel for CPUs takes bfloat16 alone; {_OWN_KERNEL_SAID}",
    ),
    Case(
        "qwen3_5",
        "Qwen3.5 (text)",
        "linear attention",
        _qwen3_5,
        options=_OWN_KERNEL,
        needs_gpu=True,
        remark="vLLM's file of it needs torchvision, which `requirements/cpu.lock` leaves out; "
        + _OWN_KERNEL_SAID,
    ),
    Case(
        "idefics3",
        "Idefics 3 with Llama, text prompts",
        "a language model inside a multimodal wrapper",
        _idefics3,
        layers="model.text_model.layers",
        options={"limit_mm_per_prompt": {"image": 0}},
        is_text=False,
    ),
    Case(
        "kimi_k25",
        "Kimi K2.5 (DeepSeek-V3 in it), text prompts",
        "a language model with latent attention (MLA) inside a multimodal wrapper",
        _kimi_k25,
        layers="model.language_model.layers",
        sites=_LATENT_SITES,
        options={"limit_mm_per_prompt": {"vision_chunk": 0}, "skip_tokenizer_init": False},
        publish=_publish_kimi_k25,
        needs_gpu=True,
        remark="vLLM 0.32 for CPUs does not start once numba is loaded, which its image processor "
        "does",
        is_text=False,
        is_routed=True,
        has_latent_attention=True,
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
                parameter.mul_(case.query_norm if "q_norm" in name else 1.0)
            elif name.endswith((".bias", "sinks")):
                parameter.add_(torch.rand_like(parameter) * 0.5)
        for name, buffer in model.named_buffers():
            if "correction_bias" in name:
                buffer.add_(torch.rand_like(buffer) * 0.1)
    model.to(dtype).save_pretrained(folder)
    if case.publish:
        case.publish(folder)
    return folder
