"""What hooks saved, on its way from workers to a front-end: plain data, never pickled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import msgspec
import numpy as np
import torch

from inspect_lens._engine.protocol.messages import Saved
from inspect_lens.errors import CaptureError, SpecError
from inspect_lens.spec import DType, TensorData

OWN, PERSISTENT = "own", "persistent"
"""Parts of what a worker sends, each by index of the hook."""

_ARRAY = 1
_TORCH = {
    torch.float32: "float32",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.float64: "float64",
    torch.int64: "int64",
    torch.int32: "int32",
    torch.int16: "int16",
    torch.int8: "int8",
    torch.uint8: "uint8",
    torch.bool: "bool",
}
_STORAGE = {name: np.dtype(name) for name in _TORCH.values() if name != "bfloat16"}
_STORAGE["bfloat16"] = np.dtype("<u2")


def pack_saved(value: Any, *, most: int, where: str) -> bytes:
    data = msgspec.msgpack.encode(_plain(value, where, _Budget(most)))
    if len(data) > most:
        raise _too_large(where, most)
    return data


def unpack_saved(data: bytes) -> Any:
    """Read what `pack_saved` made; tensors and arrays come as `TensorData`."""
    return msgspec.msgpack.decode(data, ext_hook=_array)


class _Budget:
    def __init__(self, most: int) -> None:
        self.most = most
        self.left = most

    def take(self, nbytes: int, where: str) -> None:
        self.left -= nbytes
        if self.left < 0:
            raise _too_large(where, self.most)


def _too_large(where: str, most: int) -> SpecError:
    return SpecError(
        f"{where}: more than {most} bytes; save less (some positions, a projection, a mean), or "
        "raise INSPECT_LENS_HOOK_BYTES"
    )


def _plain(value: Any, where: str, budget: _Budget) -> Any:
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, torch.Tensor):
        name = _TORCH.get(value.dtype)
        if name is None:
            raise SpecError(f"{where}: dtype {value.dtype}; allowed are {', '.join(_STORAGE)}")
        budget.take(value.numel() * value.element_size(), where)
        plain = value.detach().to("cpu").contiguous()
        bits = plain.view(torch.int16) if name == "bfloat16" else plain
        return _ext(name, tuple(plain.shape), bits.numpy().tobytes())
    # A number that Python has no type for, `np.longdouble`, stays what it is.
    if isinstance(value, np.generic) and not isinstance(number := value.item(), np.generic):
        return _plain(number, where, budget)
    if isinstance(value, np.ndarray):
        name = str(value.dtype)
        if name not in _STORAGE or name == "bfloat16":
            raise SpecError(f"{where}: array of {name}; allowed are {', '.join(_STORAGE)}")
        budget.take(value.nbytes, where)
        return _ext(name, value.shape, np.ascontiguousarray(value).tobytes())
    if isinstance(value, list | tuple):
        return [_plain(item, f"{where}[{i}]", budget) for i, item in enumerate(value)]
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str | int):
                raise SpecError(
                    f"{where}: has the key {key!r}; keys have to be text or whole numbers"
                )
        return {key: _plain(item, f"{where}[{key!r}]", budget) for key, item in value.items()}
    raise SpecError(
        f"{where}: is {type(value).__module__}.{type(value).__qualname__}, which is not sent: "
        "nothing is pickled on the way back. Save tensors, arrays, numbers, text, None, and lists "
        "and dicts of them"
    )


def _ext(name: str, shape: tuple[int, ...], data: bytes) -> msgspec.msgpack.Ext:
    return msgspec.msgpack.Ext(_ARRAY, msgspec.msgpack.encode([name, list(shape), data]))


def _array(code: int, data: memoryview) -> TensorData:
    name, shape, payload = msgspec.msgpack.decode(data)
    return TensorData(np.frombuffer(payload, _STORAGE[name]).reshape(shape), cast("DType", name))


@dataclass(frozen=True)
class Gathered:
    """What all workers sent of one request."""

    parts: dict[str, Any]
    """By `OWN` and `PERSISTENT`."""
    n_fed: int
    n_edited: int


def gather(messages: Sequence[Saved]) -> Gathered:
    """Put together what the stages of a pipeline sent of a request."""
    stages = sorted((unpack_saved(m.data) for m in messages), key=lambda d: min(d["layers"]))
    parts: dict[str, Any] = {}
    for part in (OWN, PERSISTENT):
        merged: dict[str, dict[Any, Any]] = {}
        for stage in stages:
            for index, saved in stage.get(part, {}).items():
                _merge(merged.setdefault(index, {}), saved, f"hook_results[{index!r}]")
        parts[part] = merged
    return Gathered(parts, min(m.n_fed for m in messages), sum(m.n_edited for m in messages))


def _merge(mine: dict[Any, Any], saved: Mapping[Any, Any], where: str) -> None:
    """Add what the hook saved on another pipeline stage, which had a context of its own."""
    for name, value in saved.items():
        if name not in mine:
            mine[name] = value
        elif isinstance(mine[name], list) and isinstance(value, list):
            mine[name] = mine[name] + value
        elif isinstance(mine[name], dict) and isinstance(value, dict):
            _merge(mine[name], value, f"{where}[{name!r}]")
        elif not _is_same(mine[name], value):
            raise CaptureError(
                f"{where}: two pipeline stages saved different values as {name!r}; each stage has "
                "a context of its own, so put ctx.layer_idx into the name, or append to a list"
            )


def _is_same(a: Any, b: Any) -> bool:
    if isinstance(a, TensorData) or isinstance(b, TensorData):
        return isinstance(a, TensorData) and isinstance(b, TensorData) and a.sha256 == b.sha256
    return bool(a == b)
