"""The forward pass of the Llama architecture for training: the same function, far fewer kernels."""

from __future__ import annotations

import torch
from torch.nn import functional
from transformers import LlamaForCausalLM


def training_logits(
    model: LlamaForCausalLM, ids: torch.Tensor, *, dtype: torch.dtype
) -> torch.Tensor:
    """Next-token logits of right-padded rows, as `model(ids).logits` gives them.

    Padding on the right is invisible to a causal model, so there is no mask. The residual stream
    and the parameters stay in float32; a test holds this function to the original.

    Args:
        model: The model whose parameters are used.
        ids: (rows, tokens) int64.
        dtype: In what the matrix products and the attention are computed.

    Returns:
        (rows, tokens, vocabulary) logits in `dtype`.
    """
    core, config = model.model, model.config
    n_q, n_kv, eps = config.num_attention_heads, config.num_key_value_heads, config.rms_norm_eps
    rows, tokens = ids.shape
    x = functional.embedding(ids, core.embed_tokens.weight)
    cos, sin = core.rotary_emb(x, torch.arange(tokens, device=ids.device)[None])
    cos, sin = cos.to(dtype)[:, None], sin.to(dtype)[:, None]
    for layer in core.layers:
        attention, mlp = layer.self_attn, layer.mlp
        h = _norm(x, layer.input_layernorm.weight, eps).to(dtype)
        parts = (attention.q_proj, attention.k_proj, attention.v_proj)
        qkv = functional.linear(h, torch.cat([p.weight for p in parts]).to(dtype))
        qkv = qkv.view(rows, tokens, n_q + 2 * n_kv, -1).transpose(1, 2)
        qk, v = qkv[:, : n_q + n_kv], qkv[:, n_q + n_kv :]
        low, high = qk.chunk(2, dim=-1)
        qk = qk * cos + torch.cat([-high, low], dim=-1) * sin
        mixed = functional.scaled_dot_product_attention(
            qk[:, :n_q], qk[:, n_q:], v, is_causal=True, enable_gqa=True
        )
        mixed = mixed.transpose(1, 2).reshape(rows, tokens, -1)
        x = x + functional.linear(mixed, attention.o_proj.weight.to(dtype))
        h = _norm(x, layer.post_attention_layernorm.weight, eps).to(dtype)
        both = torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]).to(dtype)
        gate, up = functional.linear(h, both).chunk(2, dim=-1)
        x = x + functional.linear(functional.silu(gate) * up, mlp.down_proj.weight.to(dtype))
    h = _norm(x, core.norm.weight, eps).to(dtype)
    return functional.linear(h, model.lm_head.weight.to(dtype))


def _norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Root-mean-square normalisation of the last dimension."""
    return functional.rms_norm(x, weight.shape, weight, eps)
