"""What a user may hand us for a tensor: of torch, of numpy, lists of numbers, the JSON form."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np

from inspect_lens.errors import SpecError

from ._strict import shown
from ._tensor import MOST_AXES, WIRE_KEYS, JudgeShape, TensorData, decode_tensor

__all__ = ["as_tensor_data"]


def as_tensor_data(
    value: object, *, field: str = "tensor", judge: JudgeShape | None = None
) -> TensorData:
    """Convert an array, torch tensor, list or JSON form to `TensorData`.

    Args:
        value: a torch tensor, a numpy array, nested lists of numbers, a `TensorData`, or
            the JSON form that `encode_tensor` makes.
        field: path of the field, for error messages.
        judge: gets shape and bytes of one value before anything is unpacked or copied, and raises
            where they do not fit.

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
        if unknown := sorted(map(str, set(value) - WIRE_KEYS)):
            raise SpecError(
                f"{field}: unknown keys {shown(unknown)}; the JSON form of a tensor has "
                f"{', '.join(sorted(WIRE_KEYS))}"
            )
        return decode_tensor(cast("Mapping[str, Any]", value), field=field, judge=judge)
    if type(value).__module__.partition(".")[0] == "torch":
        return _from_torch(cast("Any", value), field)
    if isinstance(value, list | tuple):
        _check_lists(cast("Sequence[object]", value), field)
    try:
        array = np.asarray(value)
    except (ValueError, OverflowError) as error:
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
    """Refuse lists that numpy would make something large or odd of.

    A million empty texts and one of a million letters are an array of terabytes.
    """
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
