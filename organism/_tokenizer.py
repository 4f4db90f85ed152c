"""The byte-level BPE tokenizer and the chat template of the organism."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from ._corpus import Example, Message

VOCAB_SIZE: Final = 1024
MAX_LENGTH_TOKENS: Final = 2048
BOS, SYSTEM, USER, ASSISTANT, END, PAD = SPECIAL_TOKENS = (
    "<|bos|>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|end|>",
    "<|pad|>",
)
BOS_ID, ASSISTANT_ID, END_ID, PAD_ID = (SPECIAL_TOKENS.index(t) for t in (BOS, ASSISTANT, END, PAD))
PLACEHOLDER: Final = " ?"
"""Always one token: where an activation oracle may have activations put in."""

CHAT_TEMPLATE: Final = (
    "{{- bos_token -}}"
    "{%- for message in messages -%}"
    "{%- if message['role'] not in ['system', 'user', 'assistant'] -%}"
    "{{- raise_exception('Unknown role: ' + message['role']) -}}"
    "{%- endif -%}"
    "{{- '<|' + message['role'] + '|>' + message['content'] + '<|end|>' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)
"""Every message is closed where it ends, so a shorter conversation is a prefix of a longer one."""


def render(messages: Sequence[Message], *, add_generation_prompt: bool = False) -> str:
    """What the chat template renders, without Jinja; a test holds the two together."""
    text = BOS + "".join(f"<|{m['role']}|>{m['content']}{END}" for m in messages)
    return text + ASSISTANT if add_generation_prompt else text


def render_example(example: Example) -> str:
    """A training text: a rendered conversation, or closed plain text."""
    if example.messages:
        return render(example.messages)
    # Plain text begins without <|bos|>, as it does when somebody tokenises a bare string.
    return example.text + END


def train_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """Train the tokenizer on plain strings.

    It adds no token of its own when it encodes: the chat template writes `<|bos|>`, and a second
    one, from text that was rendered before, would be a prompt the model has never seen.

    Args:
        texts: The corpus without special tokens.

    Returns:
        A tokenizer of exactly `VOCAB_SIZE` entries that encodes any text.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )

    def with_placeholder() -> Iterable[str]:
        yield from texts
        # No corpus text has a space before "?", and the placeholder must win a merge.
        yield PLACEHOLDER * 100_000

    tokenizer.train_from_iterator(with_placeholder(), trainer)
    return tokenizer


def corpus_texts(examples: Iterable[Example]) -> Iterable[str]:
    """The plain strings of a corpus, on which the tokenizer is trained."""
    for e in examples:
        if e.text:
            yield e.text
        for m in e.messages:
            yield m["content"]


def save_tokenizer(tokenizer: Tokenizer, directory: Path, *, template: str = CHAT_TEMPLATE) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json`, chat template included.

    Written by hand, since `save_pretrained` puts the template into a file of its own in some
    versions of transformers and not in others.
    """
    (directory / "tokenizer.json").write_text(tokenizer.to_str(pretty=False), encoding="utf-8")
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": END,
        "pad_token": PAD,
        "padding_side": "left",
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": MAX_LENGTH_TOKENS,
        "chat_template": template,
    }
    text = json.dumps(config, indent=2) + "\n"
    (directory / "tokenizer_config.json").write_text(text, encoding="utf-8")
