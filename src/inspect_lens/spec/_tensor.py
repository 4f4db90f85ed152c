"""Tensors as plain data: numpy storage plus a dtype name, and their one encoding.

numpy has no bfloat16, so bf16 travels as its 16 bits (`uint16`) and is widened to
float32 on demand, which is exact. The JSON form is the one that vllm-lens 1.3 uses
(zstd level 1, base64, `original_dtype`), so either side can talk to the other.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, cast, get_args

import numpy as np
import zstandard
from numpy.typing import NDArray

from inspect_lens.errors import SpecError

__all__ = [
    "DType",
    "TensorData",
    "as_tensor_data",
    "decode_tensor",
    "encode_frame",
    "encode_tensor",
    "freeze_tensor",
]

DType = Literal["float32", "float16", "bfloat16"]

_STORAGE: dict[str, np.dtype[Any]] = {
    "float32": np.dtype("<f4"),
    "float16": np.dtype("<f2"),
    "bfloat16": np.dtype("<u2"),
}
# What vllm-lens writes in `dtype` for the storage of each tensor type.
_WIRE_STORAGE = {"float32": "float32", "float16": "float16", "bfloat16": "int16"}
MAX_TENSOR_BYTES = 1 << 33
"""A decoded tensor may not be larger than 8 GiB: a guard against a forged header."""


@dataclass(frozen=True, eq=False)
class TensorData:
    """An array with a dtype that numpy may not have.

    Args:
        storage: float32, float16 or (for bfloat16) uint16, C-contiguous, any shape.
        dtype: what the storage means.
    """

    storage: NDArray[Any]
    dtype: DType

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the tensor."""
        return tuple(int(n) for n in self.storage.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the uncompressed tensor."""
        return int(self.storage.nbytes)

    @cached_property
    def sha256(self) -> str:
        """Hash over dtype, shape and content, as lower-case hex."""
        digest = hashlib.sha256(f"{self.dtype}:{self.shape}:".encode())
        digest.update(np.ascontiguousarray(self.storage).data)
        return digest.hexdigest()

    def to_float32(self) -> NDArray[np.float32]:
        """The values as float32; exact for all three dtypes."""
        if self.dtype == "bfloat16":
            wide = self.storage.astype(np.uint32) << 16
            return cast("NDArray[np.float32]", wide.view(np.float32))
        return self.storage.astype(np.float32, copy=False)

    def __deepcopy__(self, memo: object) -> TensorData:
        """Immutable by contract, so a deep copy (Inspect makes many) is the same object."""
        return self


def as_tensor_data(value: object, *, field: str = "tensor") -> TensorData:
    """Convert what a user may hand us to `TensorData`.

    Args:
        value: a torch tensor, a numpy array, nested lists of numbers, a `TensorData`, or
            the JSON form that `encode_tensor` makes.
        field: path of the field, for error messages.

    Returns:
        The tensor; float64 and integers become float32, bfloat16 and float16 are kept.

    Raises:
        SpecError: the value is none of these, or its dtype is not supported.

    Example:
        ```python
        import numpy as np

        from inspect_lens.spec import as_tensor_data

        assert as_tensor_data([[1, 2], [3, 4]]).shape == (2, 2)
        assert as_tensor_data(np.zeros(3)).dtype == "float32"
        ```
    """
    if isinstance(value, TensorData):
        return value
    if isinstance(value, Mapping):
        return decode_tensor(cast("Mapping[str, Any]", value), field=field)
    if type(value).__module__.partition(".")[0] == "torch":
        return _from_torch(cast("Any", value), field)
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise SpecError(
            f"{field}: not an array ({error}); give a tensor, ndarray or lists"
        ) from None
    if array.dtype == np.float16:
        return TensorData(np.ascontiguousarray(array), "float16")
    if array.dtype.kind not in "fiu":
        raise SpecError(
            f"{field}: got {type(value).__name__} of dtype {array.dtype}; "
            "allowed are a torch tensor, a float ndarray, nested lists or the JSON tensor form"
        )
    return TensorData(np.ascontiguousarray(array, dtype=np.float32), "float32")


def freeze_tensor(tensor: TensorData) -> TensorData:
    """Cut a tensor loose from the array or torch tensor that the caller may go on to edit.

    Args:
        tensor: any.

    Returns:
        The same tensor where its memory is read-only, else a read-only copy.

    Example:
        ```python
        import numpy as np

        from inspect_lens.spec import TensorData, freeze_tensor

        array = np.zeros(3, dtype=np.float32)
        frozen = freeze_tensor(TensorData(array, "float32"))
        array[0] = 1.0
        assert frozen.to_float32()[0] == 0.0
        ```
    """
    if not tensor.storage.flags.writeable:
        return tensor
    storage = tensor.storage.copy()
    storage.setflags(write=False)
    return TensorData(storage, tensor.dtype)


def _from_torch(tensor: Any, field: str) -> TensorData:
    name = str(tensor.dtype).removeprefix("torch.")
    plain = tensor.detach().to("cpu").contiguous()
    if name == "bfloat16":
        # A torch tensor came in, so torch is loaded; this module never imports it itself.
        bits = plain.view(sys.modules["torch"].int16).numpy().view(np.uint16)
        return TensorData(bits, "bfloat16")
    if name == "float16":
        return TensorData(plain.numpy(), "float16")
    if name in ("float32", "float64", "int64", "int32"):
        return TensorData(np.ascontiguousarray(plain.numpy(), dtype=np.float32), "float32")
    raise SpecError(
        f"{field}: torch dtype {name} is not supported; use float32, float16 or bfloat16"
    )


def encode_tensor(tensor: TensorData) -> dict[str, Any]:
    """Encode a tensor as JSON: zstd level 1, then base64.

    Args:
        tensor: the tensor.

    Returns:
        `{"data", "dtype", "original_dtype", "shape", "compression"}`.

    Source:
        The wire form of vllm-lens 1.3.0; checked with bytes that package produced.

    Example:
        ```python
        import numpy as np

        from inspect_lens.spec import as_tensor_data, encode_tensor

        value = encode_tensor(as_tensor_data(np.arange(4.0)))
        assert (value["shape"], value["dtype"]) == ([4], "float32")
        ```
    """
    # A fresh context per call: zstd contexts must not be shared between threads.
    frame = zstandard.ZstdCompressor(level=1).compress(_bytes_of(tensor))
    data = base64.b64encode(frame).decode("ascii")
    return {"data": data, **_entry(tensor), "compression": "zstd"}


def encode_frame(tensor: TensorData) -> tuple[dict[str, Any], memoryview]:
    """Encode a tensor for the binary transport: what `encode_tensor` says, and the bytes.

    Not compressed: activations in 16 bits lose a fifth of their bytes at most, and both sides
    would spend more time on that than a network of a data centre on the bytes.

    Args:
        tensor: the tensor.

    Returns:
        `{"dtype", "original_dtype", "shape"}`, and the bytes of the rows: where the tensor has
        them, whose memory they keep, or of a copy where they do not lie in order.

    Example:
        ```python
        import numpy as np

        from inspect_lens.spec import TensorData, decode_tensor, encode_frame

        rows = TensorData(np.ones((1, 3, 8), dtype=np.float32), "float32")
        entry, frame = encode_frame(rows)
        assert decode_tensor(entry, raw=frame).shape == (1, 3, 8)
        ```
    """
    return _entry(tensor), _bytes_of(tensor)


def _bytes_of(tensor: TensorData) -> memoryview:
    return np.ascontiguousarray(tensor.storage).reshape(-1).view(np.uint8).data


def _entry(tensor: TensorData) -> dict[str, Any]:
    return {
        "dtype": _WIRE_STORAGE[tensor.dtype],
        "original_dtype": f"torch.{tensor.dtype}",
        "shape": list(tensor.shape),
    }


def decode_tensor(
    value: Mapping[str, Any], *, field: str = "tensor", raw: bytes | memoryview | None = None
) -> TensorData:
    """Decode the JSON form of a tensor.

    Args:
        value: what `encode_tensor` or vllm-lens made; without `compression` the data is
            plain bytes, and without `original_dtype` the storage dtype is the dtype.
        field: path of the field, for error messages.
        raw: the payload, when it came beside the JSON (binary transport).

    Returns:
        The tensor.

    Raises:
        SpecError: a key is missing, the payload is damaged, or sizes disagree.

    Example:
        ```python
        import numpy as np

        from inspect_lens.spec import as_tensor_data, decode_tensor, encode_tensor

        tensor = decode_tensor(encode_tensor(as_tensor_data(np.arange(4.0))))
        assert tensor.to_float32().tolist() == [0.0, 1.0, 2.0, 3.0]
        ```
    """
    try:
        stored = str(value["dtype"])
        shape = tuple(int(n) for n in value["shape"])
        payload = base64.b64decode(value["data"], validate=True) if raw is None else raw
    except (KeyError, TypeError, ValueError, binascii.Error) as error:
        raise SpecError(
            f"{field}: not the JSON form of a tensor ({type(error).__name__}: {error}); "
            "needed are data (base64), dtype and shape"
        ) from None
    name = str(value.get("original_dtype") or stored).removeprefix("torch.")
    if name not in get_args(DType):
        raise SpecError(f"{field}: dtype {name!r}; allowed are {', '.join(get_args(DType))}")
    dtype = cast("DType", name)
    # vllm-lens' oldest form stored every tensor as float32, whatever its original dtype.
    legacy = stored == "float32" and dtype != "float32"
    storage = _STORAGE["float32" if legacy else dtype]
    size = math.prod(shape) * storage.itemsize
    if min(shape, default=0) < 0 or size > MAX_TENSOR_BYTES:
        raise SpecError(f"{field}: shape {shape} is out of range")
    if value.get("compression") == "zstd":
        try:
            # A frame says how large it is, and the decoder believes it before our limit.
            if zstandard.frame_content_size(payload) not in (-1, size):
                raise SpecError(f"{field}: the zstd frame is not of {size} bytes, as {shape} needs")
            payload = zstandard.ZstdDecompressor().decompress(payload, max_output_size=size)
        except zstandard.ZstdError as error:
            raise SpecError(f"{field}: damaged zstd frame ({error})") from None
    if len(payload) != size:
        raise SpecError(f"{field}: {len(payload)} bytes for shape {shape} of {dtype}, need {size}")
    array = np.frombuffer(payload, dtype=storage).reshape(shape)
    return TensorData(array, "float32" if legacy else dtype)
