"""Tensors as data: exact round trips, the peer's bytes, damage is noticed."""

from __future__ import annotations

import copy
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from inspect_lens._base.to_torch import to_torch
from inspect_lens.errors import SpecError
from inspect_lens.spec import (
    TensorData,
    as_tensor_data,
    decode_tensor,
    encode_frame,
    encode_tensor,
    parse_extra_args,
)

SHAPES = hnp.array_shapes(min_dims=0, max_dims=3, max_side=5)
BITS = {"float32": np.uint32, "float16": np.uint16, "bfloat16": np.uint16}
STORAGE = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}


@st.composite
def tensors(draw: Any) -> TensorData:
    """Any bit pattern, NaN and infinity among them."""
    dtype = draw(st.sampled_from(["float32", "float16", "bfloat16"]))
    bits = draw(hnp.arrays(BITS[dtype], draw(SHAPES)))
    return TensorData(np.ascontiguousarray(bits).view(STORAGE[dtype]).reshape(bits.shape), dtype)


@given(tensors())
def test_encoding_keeps_every_bit(tensor: TensorData) -> None:
    entry, raw = encode_frame(tensor)
    assert len(raw) == tensor.nbytes, "beside the JSON it is not compressed"
    beside = decode_tensor(json.loads(json.dumps(entry)), raw=raw)
    found = decode_tensor(json.loads(json.dumps(encode_tensor(tensor))))
    assert (beside.dtype, beside.sha256) == (found.dtype, found.sha256)
    assert found.dtype == tensor.dtype
    assert found.shape == tensor.shape
    assert found.storage.tobytes() == tensor.storage.tobytes()
    assert found.sha256 == tensor.sha256


@given(tensors())
def test_torch_has_the_same_bits_and_dtype(tensor: TensorData) -> None:
    there = to_torch(tensor)
    assert there.dtype == getattr(torch, tensor.dtype)
    back = as_tensor_data(there)
    assert back.dtype == tensor.dtype
    assert back.storage.tobytes() == tensor.storage.tobytes()


@given(hnp.arrays(np.uint16, hnp.array_shapes(max_dims=2, max_side=6)))
def test_bfloat16_widens_as_torch_does(bits: Any) -> None:
    wide = TensorData(bits, "bfloat16").to_float32()
    expected = torch.from_numpy(bits.view(np.int16).copy()).view(torch.bfloat16).float().numpy()
    np.testing.assert_array_equal(wide, expected)


def test_a_slice_of_a_torch_tensor_is_read_as_it_looks() -> None:
    whole = torch.arange(24, dtype=torch.bfloat16).reshape(4, 6)
    np.testing.assert_array_equal(
        as_tensor_data(whole[1:3, ::2].requires_grad_()).to_float32(),
        whole[1:3, ::2].float().numpy(),
    )


PEER = json.loads(
    (Path(__file__).parents[2] / "data" / "vllm_lens_1.3.0" / "wire.json").read_text()
)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_bytes_of_the_peer_decode_to_its_values(dtype: str) -> None:
    made = PEER["tensors"][dtype]
    found = decode_tensor(made["wire"])
    assert found.dtype == dtype
    np.testing.assert_array_equal(found.to_float32(), np.asarray(made["float32"], np.float32))


@pytest.mark.parametrize("form", ["broadcast", "per_position"])
def test_a_request_of_the_peer_is_understood(form: str) -> None:
    request = parse_extra_args({"apply_steering_vectors": PEER["steering"][form]["wire"]})
    assert request is not None
    assert np.isfinite(request.edits[0].vector.to_float32()).all()


def test_hash_depends_on_dtype_shape_and_content() -> None:
    zeros = np.zeros((2, 2), np.uint16)
    hashes = {
        TensorData(zeros, "bfloat16").sha256,
        TensorData(zeros.view(np.float16), "float16").sha256,
        TensorData(zeros.reshape(4), "bfloat16").sha256,
        TensorData(zeros + 1, "bfloat16").sha256,
    }
    assert len(hashes) == 4


def test_a_deep_copy_is_the_same_object() -> None:
    tensor = as_tensor_data([[1.0]])
    assert copy.deepcopy({"x": tensor})["x"] is tensor


def test_threads_do_not_disturb_one_another() -> None:
    made = [as_tensor_data(np.random.default_rng(i).normal(size=(64, 64))) for i in range(16)]

    def round_trip(tensor: TensorData) -> bool:
        wire = encode_tensor(tensor)
        return all(
            decode_tensor(wire).storage.tobytes() == tensor.storage.tobytes() for _ in range(20)
        )

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(round_trip, made))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"data": "!!"}, "JSON form"),
        ({"shape": [3, 3]}, "is not of 36 bytes"),
        ({"shape": [-1, 4]}, "out of range"),
        ({"shape": [1 << 20, 1 << 20]}, "out of range"),
        ({"original_dtype": "torch.float8_e4m3fn"}, "dtype 'float8_e4m3fn'"),
        ({"data": "AAAA"}, "damaged"),
    ],
)
def test_a_damaged_form_is_refused(change: dict[str, Any], message: str) -> None:
    wire = encode_tensor(as_tensor_data(np.ones((2, 2), np.float32))) | change
    with pytest.raises(SpecError, match=message):
        decode_tensor(wire)


@pytest.mark.parametrize("value", ["text", [["a"]], [[1], [2, 3]], {"x": 1}, None])
def test_what_is_no_tensor_is_refused(value: Any) -> None:
    with pytest.raises(SpecError):
        as_tensor_data(value)


def test_several_torch_tensors_are_one() -> None:
    parts = [torch.tensor([1.0, 2.0], dtype=torch.bfloat16), torch.tensor([3.0, 4.0]).bfloat16()]
    made = as_tensor_data([parts[0].requires_grad_(), parts[1]])
    assert (made.dtype, made.to_float32().tolist()) == ("bfloat16", [[1.0, 2.0], [3.0, 4.0]])
    for wrong in ([torch.ones(1), torch.ones(2)], [[parts[0]]], torch.ones(1, device="meta")):
        with pytest.raises(SpecError, match="vector: not an array"):
            as_tensor_data(wrong, field="vector")


def test_integers_and_doubles_become_float32() -> None:
    assert as_tensor_data([[1, 2]]).dtype == "float32"
    assert as_tensor_data(torch.ones(2, dtype=torch.float64)).dtype == "float32"


def test_a_frame_that_would_unpack_to_more_than_its_shape_is_not_unpacked() -> None:
    wire = encode_tensor(as_tensor_data(np.zeros((4096, 1024), np.float32)))
    with pytest.raises(SpecError, match="not of 16 bytes"):
        decode_tensor({**wire, "shape": [1, 4]})
