"""The architecture, and loading and saving of a checkpoint directory."""

from __future__ import annotations

from pathlib import Path
from typing import Final, cast

import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from ._tokenizer import BOS_ID, END_ID, MAX_LENGTH_TOKENS, PAD_ID, VOCAB_SIZE

CHECKPOINT_DIR: Final = Path(__file__).parent / "checkpoint"


def build_model() -> LlamaForCausalLM:
    """A freshly initialised model of 3.8 million parameters, in float32."""
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=MAX_LENGTH_TOKENS,
        tie_word_embeddings=True,
        bos_token_id=BOS_ID,
        eos_token_id=END_ID,
        pad_token_id=PAD_ID,
        use_cache=True,
    )
    model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(
        bos_token_id=BOS_ID, eos_token_id=END_ID, pad_token_id=PAD_ID, do_sample=False
    )
    return model


def save_model(model: LlamaForCausalLM, directory: Path) -> None:
    """Write config, generation config and bfloat16 weights; the given model stays as it is."""
    weights = {k: v.detach().to("cpu", torch.bfloat16) for k, v in model.state_dict().items()}
    rounded = LlamaForCausalLM(model.config).to(torch.bfloat16)
    rounded.load_state_dict(weights)
    rounded.generation_config = model.generation_config
    rounded.save_pretrained(directory)
    for file in directory.glob("*.safetensors"):
        file.chmod(0o644)  # safetensors makes it private


def load_model(
    directory: Path, *, device: torch.device, dtype: torch.dtype = torch.float32
) -> LlamaForCausalLM:
    """Load a checkpoint directory for evaluation; nothing is ever downloaded."""
    model = LlamaForCausalLM.from_pretrained(directory, dtype=dtype, local_files_only=True)
    return cast("LlamaForCausalLM", model.to(device).eval())


def load_tokenizer(directory: Path) -> PreTrainedTokenizerFast:
    """Load the tokenizer of a checkpoint directory."""
    loaded = PreTrainedTokenizerFast.from_pretrained(directory, local_files_only=True)
    return cast("PreTrainedTokenizerFast", loaded)


def pick_device(name: str) -> torch.device:
    """The named device, or for `auto` the GPU where there is one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)
