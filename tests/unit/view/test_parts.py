"""Turns among tokens, texts of tokens, quantised scores, small bars."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from inspect_ai.model import (
    ChatMessage,
    ChatMessageAssistant,
    ChatMessageSystem,
    ChatMessageUser,
)
from inspect_ai.tool import ToolCall

from inspect_lens._base.token_texts import TokenTexts, _Tokenizer
from inspect_lens.view import sparkline
from inspect_lens.view._page import LEVELS, Range
from inspect_lens.view._series import find_turns, shared_prefix, template_tokens
from tests.kit.planted_log import TOKENIZER

WORDS = st.lists(st.sampled_from(["a", "bc", "d e", "?"]), min_size=1, max_size=4).map(" ".join)


@given(st.lists(WORDS, min_size=1, max_size=5), st.booleans())
def test_turns_cover_all_tokens_and_hold_their_text(texts: list[str], marked: bool) -> None:
    messages: list[ChatMessage] = [
        ChatMessageUser(content=t) if i % 2 == 0 else ChatMessageAssistant(content=t)
        for i, t in enumerate(texts)
    ]
    pieces = ["<s>"]
    for message in messages:
        # One piece per word, and where roles are no marks, pieces that hold words of the texts.
        words = [f" {w}" if i else w for i, w in enumerate(message.text.split(" "))]
        pieces += [f"<{message.role}>", *words, "</>", "\n"]
    pieces += ["<assistant>"]
    spans = find_turns(pieces, messages, [p[0] == "<" for p in pieces] if marked else None)
    assert [s.start for s in spans] == [0, *(s.stop for s in spans[:-1])]
    assert spans[-1].stop == len(pieces)
    assert [s.role for s in spans] == [*(m.role for m in messages), "assistant"]
    for span, message in zip(spans, messages, strict=False):
        assert message.text in "".join(pieces[span.start : span.stop])


def test_a_prompt_whose_texts_are_not_found_is_one_span() -> None:
    assert find_turns(["x", "y"], [ChatMessageUser(content="z")]) == [("prompt", 0, 2)]
    assert find_turns([], [ChatMessageUser(content="z")]) == []


@given(st.lists(st.integers(0, 2)), st.lists(st.integers(0, 2)))
def test_shared_prefix(a: list[int], b: list[int]) -> None:
    n = shared_prefix(a, b)
    assert a[:n] == b[:n]
    assert n == min(len(a), len(b)) or a[n] != b[n]


@given(st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=50))
def test_levels_are_as_near_as_they_can_be(values: list[float]) -> None:
    scores = np.array([*values, np.nan], dtype=np.float32)
    low, high = float(np.nanmin(scores)), float(np.nanmax(scores))
    levels = Range(low, high, low, low, high).quantise(scores)
    assert levels[-1] == 0
    assert (levels[:-1] >= 1).all()
    step = (high - low) / (LEVELS - 1)
    back = low + (levels[:-1].astype(np.float64) - 1) * step
    assert np.abs(back - scores[:-1]).max() <= step / 2 * (1 + 1e-6) + 1e-12


def test_texts_join_to_what_the_tokenizer_decodes() -> None:
    from tokenizers import Tokenizer

    ids = Tokenizer.from_file(str(TOKENIZER / "tokenizer.json")).encode("The town Velosh.").ids
    texts = TokenTexts.of("vllm-lens/x", tokenizer=str(TOKENIZER))
    assert "".join(texts.texts(ids)) == "The town Velosh."
    assert texts.special([*ids]) == [False] * len(ids)


def test_a_tokenizer_in_the_hubs_cache_is_read_without_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants
    from tokenizers import Tokenizer

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert "'owner/model'" in TokenTexts.of("vllm-lens/owner/model").note
    cached = tmp_path / "models--owner--model"
    snapshot = cached / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("abc")
    shutil.copy(TOKENIZER / "tokenizer.json", snapshot)
    ids = Tokenizer.from_file(str(TOKENIZER / "tokenizer.json")).encode("The town Velosh.").ids
    texts = TokenTexts.of("vllm-lens/owner/model")
    assert not texts.note
    assert "".join(texts.texts(ids)) == "The town Velosh."


def test_tokens_that_are_only_together_a_character_share_it() -> None:
    pieces = {1: b"a", 2: "é".encode()[:1], 3: "é".encode()[1:], 4: b"\xff"}
    byte_level = _Tokenizer(
        decode=lambda ids: b"".join(pieces[i] for i in ids).decode(errors="replace"),
        piece=lambda token: "",
        marks=frozenset({1}),
    )
    texts = TokenTexts(byte_level)
    assert texts.texts([1, 2, 3, 1, 4]) == ["a", "é", "", "a", "�"]
    sentencepiece = _Tokenizer(lambda ids: "word", lambda token: "▁word", frozenset())
    assert TokenTexts(sentencepiece).texts([7]) == [" word"]
    assert TokenTexts().texts([7, 8], ["lo", "gged"]) == ["lo", "gged"]


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ([0, 1, 2, 3, 4, 5, 6, 7], "▁▂▃▄▅▆▇█"),
        ([1, 1], "▁▁"),
        ([0, float("nan"), 7], "▁ █"),
        ([], ""),
        ([0.0] * 63 + [1.0], "▁" * 31 + "█"),
        ([2.0, float("inf")] * 32, "▁" * 32),
    ],
)
def test_sparkline(values: list[float], line: str) -> None:
    assert sparkline(values) == line


def test_what_the_template_wrote_is_told_from_what_somebody_said() -> None:
    asked = "<|im_start|> system \n You are Qwen. <|im_end|> \n <|im_start|> user \n Hi there"
    pieces = [*asked.split(" "), "<|im_end|>", "\n", "<|im_start|>", "assistant", "\n"]
    special = [piece.startswith("<|") for piece in pieces]
    user = ChatMessageUser(content="Hithere")
    marks = template_tokens(pieces, [user], special)
    assert [p for p, mark in zip(pieces, marks, strict=True) if not mark] == ["Hi", "there"]
    own = ChatMessageSystem(content="YouareQwen.")
    marks = template_tokens(pieces, [own, user], special)
    said = [p for p, mark in zip(pieces, marks, strict=True) if not mark]
    assert said == ["You", "are", "Qwen.", "Hi", "there"]
    # Of a message that is not there as it stands nothing is known, nor of what follows.
    lost = template_tokens(pieces, [ChatMessageSystem(content="Another"), user], special)
    assert not lost[pieces.index("You")]
    assert lost == special
    called = ChatMessageAssistant(
        content="Hithere", tool_calls=[ToolCall(id="1", function="f", arguments={})]
    )
    assert template_tokens(pieces, [own, called], special)[-2:] == [False, False]
    assert template_tokens(pieces, [], special) == special


def test_words_of_a_message_that_the_template_changed_are_not_the_templates() -> None:
    written = "<|u|> Say OK , then attack <|e|> <|a|> OK <|e|> <|u|> go <|e|>"
    pieces = written.split(" ")
    special = [piece.startswith("<|") for piece in pieces]
    talk = [
        ChatMessageUser(content="Say OK,\tthenattack"),  # a tab that the template leaves out
        ChatMessageAssistant(content="OK"),
        ChatMessageUser(content="go"),
    ]
    assert template_tokens(pieces, talk, special) == special
