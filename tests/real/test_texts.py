"""Whose the tokens of chat templates are: turns, reasoning, tools. Gemma's template is ours."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from inspect_lens._base.token_texts import TokenTexts
from inspect_lens.probe import TokenText, select_tokens
from tests.kit.real_models import REAL_MODELS

from .conftest import PROMPTS, real_folder

pytestmark = pytest.mark.real

Measured = Callable[[str, float, float], None]

SYSTEM = {"role": "system", "content": "You answer in one word. Straße, 東京."}
CHAT = [
    {"role": "user", "content": "What is the capital of 日本 🇯🇵?"},
    {"role": "assistant", "content": "It is Tōkyō (東京)."},
    {"role": "user", "content": "And of France? Write assistant\nParis."},
]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather of a town.",
            "parameters": {"type": "object", "properties": {"town": {"type": "string"}}},
        },
    }
]
THOUGHT = "<think>\nFrance … its capital, 当然, is Paris.\n</think>\n\n"
ANSWER = "Paris."
CALL = '<tool_call>\n{"name": "weather", "arguments": {"town": "São Paulo"}}\n</tool_call>'


@pytest.fixture(params=list(REAL_MODELS))
def folder(request: pytest.FixtureRequest) -> Path:
    return real_folder(request.param, request.config)


@pytest.fixture
def tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def render(tokenizer: Any, messages: list[dict[str, Any]], **more: Any) -> str:
    options: dict[str, Any] = {"tokenize": False, "add_generation_prompt": True} | more
    return str(tokenizer.apply_chat_template(messages, **options))


def encoded(tokenizer: Any, prompt: str, completion: str) -> tuple[list[int], int]:
    """Ids of a prompt and of what a model would write, and how many are the prompt's."""
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in (prompt, completion)]
    return [*ids[0], *ids[1]], len(ids[0])


def selected(folder: Path, ids: list[int], n_prompt: int, selection: str) -> list[int]:
    """Ids that a selection keeps, as every scorer finds them."""
    texts = TokenTexts.of(str(folder), tokenizer=str(folder))
    tokens = TokenText(
        pieces=tuple(texts.texts(ids)), n_prompt=n_prompt, special=tuple(texts.special(ids))
    )
    return np.array(ids)[select_tokens(tokens, selection)].tolist()


def has_system_role(tokenizer: Any) -> bool:
    return "System role not supported" not in tokenizer.chat_template


@pytest.mark.parametrize("which", list(PROMPTS))
def test_joined_texts_of_tokens_are_the_text(
    folder: Path, tokenizer: Any, which: str, measured: Measured
) -> None:
    text = PROMPTS[which]
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    of_files = TokenTexts.of(str(folder), tokenizer=str(folder)).texts(ids)
    of_transformers = TokenTexts.from_tokenizer(tokenizer).texts(ids)
    assert "".join(of_files) == text
    assert of_files == of_transformers
    measured(f"texts of tokens, {which} prompt", 0.0, 0.0)


@pytest.mark.parametrize("system", [False, True])
def test_turns_of_the_assistant(
    folder: Path, tokenizer: Any, system: bool, measured: Measured
) -> None:
    messages = [SYSTEM, *CHAT] if system else CHAT
    if system and not has_system_role(tokenizer):
        with pytest.raises(Exception, match="System role"):
            render(tokenizer, messages)
        return
    prompt = render(tokenizer, messages)
    ids, n = encoded(tokenizer, prompt, ANSWER)
    kept = tokenizer.decode(selected(folder, ids, n, "assistant"))
    assert kept.strip() == f"{CHAT[1]['content']}{ANSWER}"
    assert tokenizer.decode(selected(folder, ids, n, "completion")).strip() == ANSWER
    role = "with" if system else "without"
    measured(f"the assistant's turns of a chat {role} system message", 0.0, 0.0)


def test_reasoning_and_the_answer_behind_it(
    folder: Path, tokenizer: Any, measured: Measured
) -> None:
    prompt = render(tokenizer, CHAT)
    ids, n = encoded(tokenizer, prompt, THOUGHT + ANSWER)
    thought = tokenizer.decode(selected(folder, ids, n, "reasoning"))
    assert "its capital, 当然, is Paris" in thought
    assert "think" not in thought
    assert tokenizer.decode(selected(folder, ids, n, "answer")).strip() == ANSWER
    measured("reasoning, and the answer behind it", 0.0, 0.0)


def test_tool_calls(folder: Path, tokenizer: Any, measured: Measured) -> None:
    if "tools" not in tokenizer.chat_template:
        prompt = render(tokenizer, CHAT)
    else:
        prompt = render(tokenizer, CHAT, tools=TOOLS)
        # The template itself shows the model how a call looks.
        assert "<tool_call>" in prompt
    ids, n = encoded(tokenizer, prompt, f"I look.\n{CALL}")
    kept = tokenizer.decode(selected(folder, ids, n, "tool_calls"))
    assert kept.strip() == CALL.removeprefix("<tool_call>").removesuffix("</tool_call>").strip()
    measured("tool calls of a completion", 0.0, 0.0)


def test_special_tokens_are_no_text(folder: Path, tokenizer: Any, measured: Measured) -> None:
    prompt = render(tokenizer, CHAT)
    ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    texts = TokenTexts.of(str(folder), tokenizer=str(folder))
    pieces, special = texts.texts(ids), texts.special(ids)
    marks = {piece for piece, marked in zip(pieces, special, strict=True) if marked}
    begin = {"<start_of_turn>", "<end_of_turn>"} if "gemma" in folder.name else {"<|im_start|>"}
    assert begin <= marks
    assert not any(word in "".join(marks) for word in ("capital", "Paris", "日本"))
    assert "".join(pieces) == prompt
    measured("special tokens of the template", 0.0, 0.0)
