"""safetensors files as bytes: its front-end for numpy has no bfloat16, and copies everything."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from inspect_lens._base.untrusted import judge_total, parse_json

DTYPES: Final = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "I32": "int32"}
"""As the format names them, and as we do."""
STORAGE: Final = {"F32": "<f4", "F16": "<f2", "BF16": "<u2", "I32": "<i4"}
"""As numpy reads them; bfloat16 comes as 16 bits."""


def encode_tensors(
    tensors: Mapping[str, tuple[str, NDArray[Any]]], metadata: Mapping[str, str]
) -> list[bytes | memoryview]:
    """The parts of a file, of tensors with their dtypes; large ones are not copied."""
    names = {dtype: name for name, dtype in DTYPES.items()}
    header: dict[str, Any] = {"__metadata__": metadata}
    offset = 0
    for name, (dtype, array) in tensors.items():
        span = [offset, offset + array.nbytes]
        header[name] = {"dtype": names[dtype], "shape": list(array.shape), "data_offsets": span}
        offset = span[1]
    text = json.dumps(header).encode()
    # The data have to begin at a multiple of 8.
    text += b" " * (-len(text) % 8)
    parts = [np.ascontiguousarray(array).data for _, array in tensors.values() if array.size]
    return [len(text).to_bytes(8, "little") + text, *(part.cast("B") for part in parts)]


def read_tensors(data: bytes) -> tuple[dict[str, tuple[str, NDArray[Any]]], dict[str, str]]:
    """Dtypes and views of the tensors of a file, and its metadata."""
    start = 8 + int.from_bytes(data[:8], "little")
    try:
        header = parse_json(data[8:start])
        metadata = header.pop("__metadata__", {})
        spans = (entry["data_offsets"] for entry in header.values())
        judge_total((end - begin for begin, end in spans), len(data) - start)
        tensors = {}
        for name, entry in header.items():
            dtype = np.dtype(STORAGE[entry["dtype"]])
            begin, end = entry["data_offsets"]
            count = math.prod(entry["shape"])
            if end - begin != count * dtype.itemsize or start + end > len(data):
                raise ValueError(f"{name} is not whole")
            array = np.frombuffer(data, dtype, count=count, offset=start + begin)
            tensors[name] = DTYPES[entry["dtype"]], array.reshape(entry["shape"])
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from None
    return tensors, metadata
