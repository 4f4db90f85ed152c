"""Texts of a lens become ids, or the request is refused."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from inspect_lens import LensRequest
from inspect_lens._vllm.frontend.admission import with_token_ids
from inspect_lens.errors import SpecError, UnsupportedError
from tests.kit.steps import FACTS

WORDS = {" Paris": [3], "new town": [4, 5], "Paris": [3], "late": [200]}
FACTS_OF_VOCAB = replace(FACTS, vocab=100)


class Tokenizer:
    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [1, *WORDS[text]] if add_special_tokens else WORDS[text]


def resolved(tokens: list[Any], tokenizer: Any = None) -> LensRequest:
    request = LensRequest(lens={"layers": [0], "tokens": tokens})
    processor = SimpleNamespace(tokenizer=tokenizer)
    return with_token_ids(request, processor, FACTS_OF_VOCAB)


def test_a_text_of_one_token_becomes_its_id() -> None:
    request = resolved([7, " Paris"], Tokenizer())
    assert request.lens is not None
    assert request.lens.tokens == (7, 3)


def test_ids_need_no_tokenizer() -> None:
    request = resolved([7])
    assert request.lens is not None
    assert request.lens.tokens == (7,)


@pytest.mark.parametrize(
    ("tokens", "words"),
    [
        (["new town"], r"is 2 tokens of this model, \[4, 5\]"),
        ([" Paris", "Paris"], "name each once"),
        ([3, " Paris"], "name each once"),
        (["late"], "id 200; m has ids 0 to 99"),
    ],
)
def test_what_is_not_one_token_is_refused(tokens: list[Any], words: str) -> None:
    with pytest.raises(SpecError, match=words):
        resolved(tokens, Tokenizer())


def test_texts_need_a_tokenizer() -> None:
    with pytest.raises(UnsupportedError, match="give ids instead"):
        resolved([" Paris"])
