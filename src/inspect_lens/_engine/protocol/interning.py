"""What requests ask for, as bytes: to tell those that ask for the same, and to read them once.

The engine reads each request in the loop that also starts its steps: sixteen names of probes, read
or compared anew for each of a thousand requests, are milliseconds in which no step begins.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import msgspec

__all__ = ["read", "written"]


@lru_cache(maxsize=1024)
def written(values: tuple[Any, ...]) -> bytes:
    """Values that msgpack carries, as bytes: the same object for equal ones."""
    return msgspec.msgpack.encode(values)


def read(data: bytes) -> tuple[Any, ...]:
    """What was written, with tuples in the place of lists."""
    values: tuple[Any, ...] = _tupled(msgspec.msgpack.decode(data))
    return values


def _tupled(value: Any) -> Any:
    return tuple(map(_tupled, value)) if isinstance(value, list) else value
