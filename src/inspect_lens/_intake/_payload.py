"""What one call captured, and its file: safetensors with the receipt in the header.

The safetensors layout (8-byte length, JSON header, data) is written and read here directly,
because its numpy front-end has no bfloat16 and this way nothing is copied.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from inspect_lens._base.untrusted import judge_total, parse_json
from inspect_lens.errors import ArtifactError
from inspect_lens.spec import DType, Receipt, TensorData

__all__ = ["Payload", "decode_file", "encode_file", "read_vector"]

FORMAT = "activations/1"
_NAMES: dict[DType, str] = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
_STORAGE = {"F32": "<f4", "F16": "<f2", "BF16": "<u2", "I32": "<i4"}
_PROMPT, _COMPLETION = "prompt_token_ids", "token_ids"


@dataclass(frozen=True, kw_only=True)
class Payload:
    """Everything that one choice of one call brought back."""

    tensors: Mapping[str, TensorData]
    """(layers, tokens, hidden) by name."""
    layers: Mapping[str, tuple[int, ...]]
    """Layers of the first axis, ascending, by name."""
    prompt_token_ids: tuple[int, ...] = ()
    token_ids: tuple[int, ...] = ()
    receipt: Receipt | None = None
    origin: Mapping[str, Any] = field(default_factory=dict)
    """Model, sample and message that this belongs to."""

    def with_origin(self, origin: Mapping[str, Any]) -> Payload:
        """The same payload, said to belong to something."""
        return replace(self, origin=origin)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @property
    def sha256(self) -> str:
        """Hash over names, dtypes, shapes and contents of the tensors, 16 hex digits of it.

        It guards against mix-ups and damage. Inspect logs an output three times per sample, so
        each digit counts.
        """
        lines = [f"{name}:{self.tensors[name].sha256}" for name in sorted(self.tensors)]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def encode_file(payload: Payload) -> list[bytes | memoryview]:
    """Lay a payload out as a safetensors file."""
    parts: list[tuple[str, str, NDArray[Any]]] = [
        (name, _NAMES[tensor.dtype], tensor.storage) for name, tensor in payload.tensors.items()
    ]
    for name, ids in ((_PROMPT, payload.prompt_token_ids), (_COMPLETION, payload.token_ids)):
        parts.append((name, "I32", np.asarray(ids, dtype=np.int32)))
    header: dict[str, Any] = {"__metadata__": {"inspect_lens": json.dumps(_meta(payload))}}
    offset = 0
    for name, dtype, array in parts:
        end = offset + array.nbytes
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    # safetensors wants the data to begin at a multiple of 8.
    text += b" " * (-len(text) % 8)
    head = len(text).to_bytes(8, "little") + text
    return [
        head,
        *(np.ascontiguousarray(array).data.cast("B") for _, _, array in parts if array.size),
    ]


def decode_file(data: bytes, *, where: str) -> Payload:
    """Read what `encode_file` laid out."""
    arrays, metadata = _read_tensors(data, where=where)
    try:
        meta = parse_json(metadata["inspect_lens"])
        if meta["format"] != FORMAT:
            raise ValueError(f"format {meta['format']!r}")
        receipt = meta.get("receipt")
        return Payload(
            tensors={name: _as_tensor(*arrays[name]) for name in meta["layers"]},
            layers={name: tuple(layers) for name, layers in meta["layers"].items()},
            prompt_token_ids=tuple(arrays[_PROMPT][0].tolist()),
            token_ids=tuple(arrays[_COMPLETION][0].tolist()),
            receipt=None if receipt is None else Receipt.model_validate(receipt),
            origin=meta.get("origin") or {},
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ArtifactError(
            f"{where}: not an activation file of this release ({type(error).__name__}: {error}); "
            f"wanted is {FORMAT}"
        ) from None


def read_vector(data: bytes, *, where: str) -> TensorData:
    """Read the tensor `activations` of a steering vector's file.

    Args:
        data: the whole file.
        where: its address, for error messages.

    Returns:
        The tensor.

    Raises:
        ArtifactError: the file is damaged or holds no such tensor.

    Example:
        ```python
        import numpy as np
        from safetensors.numpy import save

        from inspect_lens.model import read_vector

        data = save({"activations": np.ones((1, 256), dtype=np.float32)})
        assert read_vector(data, where="mine.safetensors").shape == (1, 256)
        ```
    """
    arrays, _ = _read_tensors(data, where=where)
    if "activations" not in arrays:
        raise ArtifactError(f"{where}: holds {sorted(arrays)}; wanted is the tensor 'activations'")
    return _as_tensor(*arrays["activations"])


def _read_tensors(
    data: bytes, *, where: str
) -> tuple[dict[str, tuple[NDArray[Any], str]], dict[str, str]]:
    """Arrays with their safetensors dtype name, and the metadata; bfloat16 comes as `uint16`."""
    try:
        start = 8 + int.from_bytes(data[:8], "little")
        header = parse_json(data[8:start])
        metadata = header.pop("__metadata__", {})
        spans = (entry["data_offsets"] for entry in header.values())
        judge_total((end - begin for begin, end in spans), len(data) - start)
        arrays = {}
        for name, entry in header.items():
            dtype = np.dtype(_STORAGE[entry["dtype"]])
            begin, end = entry["data_offsets"]
            count = math.prod(entry["shape"])
            if end - begin != count * dtype.itemsize or start + end > len(data):
                raise ValueError(f"{name} is cut short")
            array = np.frombuffer(data, dtype, count=count, offset=start + begin)
            arrays[name] = (array.reshape(entry["shape"]), entry["dtype"])
        return arrays, metadata
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ArtifactError(
            f"{where}: not a safetensors file, or damaged ({type(error).__name__}: {error})"
        ) from None


def _as_tensor(array: NDArray[Any], dtype: str) -> TensorData:
    names = {value: key for key, value in _NAMES.items()}
    return TensorData(array, names[dtype])


def _meta(payload: Payload) -> dict[str, Any]:
    receipt = payload.receipt
    return {
        "format": FORMAT,
        "layers": {name: list(layers) for name, layers in payload.layers.items()},
        "receipt": None if receipt is None else receipt.model_dump(mode="json", exclude_none=True),
        "origin": dict(payload.origin),
    }
