"""Bytes that vllm-lens 1.3.0 produced; how they were made is in the folder's README."""

from __future__ import annotations

import base64
import json
from typing import Any

import numpy as np
import pytest

from inspect_lens._intake import ChoiceFields, decode_payload
from inspect_lens.spec import (
    CaptureSpec,
    LensRequest,
    SteeringVector,
    decode_tensor,
    encode_tensor,
    parse_extra_args,
    to_extra_args,
    to_wire_args,
)
from tests.kit.repository import ROOT

WIRE: dict[str, Any] = json.loads((ROOT / "tests/data/vllm_lens_1.3.0/wire.json").read_text())


@pytest.mark.parametrize("dtype", sorted(WIRE["tensors"]))
def test_tensors_read_exactly_and_are_written_alike(dtype: str) -> None:
    entry = WIRE["tensors"][dtype]
    tensor = decode_tensor(entry["wire"])
    assert tensor.dtype == dtype
    np.testing.assert_array_equal(tensor.to_float32(), np.float32(entry["float32"]))
    again = encode_tensor(tensor)
    assert set(again) == set(entry["wire"])
    assert {k: v for k, v in again.items() if k != "data"} == {
        k: v for k, v in entry["wire"].items() if k != "data"
    }


def test_the_binary_transport_reads() -> None:
    entry = WIRE["binary"]
    choice = ChoiceFields(activations={"residual_stream": entry["entry"]}, token_ids=[7])
    raw = {"residual_stream": base64.b64decode(entry["payload_base64"])}
    request = LensRequest(capture=CaptureSpec(layers=(1, 4)))
    payload = decode_payload(choice, [5, 6, 7], request, raw)
    assert payload.layers == {"residual_stream": (1, 4)}
    tensor = payload.tensors["residual_stream"]
    np.testing.assert_array_equal(tensor.to_float32(), np.float32(entry["float32"]))


@pytest.mark.parametrize("name", sorted(WIRE["steering"]))
def test_steering_vectors_read(name: str) -> None:
    entry = WIRE["steering"][name]
    (fields,) = json.loads(entry["wire"])
    vector = SteeringVector.model_validate(fields)
    np.testing.assert_array_equal(vector.vector.to_float32(), np.float32(entry["float32"]))
    assert vector.scale == fields["scale"]
    assert vector.norm_match == fields["norm_match"]
    args = to_wire_args(to_extra_args(LensRequest(edits=[vector])))
    (again,) = json.loads(args["apply_steering_vectors"])
    assert set(again) == set(fields)


def test_a_whole_request_reads_and_is_written_with_the_same_keys() -> None:
    request = parse_extra_args(WIRE["xargs"])
    assert request is not None
    assert request.capture == CaptureSpec(layers=(1, 2), transport="binary")
    assert len(request.edits) == 2
    assert to_wire_args(to_extra_args(request)).keys() == WIRE["xargs"].keys()
