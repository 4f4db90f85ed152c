"""What the requests of a batch have in common travels as bytes, which are read once.

The engine reads each request in the loop that also starts its steps: sixteen names of probes, read
anew for each of a thousand requests, are milliseconds in which no step begins.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import msgspec

__all__ = ["read", "written"]

_MOST = 1024


@lru_cache(maxsize=_MOST)
def written(values: tuple[Any, ...]) -> bytes:
    """Values that msgpack carries, as bytes: the same object for equal ones."""
    return msgspec.msgpack.encode(values)


@lru_cache(maxsize=_MOST)
def read(data: bytes) -> tuple[Any, ...]:
    """What was written, with tuples in the place of lists: the same object for equal bytes."""
    values: tuple[Any, ...] = _tupled(msgspec.msgpack.decode(data))
    return values


def _tupled(value: Any) -> Any:
    return tuple(map(_tupled, value)) if isinstance(value, list) else value
