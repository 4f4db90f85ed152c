"""The one kind of cache on the way of a request: by content, and with one bound for a process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from typing import Any, Final, Generic, TypeVar
from weakref import ref

__all__ = ["WEIGHTS", "Cache"]

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")

BYTES_BESIDE = 1 << 10
"""What a value costs that has no tensors."""


class Budget:
    """Bytes of several caches together; what came first goes first, whichever cache has it."""

    def __init__(self, most_bytes: int, most_each: int | None = None) -> None:
        self.most_bytes, self.n_bytes = most_bytes, 0
        self.most_each = most_bytes // 16 if most_each is None else most_each
        self.lock = threading.Lock()
        self.order: dict[tuple[ref[Cache[Any, Any]], Hashable], int] = {}
        """Bytes by cache and key."""

    def drop(self, one: tuple[ref[Cache[Any, Any]], Hashable]) -> None:
        """Let go of a value; call it with the lock."""
        nbytes = self.order.pop(one, None)
        if nbytes is not None:
            self.n_bytes -= nbytes
            if (cache := one[0]()) is not None:
                cache.values.pop(one[1], None)


PROCESS: Final = Budget(1 << 27)
"""Of all caches of a process, but for weights."""
WEIGHTS: Final = Budget(1 << 32, most_each=1 << 62)
"""Of probes, lenses and autoencoders that a server may be told of; the latest always has room."""


class Cache(Generic[Key, Value]):
    """Values by key; those that came first go when there is no more room. Threads may share it."""

    def __init__(self, most: int, budget: Budget = PROCESS) -> None:
        self._most, self._budget, self._self = most, budget, ref(self)
        self.values: dict[Key, Value] = {}

    def __len__(self) -> int:
        return len(self.values)

    def get(self, key: Key) -> Value | None:
        """What is kept under a key; None for nothing."""
        return self.values.get(key)

    def keep(self, key: Key, value: Value, nbytes: int = 0) -> None:
        """Keep a value in the place of the one that the key has."""
        budget, nbytes = self._budget, nbytes + BYTES_BESIDE
        if nbytes > budget.most_each:
            return
        with budget.lock:
            budget.drop((self._self, key))
            self.values[key] = value
            budget.order[self._self, key] = nbytes
            budget.n_bytes += nbytes
            while len(self.values) > self._most:
                budget.drop((self._self, next(iter(self.values))))
            while budget.n_bytes > budget.most_bytes and len(budget.order) > 1:
                budget.drop(next(iter(budget.order)))

    def forget(self, is_it: Callable[[Value], bool]) -> None:
        """Let go of the latest value for which `is_it` is true."""
        with self._budget.lock:
            for key in reversed(self.values):
                if is_it(self.values[key]):
                    return self._budget.drop((self._self, key))
