"""Tiny random checkpoints, written as real Hugging Face directories."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from .repository import ROOT

__all__ = [
    "BITS",
    "READOUT",
    "RESERVED",
    "marked_llama",
    "tiny_idefics3",
    "tiny_llama",
    "write_words",
]

BITS = 16
"""Hidden coordinates 0 to 15 of a marked model hold the bits of the token's id as -1 or +1."""
READOUT = 16
"""A hidden coordinate that no weight of a marked model writes: 0 unless it is steered."""
RESERVED = 24
"""Coordinates below this one reach every layer exactly as the embedding wrote them."""


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


def marked_llama(
    folder: Path,
    *,
    layers: int = 4,
    hidden: int = 256,
    vocab: int = 8192,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Path:
    """Write a tiny Llama whose residual stream says which token each row belongs to.

    No attention or MLP block writes the reserved coordinates, so the bits of the token id stand
    there after every layer, exact in any float type. With prompts that use every id once, a
    captured row names its request and position; and an edit of coordinate `READOUT` can be read
    after any later layer. A word-level tokenizer is written too: id 17 is the word `t17`.
    """
    tiny_llama(folder, layers=layers, hidden=hidden, vocab=vocab, dtype=dtype, seed=seed)
    model = LlamaForCausalLM.from_pretrained(folder, dtype=dtype)
    ids = torch.arange(vocab)
    with torch.no_grad():
        table = model.model.embed_tokens.weight
        table[:, :RESERVED] = 0
        for bit in range(BITS):
            table[:, bit] = ((ids >> bit) & 1) * 2 - 1
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight[:RESERVED] = 0
            layer.mlp.down_proj.weight[:RESERVED] = 0
    model.save_pretrained(folder)
    write_words(folder, vocab)
    return folder


def write_words(folder: Path, vocab: int) -> None:
    """Write a word-level tokenizer beside a model: id 17 is the word `t17`."""
    words = Tokenizer(WordLevel({f"t{i}": i for i in range(vocab)}, unk_token="t0"))
    words.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, bos_token="t1", eos_token="t2")
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    tokenizer.save_pretrained(folder)


def tiny_idefics3(folder: Path) -> Path:
    """Write a random Idefics 3 with tokenizer and processor, which makes an image seven tokens.

    Its tokenizer is the organism's, and has a chat template: vLLM puts `<image>` where an image is.
    """
    from transformers import (
        AutoTokenizer,
        Idefics3Config,
        Idefics3ForConditionalGeneration,
        Idefics3Processor,
    )
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "organism" / "checkpoint")
    special = ["<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"]
    tokenizer.add_special_tokens({"additional_special_tokens": special})
    text = LlamaConfig(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
        vocab_size=len(tokenizer),
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    vision = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 64,
        "patch_size": 16,
    }
    config = Idefics3Config(
        vision_config=vision,
        text_config=text,
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        pad_token_id=tokenizer.pad_token_id,
        scale_factor=2,
        tie_word_embeddings=False,
    )
    model = Idefics3ForConditionalGeneration(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.normal_(0, 1.2 / parameter.shape[1] ** 0.5)
    model.save_pretrained(folder)
    size = {"longest_edge": vision["image_size"]}
    images = Idefics3ImageProcessorPil(size=size, max_image_size=size, do_image_splitting=False)
    template = tokenizer.chat_template
    Idefics3Processor(images, tokenizer, image_seq_len=4, chat_template=template).save_pretrained(
        folder
    )
    return folder
