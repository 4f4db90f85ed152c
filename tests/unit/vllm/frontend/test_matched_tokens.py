"""What tokens match becomes positions of the prompt, or the request is refused."""

from __future__ import annotations

import contextlib
import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from inspect_lens import CaptureSpec, LensRequest
from inspect_lens._vllm.frontend.admission import spans_of, with_positions
from inspect_lens._vllm.http.bodies import SERVED, Body
from inspect_lens.errors import SpecError, UnsupportedError
from inspect_lens.spec import (
    Add,
    EngineEdits,
    TokenMatch,
    parse_extra_args,
    resolve_positions,
)
from tests.kit.costs import cost
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


class OneByteEach:
    """A fast tokenizer of one letter a token, whose work is next to nothing."""

    is_fast = True

    def decode(self, ids: list[int], **options: Any) -> str:
        return bytes(ids).decode()

    def __call__(self, text: str, **options: Any) -> dict[str, Any]:
        offsets = [(i, i + 1) for i in range(len(text))]
        return {"input_ids": list(text.encode()), "offset_mapping": offsets}


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


ATTACKS = {
    "repetition": "(?:a{3000}){3000}|Vel",
    "wide classes": "(?i)" + r"[\pL\pN]" * 120,
    "wide classes, optional": "(?i)" + r"[\pL]?" * 140,
    "negated": "(?i)" + "[^é]" * 240,
    "nested": "(" * 300 + "a" + ")" * 300,
    "fuzzy": "Vel{e<=1}",
    "look-behind": "(?<=a)b",
    "back-reference": r"(a)\1",
    "half a character": "\ud800",
    "optional": "a?" * 250 + "a" * 250,
    "states": "(?:[ab]{1,9}a){90}c",
    "far": "a.*b|a",
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_no_pattern_takes_long_to_judge_or_to_run(attack: str) -> None:
    """Judged in hundredths of a second, run in tenths, over 32 prompts of one body."""
    asked = {"capture": {"positions": {"pattern": ATTACKS[attack]}}}
    said = ""
    with cost() as judged:
        try:
            request = parse_extra_args({"inspect_lens": asked})
        except SpecError as error:
            said = str(error)
    assert judged.is_at_most(0.25)
    if said:
        assert re.search(r"capture.positions.*(regular expression|surrogate)", said)
        assert len(said) < 600
        return
    assert request is not None
    processor = SimpleNamespace(tokenizer=OneByteEach())
    token = SERVED.set(Body(request))
    prompts = [[97 + (i * k * k) % 2 for k in range(50_000)] for i in range(32)]
    try:
        with cost() as run:
            for ids in prompts:
                with contextlib.suppress(SpecError):
                    with_positions(request, ids, processor)
    finally:
        SERVED.reset(token)
    assert run.is_at_most(2.0)


def test_prompts_of_a_body_are_matched_once() -> None:
    request = LensRequest(capture=CaptureSpec(positions=TokenMatch(pattern="Velosh")))
    token = SERVED.set(Body(request))
    try:
        processor = SimpleNamespace(tokenizer=ORGANISM)
        first = with_positions(request, IDS, processor)
        assert with_positions(request, IDS, SimpleNamespace(tokenizer=None)) == first
    finally:
        SERVED.reset(token)


def test_many_patterns_are_refused_together() -> None:
    edits = [{"op": "zero", "layers": [1], "positions": {"pattern": f"a{i}"}} for i in range(20)]
    with pytest.raises(SpecError, match=r"20 different patterns.*at most 16"):
        parse_extra_args({"inspect_lens": {"edits": edits}})
    same = [{**edit, "positions": {"pattern": "a"}} for edit in edits]
    assert parse_extra_args({"inspect_lens": {"edits": same}}) is not None
    with pytest.raises(SpecError, match="20 different patterns"):
        EngineEdits(edits=edits)


@pytest.mark.parametrize(
    ("match", "words"),
    [
        (TokenMatch(pattern="Nowhere"), "no token of the prompt"),
        (TokenMatch(token_ids=[10**6]), "no token of the prompt"),
        (TokenMatch(pattern="Nowhere", exclude=True), "matches, so none would be excluded"),
        (TokenMatch(pattern="(?s).+", exclude=True), "all .* tokens .* excluded, so none is left"),
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
