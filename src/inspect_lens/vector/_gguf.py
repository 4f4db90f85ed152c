"""GGUF, as far as control vectors use it: text and numbers, and tensors of floats.

Source: the GGUF specification of ggml, version 3. Other tools write more kinds of values; those
are read over, and quantised tensors are refused. The reader of the package `gguf` is not used: it
believes the lengths in a file, so that an array of 2**60 numbers in 100 bytes never ends.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from inspect_lens._untrusted import judge_total

__all__ = ["GGUFFile", "decode_gguf", "encode_gguf"]

_MAGIC: Final = b"GGUF"
_VERSION: Final = 3
_ALIGNMENT: Final = 32
_U32, _TEXT, _ARRAY = 4, 8, 9
_NUMBERS: Final = {
    0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q",
    12: "<d",
}  # fmt: skip
_FLOATS: Final = {0: "<f4", 1: "<f2", 30: "<u2"}
_BFLOAT16: Final = 30
_DEPTH: Final = 4


class GGUFFile(NamedTuple):
    """Content of a file."""

    facts: dict[str, Any]
    """Text and numbers by key."""
    tensors: dict[str, NDArray[np.float32]]
    """By name; axes as numpy orders them, slowest first."""


def encode_gguf(
    facts: Mapping[str, str | int], tensors: Mapping[str, NDArray[np.float32]]
) -> bytes:
    """Content of a GGUF file.

    Args:
        facts: text, or whole numbers of 32 bits, by key.
        tensors: written as float32.

    Returns:
        The bytes.
    """
    head = [_MAGIC, struct.pack("<IQQ", _VERSION, len(tensors), len(facts))]
    for key, value in facts.items():
        head.append(_text(key))
        if isinstance(value, str):
            head += [struct.pack("<I", _TEXT), _text(value)]
        else:
            head.append(struct.pack("<II", _U32, value))
    offset, data = 0, []
    for name, tensor in tensors.items():
        array = np.ascontiguousarray(tensor, dtype="<f4")
        head += [_text(name), struct.pack("<I", array.ndim)]
        head += [struct.pack("<Q", n) for n in reversed(array.shape)]
        head.append(struct.pack("<IQ", 0, offset))
        part = array.tobytes()
        part += b"\0" * (-len(part) % _ALIGNMENT)
        data.append(part)
        offset += len(part)
    whole = b"".join(head)
    return whole + b"\0" * (-len(whole) % _ALIGNMENT) + b"".join(data)


def decode_gguf(content: bytes) -> GGUFFile:
    """Read a GGUF file.

    Args:
        content: of the file.

    Returns:
        Facts and tensors, widened to float32.

    Raises:
        ValueError: no GGUF, cut short, or a tensor is quantised.
    """
    reader = _Reader(content)
    if reader.take(4) != _MAGIC:
        raise ValueError("it does not begin with GGUF")
    version = reader.number("<I")
    if version not in (2, 3):
        raise ValueError(f"version {version}; allowed are 2 and 3")
    n_tensors, n_facts = reader.number("<Q"), reader.number("<Q")
    facts: dict[str, Any] = {}
    for _ in range(n_facts):
        key = reader.text()
        facts[key] = reader.value(reader.number("<I"))
    entries = []
    for _ in range(n_tensors):
        name, n_axes = reader.text(), reader.number("<I")
        if n_axes > _DEPTH:
            raise ValueError(f"tensor {name!r} has {n_axes} axes; allowed are {_DEPTH} at most")
        shape = tuple(reversed([reader.number("<Q") for _ in range(n_axes)]))
        entries.append((name, shape, reader.number("<I"), reader.number("<Q")))
    alignment = int(facts.get("general.alignment", _ALIGNMENT))
    if alignment < 1:
        raise ValueError(f"general.alignment {alignment}")
    start = -(-reader.at // alignment) * alignment
    tensors, sizes = {}, []
    for name, shape, kind, _ in entries:
        if kind not in _FLOATS:
            raise ValueError(f"tensor {name!r} has type {kind}; allowed are F32, F16 and BF16")
        sizes.append(math.prod(shape) * np.dtype(_FLOATS[kind]).itemsize)
    judge_total(sizes, len(content) - start)
    for (name, shape, kind, offset), size in zip(entries, sizes, strict=True):
        part = content[start + offset : start + offset + size]
        if len(part) != size:
            raise ValueError(f"it ends within tensor {name!r}")
        array = np.frombuffer(part, _FLOATS[kind])
        if kind == _BFLOAT16:
            array = (array.astype("<u4") << 16).view("<f4")
        tensors[name] = array.reshape(shape).astype(np.float32)
    return GGUFFile(facts, tensors)


def _text(value: str) -> bytes:
    raw = value.encode()
    return struct.pack("<Q", len(raw)) + raw


class _Reader:
    """Reads values one after the other; a file that is cut short is an error."""

    def __init__(self, content: bytes) -> None:
        self.content, self.at = content, 0

    def take(self, n: int) -> bytes:
        part = self.content[self.at : self.at + n]
        if len(part) != n:
            raise ValueError("it ends within its header")
        self.at += n
        return part

    def number(self, kind: str) -> int:
        return int(struct.unpack(kind, self.take(struct.calcsize(kind)))[0])

    def text(self) -> str:
        return self.take(self.number("<Q")).decode("utf-8")

    def value(self, kind: int, depth: int = 0) -> Any:
        if kind in _NUMBERS:
            size = struct.calcsize(_NUMBERS[kind])
            return struct.unpack(_NUMBERS[kind], self.take(size))[0]
        if kind == _TEXT:
            return self.text()
        if kind == _ARRAY and depth < _DEPTH:
            inner, n = self.number("<I"), self.number("<Q")
            if n > len(self.content):
                raise ValueError("it ends within its header")
            return [self.value(inner, depth + 1) for _ in range(n)]
        raise ValueError(f"a value of type {kind}")
