"""A logit lens on its way through the provider: asked for, inherited, carried, checked."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from inspect_ai.model import GenerateConfig

from inspect_lens import LensRequest
from inspect_lens._base.http import not_done
from inspect_lens._intake import ChoiceFields, decode_payload
from inspect_lens.client import request_of
from inspect_lens.errors import CaptureError, SpecError
from inspect_lens.model import lens_config
from inspect_lens.model._request import read_body
from inspect_lens.spec import (
    LensReceipt,
    LogitLens,
    Receipt,
    TensorData,
    encode_tensor,
)

LENS = LogitLens(layers=[2, 4], top_k=1, tokens=[7])


def test_a_call_says_it_in_its_config() -> None:
    first = lens_config(lens=[2], steer="organism/truth", base=GenerateConfig())
    request = read_body(lens_config(lens=LENS, base=first).extra_body).request
    assert request is not None
    assert request.lens == LENS
    assert len(request.edits) == 1
    with pytest.raises(SpecError, match=r"lens\.top_k"):
        lens_config(lens={"top_k": 1000}, base=GenerateConfig())


def test_a_scope_gives_way_to_the_call() -> None:
    scope = LensRequest(lens=LENS)
    plain = read_body(None, scope=scope).request
    assert plain == scope
    own = lens_config(lens=[1], base=GenerateConfig())
    said = read_body(own.extra_body, scope=scope).request
    assert said is not None
    assert said.lens == LogitLens(layers=[1])


def test_it_travels_beside_the_response_where_that_is_left_open() -> None:
    request = LensRequest(lens=LENS)
    assert request.leaves_transport
    assert request.over_binary().lens == LENS.model_copy(update={"transport": "binary"})
    assert not request.over_binary().leaves_transport
    inline = LENS.model_copy(update={"transport": "inline"})
    assert not LensRequest(capture={"layers": [4]}, lens=inline).leaves_transport


def test_tensors_that_several_places_ask_for_travel_in_one_way() -> None:
    inline = {"layers": [1], "transport": "inline"}
    own = lens_config(capture=inline, base=GenerateConfig())
    joined = [read_body(own.extra_body, scope=LensRequest(lens=LENS)).request]
    joined.append(request_of([1], None, None, None, None, None, inline))
    for asked in joined:
        assert asked is not None
        assert asked.capture is not None
        assert asked.lens is not None
        assert asked.capture.transport == asked.lens.transport == "inline"
    with pytest.raises(SpecError, match="travel in one way"):
        lens_config(
            capture=inline, lens={"layers": [2], "transport": "binary"}, base=GenerateConfig()
        )


@pytest.mark.parametrize("lens", [LENS, {"layers": [2, 4], "top_k": 1, "tokens": [7]}])
def test_a_client_takes_it_as_an_argument(lens: Any) -> None:
    request = request_of(None, None, "binary", None, None, None, lens)
    assert request is not None
    assert request.lens == LENS.model_copy(update={"transport": "binary"})


DONE = LensReceipt(layers=(2, 4), n_positions=3, first_position=0, top_k=1, tokens=(7,))
RECEIPT = Receipt(
    n_prompt=2, n_completion=2, lens=DONE, cache_salted=False, paths=("eager",),
    engine="inspect_lens", version="0", vllm_version="0",
)  # fmt: skip


def choice(shape: tuple[int, ...] | None, receipt: Receipt) -> ChoiceFields:
    entries = {}
    if shape is not None:
        numbers = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
        entries["logit_lens"] = encode_tensor(TensorData(numbers, "float32"))
    return ChoiceFields(
        activations=entries, token_ids=[3, 4], receipt=receipt.model_dump(mode="json")
    )


def test_what_comes_is_decoded_with_its_layers() -> None:
    payload = decode_payload(choice((2, 3, 4), RECEIPT), [1, 2], LensRequest(lens=LENS), {})
    assert payload.layers == {"logit_lens": (2, 4)}
    assert payload.tensors["logit_lens"].shape == (2, 3, 4)


@pytest.mark.parametrize(
    ("shape", "receipt", "words"),
    [
        (None, RECEIPT, "logit_lens asked for"),
        ((2, 2, 4), RECEIPT, "the receipt says"),
        ((2, 3, 4), RECEIPT.model_copy(update={"lens": None}), "the receipt says None"),
    ],
)
def test_what_does_not_fit_is_refused(
    shape: tuple[int, ...] | None, receipt: Receipt, words: str
) -> None:
    with pytest.raises(CaptureError, match=words):
        decode_payload(choice(shape, receipt), [1, 2], LensRequest(lens=LENS), {})


def test_a_server_that_passed_over_it_is_found_out() -> None:
    request = LensRequest(lens=LENS)
    assert "lens" in str(not_done(request, {}))
    assert not_done(request, RECEIPT.model_dump(mode="json")) is None


def test_layers_that_came_are_those_that_were_asked_for() -> None:
    came = choice((2, 3, DONE.columns), RECEIPT)
    for layers in ((2, 4), "all"):
        asked = LensRequest(lens=LENS.model_copy(update={"layers": layers}))
        assert decode_payload(came, [1, 2], asked, {}).layers == {"logit_lens": (2, 4)}
    other = LensRequest(lens=LENS.model_copy(update={"layers": (2, 3)}))
    with pytest.raises(CaptureError, match=r"layers \[2, 4\] came, and asked were layers \[2, 3\]"):
        decode_payload(came, [1, 2], other, {})
