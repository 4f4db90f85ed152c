"""What one call captured, and its file: safetensors with the receipt in the header."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast, get_args

import numpy as np
from numpy.typing import NDArray

from inspect_lens._base.untrusted import parse_json
from inspect_lens.errors import ArtifactError
from inspect_lens.spec import DType, Receipt, TensorData

from ._safetensors import encode_tensors, read_tensors

FORMAT = "activations/1"
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
    tensors: dict[str, tuple[str, NDArray[Any]]] = {
        name: (tensor.dtype, tensor.storage) for name, tensor in payload.tensors.items()
    }
    for name, ids in ((_PROMPT, payload.prompt_token_ids), (_COMPLETION, payload.token_ids)):
        tensors[name] = "int32", np.asarray(ids, dtype=np.int32)
    receipt = payload.receipt
    meta = {
        "format": FORMAT,
        "layers": {name: list(layers) for name, layers in payload.layers.items()},
        "receipt": None if receipt is None else receipt.model_dump(mode="json", exclude_none=True),
        "origin": dict(payload.origin),
    }
    return encode_tensors(tensors, {"inspect_lens": json.dumps(meta)})


def decode_file(data: bytes, *, where: str) -> Payload:
    """Read what `encode_file` laid out."""
    tensors, metadata = _read(data, where)
    try:
        meta = parse_json(metadata["inspect_lens"])
        if meta["format"] != FORMAT:
            raise ValueError(f"format {meta['format']!r}")
        receipt = meta.get("receipt")
        return Payload(
            tensors={name: _as_tensor(where, *tensors[name]) for name in meta["layers"]},
            layers={name: tuple(layers) for name, layers in meta["layers"].items()},
            prompt_token_ids=tuple(tensors[_PROMPT][1].tolist()),
            token_ids=tuple(tensors[_COMPLETION][1].tolist()),
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
    tensors, _ = _read(data, where)
    if "activations" not in tensors:
        raise ArtifactError(f"{where}: holds {sorted(tensors)}; wanted is the tensor 'activations'")
    return _as_tensor(where, *tensors["activations"])


def _read(data: bytes, where: str) -> tuple[dict[str, tuple[str, NDArray[Any]]], dict[str, str]]:
    try:
        return read_tensors(data)
    except ValueError as error:
        raise ArtifactError(f"{where}: not a safetensors file, or damaged ({error})") from None


def _as_tensor(where: str, dtype: str, array: NDArray[Any]) -> TensorData:
    if dtype not in get_args(DType):
        raise ArtifactError(f"{where}: has a tensor of {dtype}; allowed are {get_args(DType)}")
    return TensorData(array, cast("DType", dtype))
