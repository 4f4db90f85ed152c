"""A logit lens as it is asked for, judged, and read back."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from inspect_lens import LensRequest
from inspect_lens.errors import SpecError, UnsupportedError
from inspect_lens.spec import (
    MOST_TOKENS,
    LensReceipt,
    LogitLens,
    check_request,
    parse_extra_args,
    to_extra_args,
    to_wire_args,
)
from tests.kit.steps import FACTS

VOCAB_FACTS = replace(FACTS, vocab=100)


@pytest.mark.parametrize(
    ("asked", "layers"), [("all", "all"), (True, "all"), (2, (2,)), ([5, 0], (0, 5))]
)
def test_layers_alone_will_do(asked: Any, layers: Any) -> None:
    request = parse_extra_args({"inspect_lens": {"lens": asked}})
    assert request is not None
    assert request.lens == LogitLens(layers=layers)


def test_it_survives_the_wire() -> None:
    lens = LogitLens(layers=[2], top_k=0, tokens=[7, " Paris"], positions=[-1, 3])
    wire = to_wire_args(to_extra_args(LensRequest(lens=lens)))
    assert isinstance(wire["inspect_lens"], str)
    request = parse_extra_args(json.loads(json.dumps(wire)))
    assert request is not None
    assert request.lens == lens
    assert (lens.ids, lens.texts) == ((7,), (" Paris",))


@pytest.mark.parametrize(
    ("lens", "words"),
    [
        ({"top_k": 101}, "lens.top_k: 101; allowed are 0 to 100"),
        ({"top_k": -1}, "allowed are 0 to 100"),
        ({"top_k": True}, "not an integer"),
        ({"top_k": 2.0}, "not an integer"),
        ({"top_k": 0}, "asks for nothing"),
        ({"tokens": [-1]}, "ids begin at 0"),
        ({"tokens": [""]}, "not empty"),
        ({"tokens": [3, 3]}, "once"),
        ({"tokens": {"a": 1}}, "in a list"),
        ({"tokens": [1.5]}, "not an integer"),
        ({"tokens": list(range(MOST_TOKENS + 1))}, "64 at most"),
        ({"positions": "last"}, "ask for 'completion'"),
        ({"positions": []}, "positions"),
        ({"layers": []}, "name at least one layer"),
        ({"layer": [1]}, "lens.layer"),
    ],
)
def test_what_is_wrong_is_named(lens: dict[str, Any], words: str) -> None:
    with pytest.raises(SpecError, match=words):
        parse_extra_args({"inspect_lens": {"lens": lens}})


@pytest.mark.parametrize(
    ("lens", "facts", "error", "words"),
    [
        ({"layers": [6]}, {}, SpecError, "layer 6; m has layers 0 to 5"),
        ({"layers": [1]}, {}, UnsupportedError, "layer 1 is not served at"),
        ({"layers": "all"}, {}, UnsupportedError, "'all' needs each layer, and layer 1"),
        ({"layers": [0], "tokens": [100]}, {}, SpecError, "id 100; m has ids 0 to 99"),
        ({"layers": [0], "top_k": 9}, {"vocab": 8}, SpecError, "m has 8 tokens"),
        ({"layers": [0, 5]}, {"ring_rows": 63}, UnsupportedError, "gates of the prompt: 2 taps"),
    ],
)
def test_it_is_judged_against_the_engine(
    lens: dict[str, Any], facts: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        check_request(LensRequest(lens=lens), replace(VOCAB_FACTS, **facts))


def test_one_that_fits_is_taken() -> None:
    check_request(LensRequest(lens={"layers": [0, 5], "tokens": [99]}), VOCAB_FACTS)


def test_the_tensor_is_taken_apart() -> None:
    receipt = LensReceipt(layers=(0, 5), n_positions=3, listed=(1, 4, 9), top_k=2, tokens=(7,))
    # (layers, tokens, columns), each number saying where it stands.
    numbers = np.arange(2 * 3 * 6, dtype=np.float32).reshape(2, 3, 6)
    table = receipt.result({"logit_lens": numbers})
    assert (table.positions, table.layers, table.targets) == ((1, 4, 9), (0, 5), (7,))
    for token in range(3):
        for layer in range(2):
            row = numbers[layer, token]
            assert table.token_ids[token, layer].tolist() == row[:2].tolist()
            assert table.logprobs[token, layer].tolist() == row[2:4].tolist()
            assert table.target_logprobs[token, layer].tolist() == row[4:5].tolist()
            assert table.target_ranks[token, layer].tolist() == row[5:].tolist()
    assert table.token_ids.dtype == table.target_ranks.dtype == np.int64


def test_a_tensor_of_another_request_is_refused() -> None:
    receipt = LensReceipt(layers=(0,), n_positions=2, first_position=5, top_k=1)
    assert receipt.positions == (5, 6)
    with pytest.raises(ValueError, match="shape"):
        receipt.result(np.zeros((1, 3, 2), dtype=np.float32))
    with pytest.raises(KeyError):
        receipt.result({})
