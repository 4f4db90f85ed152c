"""What waits for a sink: bounded in bytes, and thinned out where the operator wants that."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from inspect_lens._shards import Captured
from inspect_lens.spec import SinkReceipt, SinkStatus

from .config import SinkConfig
from .sink import lot

__all__ = ["Item", "Waiting"]

_BESIDE = 1024
"""Bytes, about, that a sample takes beside rows, ids and texts."""
_OF_ID = 36
"""Bytes of an integer in a tuple."""


@dataclass
class Item:
    """A sample that waits."""

    sample: Captured
    future: Future[SinkReceipt] | None
    """Told what has become of it; None where nobody waits."""
    came: float = field(default_factory=time.monotonic)

    @property
    def rows_bytes(self) -> int:
        """Bytes of its rows."""
        return 0 if self.sample.acts is None else self.sample.acts.nbytes

    @property
    def n_bytes(self) -> int:
        """Bytes that it takes in memory, about."""
        record = self.sample.record
        texts = 2 * (len(record.prompt) + len(record.completion))
        n_ids = len(self.sample.token_ids) + len(self.sample.positions)
        return self.rows_bytes + _OF_ID * n_ids + texts + _BESIDE


class Waiting:
    """Samples in the order in which they came; all methods may be called from any thread."""

    def __init__(self, config: SinkConfig, *, is_eager: bool) -> None:
        """Begin empty.

        Args:
            config: of the sink.
            is_eager: whether samples are given away one by one.
        """
        self.changed = threading.Condition()
        """Notified when something has come, has gone, or is wanted at once."""
        self._config, self._is_eager = config, is_eager
        self._items: deque[Item] = deque()
        self._taken = 0
        """Bytes of what is being given away, which are in memory still."""
        self._n_bytes = 0
        self._flush_until = 0.0

    @property
    def n_bytes(self) -> int:
        """Bytes in memory."""
        return self._n_bytes

    @property
    def is_slow(self) -> bool:
        """Whether more than half of the memory is taken, and something could leave it."""
        return bool(self._items) and 2 * self._n_bytes > self._config.memory_bytes

    def put(self, item: Item) -> tuple[SinkStatus, str] | None:
        """Take a sample in; else what becomes of it, and why."""
        config, size = self._config, item.n_bytes
        with self.changed:
            full = self._n_bytes / config.memory_bytes
            kept = 1.0 if config.when_slow != "sample" else 2 * (1 - full)
            if kept < 1 and lot(config.seed, "slow", item.sample.record.id) >= kept:
                return "sampled_out", f"the sink is slow; its memory is {full:.0%} full"
            if self._n_bytes + size > config.memory_bytes:
                return "dropped", (
                    f"{self._n_bytes} of {config.memory_bytes} bytes wait for the sink, and "
                    f"{size} more came"
                )
            self._items.append(item)
            self._n_bytes += size
            self.changed.notify_all()
        return None

    def due_in(self) -> float:
        """Seconds until what waits is to be given away; infinite where nothing waits."""
        with self.changed:
            if not self._items:
                return float("inf")
            now, config = time.monotonic(), self._config
            is_full = self._n_bytes - self._taken >= config.shard_bytes
            if is_full or self._is_eager or now < self._flush_until:
                return 0.0
            first = next((i.came for i in self._items if i.future is not None), float("inf"))
            return min(self._items[0].came + config.shard_s, first + config.linger_s) - now

    def pop(self, *, whole: bool = False) -> list[Item]:
        """Take out what is given away together.

        Args:
            whole: a shard, also where samples are given away one by one.
        """
        items: list[Item] = []
        size = 0
        most = self._config.shard_bytes if whole or not self._is_eager else 1
        with self.changed:
            while self._items and size < most:
                items.append(self._items.popleft())
                size += items[-1].n_bytes
            self._taken += size
        return items

    def gone(self, items: Sequence[Item]) -> None:
        """Take note that items of `pop` are in memory no longer."""
        with self.changed:
            size = sum(item.n_bytes for item in items)
            self._n_bytes -= size
            self._taken -= size
            self.changed.notify_all()

    def flush(self, timeout_s: float) -> bool:
        """Wait until all is given away; False where the time was too short."""
        with self.changed:
            self._flush_until = max(self._flush_until, time.monotonic() + timeout_s)
            self.changed.notify_all()
            return self.changed.wait_for(lambda: not self._n_bytes, timeout_s)
