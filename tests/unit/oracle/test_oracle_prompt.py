"""Placeholders are found in the tokens of the rendered prompt, with the organism's tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from inspect_lens.errors import ArtifactError, SpecError
from inspect_lens.oracle import OracleConfig
from inspect_lens.oracle._load import read_config
from inspect_lens.oracle._send import find_placeholders, oracle_message, placeholder_id
from organism._tokenizer import render
from tests.kit.repository import ROOT

TOKENIZER = Tokenizer.from_file(str(ROOT / "organism/checkpoint/tokenizer.json"))
CONFIG = OracleConfig(
    hook_onto_layer=1,
    special_token=" ?",
    prefix_template="Layer: {layer}\\n{special_token} * {num_positions} \\n",
    steering_coefficient=1.0,
    act_layer_combinations=((1,), (3,), (1, 3)),
)


def encode(text: str) -> list[int]:
    ids: list[int] = TOKENIZER.encode(text, add_special_tokens=False).ids
    return ids


def prompt_ids(question: str, layers: tuple[int, ...], count: int) -> list[int]:
    text = oracle_message(CONFIG, question, layers=layers, count=count)
    return encode(render([{"role": "user", "content": text}], add_generation_prompt=True))


def test_the_message_is_the_published_one() -> None:
    text = oracle_message(CONFIG, "Is it a lie?", layers=(3,), count=4)
    assert text == "Layer: 3\n" + " ?" * 4 + " \n" + "Is it a lie?"


@given(
    count=st.integers(1, 60),
    layers=st.sampled_from([(1,), (3,), (1, 3)]),
    question=st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), min_size=1),
)
@settings(max_examples=80, deadline=None)
def test_found_positions_hold_the_placeholder_and_nothing_else_does(
    count: int, layers: tuple[int, ...], question: str
) -> None:
    if not question.strip() or " ?" in question:
        return
    ids, token = prompt_ids(question, layers, count), placeholder_id(encode(" ?"), " ?")
    found = find_placeholders(ids, token, n_layers=len(layers), count=count)
    assert len(found) == len(layers) * count
    assert {ids[p] for p in found} == {token}
    assert [i for i, t in enumerate(ids) if t == token] == list(found)
    # What stands before the first is the head of the message, decoded back.
    head = TOKENIZER.decode(ids[: found[0]], skip_special_tokens=False)
    assert head == f"<|bos|><|user|>Layer: {layers[0]}\n"


@pytest.mark.parametrize("special", ["??", " placeholder", "\u2603"])
def test_a_placeholder_that_splits_is_refused(special: str) -> None:
    ids = encode(special)
    assert len(ids) > 1
    config = CONFIG.model_copy(update={"special_token": special})
    with pytest.raises(ArtifactError, match=f"is {len(ids)} tokens"):
        placeholder_id(ids, config.special_token)


def test_a_tokenizer_that_merges_placeholders_is_refused() -> None:
    # " ? ?" as one token leaves fewer than were written.
    with pytest.raises(ArtifactError, match=r"has 2 placeholder tokens .* 4 were written"):
        find_placeholders([0, 7, 9, 7, 1], 7, n_layers=1, count=4)


def test_placeholders_with_something_between_them_are_refused() -> None:
    with pytest.raises(ArtifactError, match="not consecutive"):
        find_placeholders([0, 7, 9, 7, 1], 7, n_layers=1, count=2)
    assert find_placeholders([0, 7, 9, 7, 1], 7, n_layers=2, count=1) == (1, 3)


@pytest.mark.parametrize(
    ("question", "count", "reason"),
    [("", 1, "empty"), (" \n", 1, "empty"), ("Is it ?", 1, "placeholder"), ("Is it?", 0, "0 vect")],
)
def test_a_question_that_cannot_be_asked_is_refused(question: str, count: int, reason: str) -> None:
    with pytest.raises(SpecError, match=reason):
        oracle_message(CONFIG, question, layers=(3,), count=count)


def test_the_shipped_oracle_has_this_format() -> None:
    folder: Any = ROOT / "oracles/organism"
    shipped = read_config(Path(folder))
    assert shipped.prefix((3,), 2) == CONFIG.prefix((3,), 2)
    assert shipped.hook_onto_layer == 1
    assert shipped.steering_coefficient == 1.0
    assert shipped.act_layer_combinations == ((1,), (3,), (4,))
