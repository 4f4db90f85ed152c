"""Results of the binary transport that wait in the API server to be fetched.

A handle is a promise: nothing that waits to be fetched makes room for something else. So a store
that is full takes no more until something is fetched or expires, and no client can have more than
half of it. Who has too much there is told so ("busy"); others have their half. It is told before a
request is scheduled where what waits leaves no room for what is sure to come, and else when results
are there: whether a client fetches in time, and how long a text becomes, is not known before.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import logging
import os
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from inspect_lens._base.same_host import fetch_here, serve_here
from inspect_lens._settings import Settings
from inspect_lens._vllm import telemetry
from inspect_lens._vllm.sinks.sink import own_memory
from inspect_lens._vllm.sinks.threads import Threads
from inspect_lens._vllm.telemetry import CALLER
from inspect_lens.errors import CapacityError, LensError, UnsupportedError
from inspect_lens.spec import TensorData, encode_frame, encode_tensor

TTL_S = 300.0
_LOOK_S = 1.0
"""Between two looks at what has expired, and at what has waited since the look before: where that
keeps much more memory than its own, it is copied. Most is fetched at once, and never copied."""
_EACH_BYTES = 1024
"""What a payload takes beside its bytes: a stream may have one for each token, of a row or two."""


class _Payload(NamedTuple):
    data: bytes | memoryview
    expires: float
    client: str
    size: int
    """As it counts."""


class PayloadStore:
    """Tensors waiting to be fetched: bounded in bytes and in time."""

    def __init__(
        self,
        *,
        max_bytes: int | None = None,
        each_bytes: int = _EACH_BYTES,
        ttl_s: float = TTL_S,
        on_change: Callable[[int, int, int, int], None] | None = None,
    ) -> None:
        self._given_bytes, self._each_bytes = max_bytes, each_bytes
        self._ttl_s = ttl_s
        self._on_change = on_change
        self._n_expired = 0
        self._nonce, self._secret = secrets.token_hex(8), secrets.token_bytes(32)
        self._numbers = itertools.count()
        # In the order in which they expire.
        self._waiting: dict[str, _Payload] = {}
        self._n_bytes = 0
        self._of_client: Counter[str] = Counter()
        """Bytes that wait to be fetched."""
        self._lock = threading.Condition(threading.Lock())
        """Notified when something waits."""
        self._threads = Threads("inspect-lens-store", "results that wait", self._look)
        self._told = 0
        """How many wait, as was told last."""
        self._new, self._seen = list[str](), list[str]()
        """Handles since the last look, and since the one before."""
        self.refusal: str | None = None
        """Why handles of this server are not to be relied on; None where they are."""
        self.is_served = False
        """Whether processes of this user can fetch without HTTP."""

    @cached_property
    def max_bytes(self) -> int:
        """Bytes of everything that is held."""
        return Settings.load().store_bytes if self._given_bytes is None else self._given_bytes

    def admit(self, size: int) -> None:
        """Judge a payload of the client that is served, before it costs anything."""
        size, client = size + self._each_bytes, CALLER.get().client
        with self._lock:
            self._drop(time.monotonic())
            self._check(size, client)

    def put(self, data: bytes | memoryview) -> str:
        """Keep a payload of the client that is served; returns its handle, which none can guess."""
        size, client = len(data) + self._each_bytes, CALLER.get().client
        handle = self._new_handle()
        now = time.monotonic()
        with self._lock:
            self._drop(now)
            self._check(size, client)
            self._waiting[handle] = _Payload(data, now + self._ttl_s, client, size)
            self._new.append(handle)
            self._n_bytes += size
            self._of_client[client] += size
            self._lock.notify_all()
        self._threads.begin()
        return handle

    def _new_handle(self) -> str:
        """One that none can guess, without asking the system for random bytes each time."""
        name = self.name
        text = f"{name}-{next(self._numbers)}".encode()
        return f"{name}-{hashlib.blake2b(text, key=self._secret, digest_size=24).hexdigest()}"

    def discard(self, handles: Iterable[str]) -> None:
        """Let go of payloads that nobody will fetch; some may have been fetched."""
        with self._lock:
            for handle in handles:
                self._take(handle)

    def get(self, handle: str) -> bytes | memoryview | None:
        """The payload, once; None when the handle is unknown, was fetched, or has expired."""
        with self._lock:
            self._drop(time.monotonic())
            data = self._take(handle)
        return data

    def give(self, handle: str) -> bytes | memoryview | None:
        """As `get`, for a client; with a span."""
        began, data = time.time_ns(), self.get(handle)
        telemetry.fetched(handle, began, *((410, 0) if data is None else (200, len(data))))
        return data

    def serve(self, *, is_needed: bool) -> None:
        """Let other processes of this user fetch what this one made.

        Where they cannot, there is HTTP, and handles are refused if a fetch `is_needed` here.
        """
        if self.is_served:
            return
        try:
            serve_here(self.name, self.give)
            self.is_served = True
        except OSError as error:
            logger.warning("inspect_lens: results are given away by HTTP alone: %s", error)
            if is_needed:
                why = error.strerror or type(error).__name__  # clients need not know the folder
                self.refusal = (
                    "activations_transport: the API servers of this engine cannot share results "
                    f"({why}), and a fetch may reach one without the result; use base64"
                )

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
        with self._lock:
            return self._n_bytes

    def report(self) -> None:
        """Tell what is held to whoever was named when this was made; else they hear each second."""
        with self._lock:
            self._tell()

    def _tell(self) -> None:
        self._told = len(self._waiting)
        if self._on_change is not None:
            expired, self._n_expired = self._n_expired, 0
            self._on_change(len(self._waiting), self._n_bytes, self.max_bytes, expired)

    def _check(self, size: int, client: str) -> None:
        """Raise where results of a client have no room beside what is held."""
        if self.refusal is not None:
            raise UnsupportedError(self.refusal)
        held = self._n_bytes
        share, mine = self.max_bytes // 2, self._of_client[client]
        if size > share:
            raise UnsupportedError(
                f"activations of {size} bytes, and half of the binary store, {share} bytes, is "
                "what one client can have there; capture fewer layers or tokens, or raise "
                "INSPECT_LENS_STORE_BYTES"
            )
        if mine + size > share or held + size > self.max_bytes:
            raise CapacityError(
                f"{mine} bytes of this client's results wait to be fetched, of {held} in the "
                f"binary store, and {size} more come; at most {share} of one client and "
                f"{self.max_bytes} of all fit. Fetch results when they come: others wait "
                f"{self._ttl_s:g} s at most. Or raise INSPECT_LENS_STORE_BYTES"
            )

    def _drop(self, now: float) -> None:
        while self._waiting and self._waiting[handle := next(iter(self._waiting))].expires <= now:
            self._take(handle)
            self._n_expired += 1

    def _take(self, handle: str) -> bytes | memoryview | None:
        if (item := self._waiting.pop(handle, None)) is None:
            return None
        self._n_bytes -= item.size
        self._of_client[item.client] -= item.size
        if not self._of_client[item.client]:
            del self._of_client[item.client]
        return item.data

    def _look(self) -> None:
        # Without it the last results of a run would be held until the next run.
        with self._lock:
            self._lock.wait_for(lambda: bool(self._waiting or self._told))
        time.sleep(min(self._ttl_s, _LOOK_S))
        self._wake()

    def _wake(self) -> None:
        with self._lock:
            self._drop(time.monotonic())
            self._tell()
            late, self._seen, self._new = self._seen, self._new, []
        for handle in late:
            self._own(handle)

    def _own(self, handle: str) -> None:
        """Let go of what lies beside a payload; copied without the lock, for which others wait."""
        item = self._waiting.get(handle)
        rows: Any = getattr(item and item.data, "obj", None)
        if item is None or not isinstance(rows, np.ndarray):
            return
        own = item._replace(data=own_memory(rows).data)
        with self._lock:
            if handle in self._waiting:
                self._waiting[handle] = own


logger = logging.getLogger("vllm.inspect_lens")


async def fetch_payload(handle: str, payloads: PayloadStore) -> bytes | memoryview | None:
    """What waits under a handle, in this process or in another API server of this user."""
    if payloads.made(handle):
        return payloads.give(handle)
    return await asyncio.get_running_loop().run_in_executor(None, fetch_here, handle)


Entries = dict[str, Any]
"""What stands in a response, by name."""


def inline_entries(tensors: Mapping[str, TensorData]) -> Entries:
    return {name: encode_tensor(tensor) for name, tensor in tensors.items()}


def handle_entries(tensors: Mapping[str, TensorData], payloads: PayloadStore) -> Entries:
    """Keep tensors until their client fetches them."""
    entries: Entries = {}
    try:
        for name, tensor in tensors.items():
            entry, frame = encode_frame(tensor)
            beside = {"nbytes": len(frame), "transport": "binary"}
            entries[name] = entry | {"handle": payloads.put(frame)} | beside
    except LensError:
        payloads.discard([entry["handle"] for entry in entries.values()])
        raise
    return entries


_PASSING = {"fastapi", "inspect_lens", "prometheus_fastapi_instrumentator", "starlette", "vllm"}
"""Packages whose middleware passes bodies on as they are, but for what is made of a function."""


def takes_any_buffer(app: Any) -> bool:
    """Whether a body may be a view of memory: the middleware of others may want bytes.

    vLLM's own that logs responses (`VLLM_DEBUG_LOG_API_SERVER_RESPONSE`) does, and is a function.
    """
    from starlette.middleware.base import BaseHTTPMiddleware

    kinds = [item.cls for item in app.user_middleware]
    return all(
        getattr(kind, "__module__", "").partition(".")[0] in _PASSING
        and not (isinstance(kind, type) and issubclass(kind, BaseHTTPMiddleware))
        for kind in kinds
    )
