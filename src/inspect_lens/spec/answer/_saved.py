"""What hooks saved, as JSON: plain values as they are, tensors in the form of vllm-lens.

Nothing here is code. What vllm-lens would send as pickled bytes is refused by the worker that
would have to send it.
"""

from __future__ import annotations

import base64
import binascii
import math
from collections.abc import Mapping
from typing import Any, cast

import numpy as np
import zstandard
from numpy.typing import NDArray

from inspect_lens.errors import SpecError
from inspect_lens.spec.values._tensor import (
    MAX_TENSOR_BYTES,
    DType,
    TensorData,
    decode_tensor,
    encode_tensor,
)

__all__ = ["decode_saved", "encode_saved"]

_FLOATS = ("float32", "float16", "bfloat16")
_OTHERS = {
    name: np.dtype(name).newbyteorder("<")
    for name in ("float64", "int64", "int32", "int16", "int8", "uint8", "bool")
}


def encode_saved(value: Any) -> Any:
    """Encode a value that a hook saved as JSON."""
    if isinstance(value, TensorData):
        return {"__type__": "tensor", **_encode(value)}
    if isinstance(value, float) and not math.isfinite(value):
        return {"__type__": "float", "value": repr(value)}
    if isinstance(value, Mapping):
        return {str(key): encode_saved(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [encode_saved(item) for item in value]
    return value


def decode_saved(value: Any, *, field: str = "hook_results") -> Any:
    """Decode values that a hook saved, from their JSON form."""
    if isinstance(value, list):
        return [decode_saved(item, field=f"{field}[{i}]") for i, item in enumerate(value)]
    if not isinstance(value, Mapping):
        return value
    kind = value.get("__type__")
    if kind == "tensor":
        return _decode(cast("Mapping[str, Any]", value), field)
    if kind == "float":
        return float(value["value"])
    if kind == "cloudpickle":
        raise SpecError(
            f"{field}: the server sent a pickled value, which is not read here: it could run any "
            "code. Let the hook save tensors, numbers, text, and lists and dicts of them"
        )
    return {key: decode_saved(item, field=f"{field}.{key}") for key, item in value.items()}


def _encode(tensor: TensorData) -> dict[str, Any]:
    if tensor.dtype in _FLOATS:
        return encode_tensor(tensor)
    storage = np.ascontiguousarray(tensor.storage)
    frame = zstandard.ZstdCompressor(level=1).compress(storage.tobytes())
    return {
        "data": base64.b64encode(frame).decode("ascii"),
        "dtype": str(tensor.dtype),
        "original_dtype": f"torch.{tensor.dtype}",
        "shape": list(tensor.shape),
        "compression": "zstd",
    }


def _decode(value: Mapping[str, Any], field: str) -> TensorData:
    name = str(value.get("dtype"))
    original = str(value.get("original_dtype") or name).removeprefix("torch.")
    if original not in _OTHERS:
        return decode_tensor(value, field=field)
    try:
        shape = tuple(int(n) for n in value["shape"])
        size = math.prod(shape) * _OTHERS[original].itemsize
        if min(shape, default=0) < 0 or size > MAX_TENSOR_BYTES:
            raise ValueError(f"shape {shape} is out of range")
        data = base64.b64decode(value["data"], validate=True)
        if value.get("compression") == "zstd":
            if zstandard.frame_content_size(data) not in (-1, size):
                raise ValueError(f"the frame is not of {size} bytes")
            data = zstandard.ZstdDecompressor().decompress(data, max_output_size=size)
        if len(data) != size:
            raise ValueError(f"{len(data)} bytes for shape {shape} of {original}")
        array: NDArray[Any] = np.frombuffer(data, dtype=_OTHERS[original]).reshape(shape)
    except (KeyError, TypeError, ValueError, binascii.Error, zstandard.ZstdError) as error:
        raise SpecError(f"{field}: not the JSON form of a tensor ({error})") from None
    return TensorData(array, cast("DType", original))
