"""Results of the binary transport that wait in the API server to be fetched."""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

from inspect_lens.errors import UnsupportedError

__all__ = ["TTL_S", "PayloadStore"]

TTL_S = 300.0
FETCHED_TTL_S = 30.0
"""A client whose connection broke may ask once more."""
_MAX_BYTES = 8 << 30


@dataclass(frozen=True)
class _Payload:
    data: bytes | memoryview
    expires: float


class PayloadStore:
    """Tensors waiting to be fetched: bounded in bytes and in time."""

    def __init__(
        self,
        *,
        max_bytes: int = _MAX_BYTES,
        ttl_s: float = TTL_S,
        fetched_ttl_s: float = FETCHED_TTL_S,
    ) -> None:
        self._max_bytes = max_bytes
        self._ttl_s = ttl_s
        self._fetched_ttl_s = fetched_ttl_s
        self._nonce = secrets.token_hex(4)
        # Each in the order in which its items expire.
        self._waiting: OrderedDict[str, _Payload] = OrderedDict()
        self._fetched: OrderedDict[str, _Payload] = OrderedDict()
        self._n_bytes = 0
        self._lock = threading.Lock()
        self._timer: threading.Timer | None = None

    def put(self, data: bytes | memoryview) -> str:
        """Keep a payload; returns its handle, which cannot be guessed.

        Args:
            data: one-dimensional, of bytes; nobody may write to it any more.

        Raises:
            UnsupportedError: the payload alone is larger than the store.
        """
        if len(data) > self._max_bytes:
            raise UnsupportedError(
                f"activations of {len(data)} bytes exceed the binary store of {self._max_bytes}; "
                "capture fewer layers or tokens"
            )
        handle = f"{self.name}-{secrets.token_urlsafe(24)}"
        now = time.monotonic()
        with self._lock:
            self._drop(now, room_for=len(data))
            self._waiting[handle] = _Payload(data, now + self._ttl_s)
            self._n_bytes += len(data)
            self._wake_later()
        return handle

    def get(self, handle: str) -> bytes | memoryview | None:
        """The payload, or None when the handle is unknown or has expired."""
        now = time.monotonic()
        with self._lock:
            self._drop(now, room_for=0)
            if (item := self._waiting.pop(handle, None)) is not None:
                self._fetched[handle] = _Payload(item.data, now + self._fetched_ttl_s)
            item = self._fetched.get(handle)
        return item.data if item is not None else None

    def made(self, handle: str) -> bool:
        """Whether a handle is of this store, which may have let it go."""
        return handle.startswith(f"{self.name}-")

    @property
    def name(self) -> str:
        """Of this process's store: its handles begin with it, and nobody else's do."""
        # With the process, for those that are forked from this one.
        return f"{os.getpid():x}{self._nonce}"

    @property
    def n_bytes(self) -> int:
        """Bytes that are held."""
        with self._lock:
            return self._n_bytes

    def _drop(self, now: float, *, room_for: int) -> None:
        """Let go of what has expired, and of what others need room for, fetched ones first."""
        for items in (self._fetched, self._waiting):
            for handle, item in list(_until_valid(items, now)):
                del items[handle]
                self._n_bytes -= len(item.data)
        for items in (self._fetched, self._waiting):
            while items and self._n_bytes + room_for > self._max_bytes:
                self._n_bytes -= len(items.popitem(last=False)[1].data)

    def _wake_later(self) -> None:
        # Without it the last results of a run would be held until the next run.
        if self._timer is None:
            self._timer = threading.Timer(self._fetched_ttl_s, self._wake)
            self._timer.daemon = True
            self._timer.start()

    def _wake(self) -> None:
        with self._lock:
            self._timer = None
            self._drop(time.monotonic(), room_for=0)
            if self._waiting or self._fetched:
                self._wake_later()


def _until_valid(items: OrderedDict[str, _Payload], now: float) -> Iterator[tuple[str, _Payload]]:
    for handle, item in items.items():
        if item.expires > now:
            return
        yield handle, item
