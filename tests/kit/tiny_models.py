"""Tiny random checkpoints, written as real Hugging Face directories."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

__all__ = ["tiny_llama"]


def tiny_llama(
    folder: Path,
    *,
    layers: int = 4,
    hidden: int = 128,
    vocab: int = 320,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Path:
    """Write a random Llama with head_dim 64, the smallest that CPU attention takes easily.

    Weights are drawn wide enough that every layer changes the residual stream visibly: with
    the usual initial scale all layers stay near the embedding, and a test that mixes layers up
    would pass.
    """
    torch.manual_seed(seed)
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=max(1, hidden // 128),
        head_dim=64,
        vocab_size=vocab,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.normal_(0, 1.2 / parameter.shape[1] ** 0.5)
    model.to(dtype).save_pretrained(folder)
    return folder
