"""What tokens match becomes positions of the prompt, or the request is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from inspect_lens import CaptureSpec, LensRequest
from inspect_lens._vllm.frontend.matched_tokens import spans_of, with_positions
from inspect_lens.errors import SpecError, UnsupportedError
from inspect_lens.spec import Add, TokenMatch, resolve_positions
from tests.kit.repository import ROOT

ORGANISM = PreTrainedTokenizerFast.from_pretrained(ROOT / "organism/checkpoint")


def of_bytes() -> PreTrainedTokenizerFast:
    """Each byte is a token, so that a character may be several."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made)


BYTES = of_bytes()


class OneByOne:
    """A tokenizer that can only decode, as Mistral's."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return str(self._inner.decode(ids, skip_special_tokens=skip_special_tokens))


def found(match: TokenMatch, ids: list[int], tokenizer: Any = ORGANISM) -> tuple[int, ...]:
    request = LensRequest(capture=CaptureSpec(layers=[1], positions=match))
    capture = with_positions(request, ids, SimpleNamespace(tokenizer=tokenizer)).capture
    assert capture is not None
    assert isinstance(capture.positions, tuple)
    return tuple(int(position) for position in capture.positions)


def ids_of(text: str, tokenizer: Any = ORGANISM) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


TEXT = "Velosh is in Arda . Is Velosh in Sund ? Say true ."
IDS = ids_of(TEXT)


def words_at(positions: tuple[int, ...]) -> list[str]:
    return [ORGANISM.decode([IDS[p]]).strip() for p in positions]


@pytest.mark.parametrize("tokenizer", [ORGANISM, OneByOne(ORGANISM)], ids=["offsets", "decode"])
def test_a_pattern_finds_the_tokens_of_its_matches(tokenizer: Any) -> None:
    everything = found(TokenMatch(pattern="Velosh"), IDS, tokenizer)
    text, spans = spans_of(IDS, tokenizer)
    expected = [
        i
        for i, (a, b) in enumerate(spans)
        for at in (text.index("Velosh"), text.rindex("Velosh"))
        if a < at + len("Velosh") and b > at
    ]
    assert list(everything) == expected
    half = len(everything) // 2
    assert found(TokenMatch(pattern="Velosh", matches="last"), IDS, tokenizer) == everything[half:]
    first = found(TokenMatch(pattern="Velosh", matches="first", tokens="first"), IDS, tokenizer)
    assert first == everything[:1]
    last = found(TokenMatch(pattern="Velosh", tokens="last"), IDS, tokenizer)
    assert last == (everything[half - 1], everything[-1])
    rest = found(TokenMatch(pattern="Velosh", exclude=True), IDS, tokenizer)
    assert sorted(rest + everything) == list(range(len(IDS)))


def test_ids_are_matched_without_a_tokenizer() -> None:
    wanted = (IDS[0], IDS[-1])
    positions = found(TokenMatch(token_ids=wanted), IDS, None)
    assert positions == tuple(i for i, token in enumerate(IDS) if token in wanted)


def test_edits_and_captures_get_positions_of_their_own() -> None:
    edits = [
        Add(vector=np.ones(4), layers=[1], positions=TokenMatch(token_ids=[IDS[0]])),
        Add(vector=np.ones(4), layers=[1], positions=[2]),
    ]
    request = LensRequest(edits=edits)
    changed = with_positions(request, IDS, SimpleNamespace(tokenizer=None))
    where = tuple(i for i, token in enumerate(IDS) if token == IDS[0])
    assert [edit.positions for edit in changed.edits] == [where, (2,)]
    assert [edit.positions for edit in request.edits][1] == (2,)


def test_a_request_that_matches_nothing_is_left_as_it_is() -> None:
    request = LensRequest(capture=CaptureSpec(layers=[1], positions=[0]))
    assert with_positions(request, None, None) is request


@settings(max_examples=200, deadline=None)
@given(st.text(min_size=1, max_size=30).filter(lambda text: "\ufffd" not in text))
@pytest.mark.parametrize("tokenizer", [BYTES, OneByOne(BYTES)], ids=["offsets", "decode"])
def test_each_character_lies_where_its_tokens_lie(tokenizer: Any, text: str) -> None:
    if any("\ud800" <= c <= "\udfff" for c in text):
        return
    ids = ids_of(text, BYTES)
    read, spans = spans_of(ids, tokenizer)
    assert read == text
    # Each byte is a token: as many tokens lie at a character as it has bytes.
    for i, char in enumerate(text):
        assert sum(a <= i < b for a, b in spans) == len(char.encode())
    assert all(b - a == 1 for a, b in spans)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, "either a pattern or token_ids"),
        ({"pattern": "a", "token_ids": [1]}, "either a pattern or token_ids"),
        ({"pattern": "("}, "no regular expression"),
        ({"pattern": ""}, "has 0 characters"),
        ({"pattern": "a" * 1001}, "has 1001 characters"),
        ({"token_ids": []}, "at least one id"),
        ({"token_ids": [1.5]}, "token_ids"),
        ({"pattern": "a", "which": "all"}, "which"),
        ({"pattern": "a", "matches": "second"}, "matches"),
    ],
)
def test_a_wrong_match_is_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        CaptureSpec(layers=[1], positions=fields)


def test_a_pattern_that_takes_for_ever_is_refused() -> None:
    ids = ids_of("a" * 60, BYTES)
    with pytest.raises(SpecError, match="simpler pattern"):
        found(TokenMatch(pattern="(a|aa)+$(?<=b)|(a+)+b"), ids, BYTES)


@pytest.mark.parametrize(
    ("match", "words"),
    [
        (TokenMatch(pattern="Nowhere"), "no token of the prompt"),
        (TokenMatch(token_ids=[10**6]), "no token of the prompt"),
        (TokenMatch(pattern="(?s).+", exclude=True), "every token of the prompt is excluded"),
    ],
)
def test_what_means_no_token_is_refused(match: TokenMatch, words: str) -> None:
    with pytest.raises(SpecError, match=words):
        found(match, IDS)


def test_what_is_not_there_is_named() -> None:
    with pytest.raises(UnsupportedError, match="give token_ids"):
        found(TokenMatch(pattern="a"), IDS, None)
    request = LensRequest(capture=CaptureSpec(positions=TokenMatch(pattern="a")))
    with pytest.raises(UnsupportedError, match="prompt of tokens"):
        with_positions(request, None, SimpleNamespace(tokenizer=ORGANISM))
    with pytest.raises(SpecError, match="known to the server alone"):
        resolve_positions(TokenMatch(pattern="a"), n_prompt=3, n_max=4, field="positions")
