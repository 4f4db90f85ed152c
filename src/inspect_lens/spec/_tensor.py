"""Tensors as plain data: numpy storage plus a dtype name, and their one encoding.

numpy has no bfloat16, so bf16 travels as its 16 bits (`uint16`) and is widened to
float32 on demand, which is exact. The JSON form is the one that vllm-lens 1.3 uses
(zstd level 1, base64, `original_dtype`), so either side can talk to the other.
"""

from __future__ import annotations

import binascii
import hashlib
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Annotated, Any, Literal, cast, get_args

import numpy as np
import pybase64
import zstandard
from numpy.typing import NDArray
from pydantic import InstanceOf, PlainSerializer, SerializationInfo

from inspect_lens.errors import SpecError

from ._values import Value, shown

__all__ = [
    "TENSOR_REFERENCE",
    "DType",
    "TensorData",
    "as_array",
    "as_indices",
    "as_tensor_data",
    "decode_saved",
    "decode_tensor",
    "encode_frame",
    "encode_saved",
    "encode_tensor",
]

DType = Literal["float32", "float16", "bfloat16"]
"""dtypes of tensors in requests and answers."""

_STORAGE: dict[str, np.dtype[Any]] = {
    "float32": np.dtype("<f4"),
    "float16": np.dtype("<f2"),
    "bfloat16": np.dtype("<u2"),
}
# What vllm-lens writes in `dtype` for the storage of each tensor type.
_WIRE_STORAGE = {"float32": "float32", "float16": "float16", "bfloat16": "int16"}
MAX_TENSOR_BYTES = 1 << 33
"""A decoded tensor may not be larger than 8 GiB: a guard against a forged header."""
MOST_AXES = 8
_BLOCK_VALUES = 1 << 19
WIRE_KEYS = frozenset({"data", "dtype", "original_dtype", "shape", "compression"})

JudgeShape = Callable[[tuple[int, ...], int], None]
"""Gets a shape and the bytes of one value; raises where an engine has no use for such a tensor."""


@dataclass(frozen=True, eq=False)
class TensorData:
    """An array with a dtype that numpy may not have.

    Args:
        storage: float32, float16 or (for bfloat16) uint16, any shape; numbers of the last axis
            lie side by side.
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
            wide = self.storage.astype(np.uint32)
            np.left_shift(wide, 16, out=wide)  # in place: fresh memory costs more than the shift
            return cast("NDArray[np.float32]", wide.view(np.float32))
        return self.storage.astype(np.float32, copy=False)

    def blocks(self) -> Iterator[NDArray[np.float32]]:
        """The values as float32 in parts (rows, last axis) of some megabytes; a vector is a row."""
        rows = self.storage.reshape(-1, self.shape[-1] if self.shape and self.shape[-1] else 1)
        n = max(1, _BLOCK_VALUES // max(1, rows.shape[1]))
        for start in range(0, len(rows), n):
            yield TensorData(rows[start : start + n], self.dtype).to_float32()

    def __deepcopy__(self, memo: object) -> TensorData:
        """Immutable by contract, so a deep copy (Inspect makes many) is the same object."""
        return self


def freeze_tensor(tensor: TensorData) -> TensorData:
    """Copy a tensor, so that later changes of the caller's array have no effect."""
    if not tensor.storage.flags.writeable:
        return tensor
    storage = tensor.storage.copy()
    storage.setflags(write=False)
    return TensorData(storage, tensor.dtype)


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
    data = pybase64.b64encode_as_string(frame)
    return {"data": data, **_entry(tensor), "compression": "zstd"}


def encode_frame(tensor: TensorData) -> tuple[dict[str, Any], memoryview]:
    """Encode a tensor for binary transport or an event: what `encode_tensor` says, and bytes."""
    # Not compressed: activations in 16 bits lose a fifth of their bytes at most, and both sides
    # would spend more time on that than a network of a data centre on the bytes.
    return _entry(tensor), _bytes_of(tensor)


def _bytes_of(tensor: TensorData) -> memoryview:
    return np.ascontiguousarray(tensor.storage).reshape(-1).view(np.uint8).data


def _entry(tensor: TensorData) -> dict[str, Any]:
    return {
        "dtype": _WIRE_STORAGE.get(tensor.dtype, tensor.dtype),
        "original_dtype": f"torch.{tensor.dtype}",
        "shape": list(tensor.shape),
    }


def decode_tensor(
    value: Mapping[str, Any],
    *,
    field: str = "tensor",
    raw: bytes | memoryview | None = None,
    judge: JudgeShape | None = None,
    others: Mapping[str, np.dtype[Any]] = MappingProxyType({}),
) -> TensorData:
    """Decode the JSON form of a tensor.

    Args:
        value: what `encode_tensor` or vllm-lens made; without `compression` the data is
            plain bytes, and without `original_dtype` the storage dtype is the dtype.
        field: path of the field, for error messages.
        raw: the payload, when it came beside the JSON (binary transport).
        judge: gets the declared shape and bytes of one value before anything is unpacked, and
            raises where they do not fit.
        others: storage of dtypes that are allowed beside `DType`.

    Raises:
        SpecError: a key is missing, the payload is damaged, or sizes or dtypes disagree.

    Example:
        ```python
        import numpy as np

        from inspect_lens.spec import as_tensor_data, decode_tensor, encode_tensor

        tensor = decode_tensor(encode_tensor(as_tensor_data(np.arange(4.0))))
        assert tensor.to_float32().tolist() == [0.0, 1.0, 2.0, 3.0]
        ```
    """
    if missing := [key for key in ("dtype", "shape") if key not in value]:
        raise _no_tensor(field, f"without {' and '.join(missing)}")
    shape = _shape(value["shape"], field)
    dtype, storage = _dtypes(value["dtype"], value.get("original_dtype"), field, others)
    size = math.prod(shape) * storage.itemsize
    if size > MAX_TENSOR_BYTES:
        raise SpecError(f"{field}: shape {shape} is out of range")
    if judge is not None:
        judge(shape, storage.itemsize)
    payload = raw if raw is not None else _payload(value.get("data"), size, field)
    compression = value.get("compression")
    if compression == "zstd":
        payload = _unpacked(payload, size, shape, field)
    elif compression is not None:
        raise SpecError(f"{field}: compression {shown(compression)}; allowed is 'zstd', or none")
    if len(payload) != size:
        raise SpecError(f"{field}: {len(payload)} bytes for shape {shape} of {dtype}, need {size}")
    return TensorData(np.frombuffer(payload, dtype=storage).reshape(shape), dtype)


def _no_tensor(field: str, what: str) -> SpecError:
    return SpecError(
        f"{field}: not the JSON form of a tensor ({what}); needed are data (base64), dtype and "
        "shape"
    )


def _shape(value: object, field: str) -> tuple[int, ...]:
    if not isinstance(value, list | tuple) or any(type(n) is not int for n in value):
        raise _no_tensor(field, f"shape {shown(value)} is no list of integers")
    shape = tuple(cast("Sequence[int]", value))
    if len(shape) > MOST_AXES or not all(0 <= n <= MAX_TENSOR_BYTES for n in shape):
        raise SpecError(f"{field}: shape {shown(shape)} is out of range")
    return shape


def _dtypes(
    stored: object, original: object, field: str, others: Mapping[str, np.dtype[Any]]
) -> tuple[DType, np.dtype[Any]]:
    """What a tensor is, and as what its bytes are to be read."""
    name = stored if original is None else original
    name = name.removeprefix("torch.") if isinstance(name, str) else name
    if isinstance(name, str) and name in others:
        return cast("DType", name), others[name]
    if name not in get_args(DType):
        raise SpecError(f"{field}: dtype {shown(name)}; allowed are {', '.join(get_args(DType))}")
    dtype = cast("DType", name)
    if stored == "float32" != dtype:
        # vllm-lens' oldest form stored every tensor as float32, whatever its original dtype.
        return "float32", _STORAGE["float32"]
    if stored not in (dtype, _WIRE_STORAGE[dtype]):
        raise SpecError(
            f"{field}: dtype {shown(stored)} beside original_dtype {shown(original)}; a tensor of "
            f"{dtype} is stored as {_WIRE_STORAGE[dtype]}"
        )
    return dtype, _STORAGE[dtype]


def _payload(data: object, size: int, field: str) -> bytes:
    """The bytes of the text; not read where they must be more than the tensor needs."""
    if not isinstance(data, str | bytes):
        raise _no_tensor(field, f"data is {type(data).__name__}")
    # zstd says in its frame what it cannot compress, which takes a little more.
    if len(data) // 4 * 3 > size + size // 64 + 1024:
        raise SpecError(f"{field}: data has {len(data)} characters, and {size} bytes are declared")
    try:
        return pybase64.b64decode(data, validate=True)
    except (ValueError, binascii.Error) as error:
        raise _no_tensor(field, f"data is no base64: {error}") from None


def _unpacked(payload: bytes | memoryview, size: int, shape: tuple[int, ...], field: str) -> bytes:
    """A zstd frame of as many bytes as a tensor has, and nothing behind it."""
    try:
        # A frame says how large it is, and the decoder believes it before our limit.
        if zstandard.frame_content_size(payload) not in (-1, size):
            raise SpecError(f"{field}: the zstd frame is not of {size} bytes, as {shape} needs")
        return zstandard.ZstdDecompressor().decompress(
            payload, max_output_size=max(size, 1), allow_extra_data=False
        )
    except zstandard.ZstdError as error:
        raise SpecError(f"{field}: damaged zstd frame ({error})") from None


def as_tensor_data(
    value: object, *, field: str = "tensor", judge: JudgeShape | None = None
) -> TensorData:
    """Convert an array, torch tensor, list or JSON form; bfloat16 and float16 are kept.

    Args:
        value: a torch tensor, a numpy array, nested lists of numbers, a `TensorData`, or
            the JSON form that `encode_tensor` makes.
        field: path of the field, for error messages.
        judge: gets shape and bytes of one value before anything is unpacked or copied, and raises
            where they do not fit.

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
        if unknown := sorted(map(str, set(value) - WIRE_KEYS)):
            raise SpecError(
                f"{field}: unknown keys {shown(unknown)}; the JSON form of a tensor has "
                f"{', '.join(sorted(WIRE_KEYS))}"
            )
        return decode_tensor(cast("Mapping[str, Any]", value), field=field, judge=judge)
    try:
        if (tensor := _torch_of(value)) is not None:
            return _from_torch(tensor, field)
        if isinstance(value, list | tuple):
            _check_lists(cast("Sequence[object]", value), field)
        array = np.asarray(value)
    except (ValueError, OverflowError, TypeError, RuntimeError) as error:
        if isinstance(error, SpecError):
            raise
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
    with np.errstate(over="ignore"):  # infinity is refused where it matters
        return TensorData(np.ascontiguousarray(array, dtype=np.float32), "float32")


def _check_lists(value: Sequence[object], field: str, depth: int = 1) -> None:
    """Refuse lists that numpy would make something large or odd of."""
    # A million empty texts and one of a million letters are an array of terabytes.
    kinds = set(map(type, value))
    if kinds <= {int, float}:
        return
    if kinds & {str, bytes, bool, dict, type(None)}:
        raise SpecError(f"{field}: {shown(value)} holds something that is not a number")
    if depth >= MOST_AXES:
        raise SpecError(f"{field}: lists are nested more than {MOST_AXES} deep")
    for item in value:
        if isinstance(item, list | tuple):
            _check_lists(cast("Sequence[object]", item), field, depth + 1)


def as_array(value: object) -> NDArray[Any]:
    """Rows as numpy has them, also of a torch tensor that is bfloat16, trained, or on a GPU."""
    tensor = _torch_of(value)
    if tensor is None:
        return np.asarray(value)
    plain = tensor.detach().to("cpu")
    is_short = plain.is_floating_point() and plain.element_size() < 4
    return cast("NDArray[Any]", (plain.float() if is_short else plain).numpy())


def as_indices(field: str, value: object, n: int, *, low: int = 0) -> NDArray[np.int64]:
    """Numbers of some of n things, from `low` on; a mask (n,) names those that are set."""
    found = as_array(value).reshape(-1)
    if found.dtype == np.bool_:
        if found.size != n:
            raise SpecError(f"{field}: a mask of {found.size}; allowed is one of {n}, or numbers")
        return np.flatnonzero(found)
    if found.size and found.dtype.kind not in "iu":
        raise SpecError(f"{field}={shown(value)}; allowed are whole numbers, or a mask of {n}")
    wrong = found[(found < low) | (found >= n)]
    if wrong.size:
        raise SpecError(f"{field}: {wrong[:3].tolist()}; allowed are {low} to {n - 1}")
    return found.astype(np.int64)


def _torch_of(value: object) -> Any:
    """A tensor of torch, or several as one; None for all else."""
    parts = value if isinstance(value, list | tuple) else [value]
    if not parts or any(type(one).__module__.partition(".")[0] != "torch" for one in parts):
        return None
    # A tensor came in, so torch is loaded; this module never imports it itself.
    return value if parts is not value else sys.modules["torch"].stack(list(parts))


def _from_torch(tensor: Any, field: str) -> TensorData:
    name = str(tensor.dtype).removeprefix("torch.")
    plain = tensor.detach().to("cpu").contiguous()
    if name == "bfloat16":
        bits = plain.view(sys.modules["torch"].int16).numpy().view(np.uint16)
        return TensorData(bits, "bfloat16")
    if name == "float16":
        return TensorData(plain.numpy(), "float16")
    if name in ("float32", "float64", "int64", "int32"):
        return as_tensor_data(plain.numpy(), field=field)
    raise SpecError(
        f"{field}: torch dtype {name} is not supported; use float32, float16 or bfloat16"
    )


_WIRE_KEY = "inspect_lens_wire"

TENSOR_REFERENCE = "tensor/1"
"""`$lens` of the short form in which a tensor of an edit stands in logs."""


def _dump(tensor: TensorData, info: SerializationInfo) -> dict[str, Any]:
    if is_wire(info):
        return encode_tensor(tensor)
    return {
        "$lens": TENSOR_REFERENCE,
        "sha256": tensor.sha256,
        "shape": list(tensor.shape),
        "dtype": tensor.dtype,
        "uri": f"lens-vectors/{tensor.sha256[:16]}.safetensors",
    }


Tensor = Annotated[TensorData, InstanceOf, PlainSerializer(_dump)]
"""A field with a tensor: encoded on the wire, and a reference in a log."""


class WireModel(Value):
    """A model whose own `model_dump` is the wire form.

    Inspect dumps whatever it finds in a config into each model event and into cache keys, with
    no context of ours. A dump that we ask for sets the context, so the two can differ.
    """

    def model_dump(self, **options: Any) -> dict[str, Any]:
        """Dump as `BaseModel.model_dump` does, tensors included."""
        return super().model_dump(**_with_wire(options))

    def model_dump_json(self, **options: Any) -> str:
        """Dump as `BaseModel.model_dump_json` does, tensors included."""
        return super().model_dump_json(**_with_wire(options))


def is_wire(info: SerializationInfo) -> bool:
    """Whether this dump was asked for by `WireModel.model_dump`."""
    return isinstance(info.context, dict) and bool(info.context.get(_WIRE_KEY))


def _with_wire(options: dict[str, Any]) -> dict[str, Any]:
    return {**options, "context": {_WIRE_KEY: True, **(options.get("context") or {})}}


_OTHERS = {
    name: np.dtype(name).newbyteorder("<")
    for name in ("float64", "int64", "int32", "int16", "int8", "uint8", "bool")
}
"""dtypes that only hooks save."""


def encode_saved(value: Any) -> Any:
    """Encode a value that a hook saved as JSON."""
    if isinstance(value, TensorData):
        return {"__type__": "tensor", **encode_tensor(value)}
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
        return decode_tensor(value, field=field, others=_OTHERS)
    if kind == "float":
        return float(value["value"])
    if kind == "cloudpickle":
        raise SpecError(
            f"{field}: the server sent a pickled value, which is not read here: it could run any "
            "code. Let the hook save tensors, numbers, text, and lists and dicts of them"
        )
    return {key: decode_saved(item, field=f"{field}.{key}") for key, item in value.items()}
