"""What was made before and may be asked for again, as long as there is room for it."""

from __future__ import annotations

import threading
from collections.abc import Hashable
from typing import Generic, TypeVar

__all__ = ["BYTES_BESIDE", "Kept"]

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")

BYTES_BESIDE = 1 << 10
"""What a value costs that has no tensors."""


class Kept(Generic[Key, Value]):
    """Values by key; those that came first go when there is no more room. Threads may share it."""

    def __init__(self, most: int, most_bytes: int) -> None:
        """Start empty.

        Args:
            most: values.
            most_bytes: bytes of all of them together. A value of more than an eighth is not kept.
        """
        self._most, self._most_bytes, self._nbytes = most, most_bytes, 0
        self._known: dict[Key, tuple[Value, int]] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._known)

    def get(self, key: Key) -> Value | None:
        """What is kept under a key; None for nothing."""
        known = self._known.get(key)
        return None if known is None else known[0]

    def keep(self, key: Key, value: Value, nbytes: int = 0) -> None:
        """Keep a value in the place of the one that the key has.

        Args:
            key: names it.
            value: what to keep.
            nbytes: of what it holds.
        """
        nbytes += BYTES_BESIDE
        if nbytes > self._most_bytes // 8:
            return
        with self._lock:
            self._drop(key)
            self._known[key] = value, nbytes
            self._nbytes += nbytes
            while len(self._known) > self._most or self._nbytes > self._most_bytes:
                self._drop(next(iter(self._known)))

    def _drop(self, key: Key) -> None:
        known = self._known.pop(key, None)
        if known is not None:
            self._nbytes -= known[1]
