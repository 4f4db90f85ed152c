"""Memory with a limit: payloads up to a number of bytes, and handles by message id."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Generic, Protocol, TypeVar

from inspect_lens._settings import Settings

__all__ = ["MemoryStore", "MessageIndex"]


class _Sized(Protocol):
    @property
    def nbytes(self) -> int: ...


Held = TypeVar("Held", bound=_Sized)
Handle = TypeVar("Handle")


class MemoryStore(Generic[Held]):
    """Payloads by key; the least recently used ones leave when bytes run out.

    The newest payload stays whatever its size, so that what a call just returned can be read.
    """

    def __init__(self, limit_bytes: int | None = None) -> None:
        self._limit_bytes = limit_bytes
        self._items: OrderedDict[str, Held] = OrderedDict()
        self._bytes = 0
        # Put from worker threads, read from the event loop.
        self._lock = threading.Lock()

    @property
    def limit_bytes(self) -> int:
        """Bytes that may be held."""
        if self._limit_bytes is None:
            self._limit_bytes = Settings.load().memory_bytes
        return self._limit_bytes

    @property
    def nbytes(self) -> int:
        """Bytes that are held."""
        return self._bytes

    def put(self, key: str, payload: Held) -> None:
        """Hold a payload."""
        with self._lock:
            old = self._items.pop(key, None)
            self._bytes += payload.nbytes - (old.nbytes if old else 0)
            self._items[key] = payload
            while self._bytes > self.limit_bytes and len(self._items) > 1:
                _, gone = self._items.popitem(last=False)
                self._bytes -= gone.nbytes

    def get(self, key: str) -> Held | None:
        """The payload, if it is still here."""
        with self._lock:
            payload = self._items.get(key)
            if payload is not None:
                self._items.move_to_end(key)
            return payload

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._items.clear()
            self._bytes = 0


class MessageIndex(Generic[Handle]):
    """Handles by the id of the assistant message that they belong to."""

    def __init__(self, limit: int = 1 << 16) -> None:
        self._limit = limit
        self._items: OrderedDict[str, Handle] = OrderedDict()
        self._lock = threading.Lock()

    def put(self, message_id: str, handle: Handle) -> None:
        """Remember a handle."""
        with self._lock:
            self._items[message_id] = handle
            while len(self._items) > self._limit:
                self._items.popitem(last=False)

    def get(self, message_id: str) -> Handle | None:
        """The handle, if this process made it."""
        with self._lock:
            return self._items.get(message_id)
