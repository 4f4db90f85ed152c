"""Captured rows of earlier requests, by block of tokens, beside vLLM's prefix cache.

A token that a prefix cache has is not computed, so it has no rows. Where its rows were captured
before, they are taken from here, and the prompt need not be computed again.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

logger = logging.getLogger("vllm.inspect_lens")

BLOCK = 16
"""Tokens of a block."""
_WAITING_MOST = 64
"""Requests whose rows wait to be kept, and hold memory of results as long."""
_SEEN_MOST = 1 << 17
"""Blocks that are remembered without their rows: some 20 MB."""


class Prefix:
    """The tokens of a request, and the hash of each block of them with all that is before it."""

    def __init__(
        self, kind: bytes, tokens: Sequence[int], *, apart: tuple[int, bytes] | None = None
    ) -> None:
        """Rows from the position of `apart` on are of a kind of their own."""
        self._last, self._hashes = kind, list[bytes]()
        self._apart_at, self._apart = (-1, b"") if apart is None else apart
        self._tokens: NDArray[np.int64] = np.zeros(0, dtype=np.int64)
        self.extend(tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """Add tokens that were sampled."""
        self._tokens = np.concatenate((self._tokens, np.asarray(tokens, dtype=np.int64)))

    def hashes(self) -> Iterator[bytes]:
        """Of each whole block, in order; worked out once, as far as it is asked for."""
        yield from self._hashes
        for i in range(len(self._hashes), len(self._tokens) // BLOCK):
            block = self._tokens[i * BLOCK : (i + 1) * BLOCK].tobytes()
            if i == self._apart_at // BLOCK:
                block += self._apart
            self._last = hashlib.blake2b(self._last + block, digest_size=16).digest()
            self._hashes.append(self._last)
            yield self._last


@dataclass(frozen=True)
class CachedRows:
    """Rows of the first tokens of a prompt, which a request need not compute."""

    blocks: tuple[NDArray[Any], ...]
    """Each (rows of a token, `BLOCK`, width), in the storage of the capture's dtype."""

    @property
    def n_tokens(self) -> int:
        """How many tokens these are."""
        return len(self.blocks) * BLOCK

    def before(self, rows: NDArray[Any], lo: int) -> NDArray[Any]:
        """These rows from position `lo` on, and behind them those that were computed."""
        first, offset = divmod(lo, BLOCK)
        blocks = [self.blocks[first][:, offset:], *self.blocks[first + 1 :]]
        return np.concatenate((*blocks, rows), axis=1)


class RowCache:
    """Rows of blocks, the least recently used of which go first. Any thread may ask."""

    def __init__(
        self, most_bytes: int, *, keeps_first: bool, on_change: Callable[[], None] | None = None
    ) -> None:
        self.most_bytes = most_bytes
        self._keeps_first = keeps_first
        self._on_change = on_change
        self._lock = threading.Lock()
        self._rows: OrderedDict[bytes, NDArray[Any]] = OrderedDict()
        self._seen: OrderedDict[bytes, None] = OrderedDict()
        self._epoch = self._n_bytes = self._n_waiting = 0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="inspect-lens-rows")

    @property
    def epoch(self) -> int:
        """Changes with `clear`; rows of a request that began before are not kept."""
        return self._epoch

    @property
    def n_bytes(self) -> int:
        """Bytes of rows that are kept."""
        return self._n_bytes

    def find(self, prefix: Prefix, most: int) -> CachedRows | None:
        """Rows of a prompt's first tokens."""
        found = []
        with self._lock:
            if not self._rows:
                return None
            for key in islice(prefix.hashes(), most // BLOCK):
                rows = self._rows.get(key)
                if rows is None:
                    break
                found.append((key, rows))
            # What is nearer to the beginning is of use to more requests, and stays longer.
            for key, _ in reversed(found):
                self._rows.move_to_end(key)
        return CachedRows(tuple(rows for _, rows in found)) if found else None

    def keep(self, prefix: Prefix, rows: NDArray[Any], lo: int, epoch: int) -> None:
        """Keep the rows of a request."""
        if not rows.shape[0] * rows.shape[2]:
            return
        first, end = -(-lo // BLOCK), (lo + rows.shape[1]) // BLOCK
        keys = list(islice(prefix.hashes(), end))
        for i in reversed(range(first, len(keys))):
            with self._lock:
                if epoch != self._epoch:
                    return
                if not self._wants(keys[i]):
                    continue
            at = i * BLOCK - lo
            block = np.ascontiguousarray(rows[:, at : at + BLOCK])
            self._put(keys[i], block.copy() if block.base is not None else block, epoch)
        self._tell()

    def keep_later(self, prefix: Prefix, rows: NDArray[Any], lo: int, epoch: int) -> None:
        """`keep` in a thread of its own; nothing is kept while that is far behind."""
        with self._lock:
            if self._n_waiting >= _WAITING_MOST:
                return
            self._n_waiting += 1
        # A process that ends takes no work any more, and its last requests have their rows.
        with contextlib.suppress(RuntimeError):
            self._thread.submit(self._keep_one, prefix, rows, lo, epoch)

    def _keep_one(self, prefix: Prefix, rows: NDArray[Any], lo: int, epoch: int) -> None:
        try:
            self.keep(prefix, rows, lo, epoch)
        except Exception:
            logger.exception("inspect_lens: rows of a request could not be kept")
        finally:
            with self._lock:
                self._n_waiting -= 1

    def settle(self) -> None:
        """Wait until all rows are kept that were to be kept later."""
        self._thread.submit(lambda: None).result()

    def clear(self) -> None:
        """Forget all: the model may be another one from now on."""
        with self._lock:
            self._epoch += 1
            self._rows.clear()
            self._seen.clear()
            self._n_bytes = 0
        self._tell()

    def _tell(self) -> None:
        if self._on_change is not None:
            self._on_change()

    def _wants(self, key: bytes) -> bool:
        if key in self._rows:
            return False
        if self._keeps_first or key in self._seen:
            return True
        self._seen[key] = None
        if len(self._seen) > _SEEN_MOST:
            self._seen.popitem(last=False)
        return False

    def _put(self, key: bytes, block: NDArray[Any], epoch: int) -> None:
        with self._lock:
            if epoch != self._epoch or key in self._rows or block.nbytes > self.most_bytes:
                return
            self._rows[key] = block
            self._n_bytes += block.nbytes
            while self._n_bytes > self.most_bytes:
                _, gone = self._rows.popitem(last=False)
                self._n_bytes -= gone.nbytes
