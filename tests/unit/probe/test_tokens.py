from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from inspect_lens.errors import SpecError
from inspect_lens.probe import SELECTIONS, TokenText, select_tokens

PROMPT = ["<|im_start|>", "user", "\n", "Hi", "<|im_end|>", "\n", "<|im_start|>", "assistant", "\n",
          "Old", " answer", "<|im_end|>", "\n", "<|im_start|>", "assistant", "\n"]  # fmt: skip
DONE = ["<think>", "hm", " so", "</think>", "\n\n", "Yes", " 42", "<tool_call>", '{"a"', ":1}",
        "</tool_call>", "<|im_end|>"]  # fmt: skip
CHAT = TokenText(
    pieces=(*PROMPT, *DONE),
    n_prompt=len(PROMPT),
    special=tuple(p.startswith("<|") for p in (*PROMPT, *DONE)),
)


def chosen(selection: str, tokens: TokenText = CHAT) -> list[str]:
    return [p for p, m in zip(tokens.pieces, select_tokens(tokens, selection), strict=True) if m]


@pytest.mark.parametrize(
    ("selection", "pieces"),
    [
        ("completion", DONE[:-1]),
        ("prompt", [p for p in PROMPT if not p.startswith("<|")]),
        ("last:3", DONE[-4:-1]),
        ("assistant", ["Old", " answer", *DONE[:-1]]),
        ("user", ["Hi"]),
        ("reasoning", ["hm", " so"]),
        ("answer", DONE[5:-1]),
        ("tool_calls", ['{"a"', ":1}"]),
        (r"regex:\d\d", [" 42"]),
        (r"regex:a(ns)wer", []),
        (r"regex:Y(e)s", ["Yes"]),
    ],
)
def test_selection(selection: str, pieces: list[str]) -> None:
    assert chosen(selection) == pieces


def test_reasoning_may_begin_in_the_prompt_and_never_end() -> None:
    tokens = TokenText(pieces=("<think>", "\n", "all", " of", " it"), n_prompt=2)
    assert chosen("reasoning", tokens) == ["all", " of", " it"]
    assert chosen("answer", tokens) == []
    plain = TokenText(pieces=("Q", "A", "B"), n_prompt=1)
    assert chosen("reasoning", plain) == []
    assert chosen("answer", plain) == ["A", "B"]


def test_a_token_is_chosen_by_any_part_of_it() -> None:
    tokens = TokenText(pieces=("Q", "so</th", "ink>", " Yes"), n_prompt=1)
    assert chosen("reasoning", TokenText(pieces=("<think>", *tokens.pieces[1:]), n_prompt=1)) == [
        "so</th"
    ]


def test_turns_of_other_templates() -> None:
    llama = ["<|start_header_id|>", "assistant", "<|end_header_id|>", "\n\n", "ok", "<|eot_id|>"]
    gemma = ["<start_of_turn>", "model", "\n", "fine", "<end_of_turn>"]
    phi = ["<|user|>", "\n", "Who", "?", "<|end|>", "\n", "<|assistant|>", "\n", "I", "<|end|>"]
    for pieces, role, wanted in (
        (llama, "assistant", ["ok"]),
        (gemma, "assistant", ["fine"]),
        (phi, "assistant", ["I"]),
        (phi, "user", ["Who", "?"]),
    ):
        tokens = TokenText(pieces=tuple(pieces), n_prompt=len(pieces))
        assert chosen(role, tokens) == wanted


@given(st.lists(st.text(alphabet="ab<>/ .", max_size=4), max_size=12), st.data())
def test_reasoning_and_answer_never_overlap_nor_reach_into_the_prompt(
    pieces: list[str], data: st.DataObject
) -> None:
    n_prompt = data.draw(st.integers(0, len(pieces)))
    tokens = TokenText(pieces=tuple(pieces), n_prompt=n_prompt)
    for name in ("completion", "prompt", "all", "last:2", "assistant", "tool_calls", "regex:a+"):
        mask = select_tokens(tokens, name)
        assert mask.shape == (len(pieces),)
        if name not in ("prompt", "all", "assistant"):
            assert not mask[:n_prompt].any()
    assert not (select_tokens(tokens, "reasoning") & select_tokens(tokens, "answer")).any()


def test_what_is_not_known_is_refused() -> None:
    for bad in ("thoughts", "last", "last:0", "completion:3", "regex:("):
        with pytest.raises(SpecError, match="allowed"):
            select_tokens(CHAT, bad)
    with pytest.raises(SpecError, match="n_prompt=9"):
        TokenText(pieces=("a",), n_prompt=9)
    with pytest.raises(SpecError, match="special: 1 values"):
        TokenText(pieces=("a", "b"), n_prompt=1, special=(True,))
    assert re.search("last:K", " ".join(SELECTIONS))
    assert np.flatnonzero(select_tokens(CHAT, "last:1", keep_special=True))[0] == 27
