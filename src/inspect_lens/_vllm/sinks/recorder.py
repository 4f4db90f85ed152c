"""Takes results for a slow receiver: a queue of bounded memory, and threads that empty it.

Whoever offers a result is never kept waiting. What comes faster than the receiver takes it is
thinned out, written to a disk of this host or dropped, as the operator says, and counted.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections import Counter, deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path

from inspect_lens._shards import Captured, decode_shard, shard_parts
from inspect_lens._vllm.telemetry import add, note
from inspect_lens.errors import SpecError
from inspect_lens.spec import SinkReceipt, SinkStatus

from .sink import Done, Given, Receiver, SinkConfig, Spilled, SpillFolder, lot
from .threads import Threads

logger = logging.getLogger("vllm.inspect_lens")

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
        return 0 if self.sample.acts is None else self.sample.acts.nbytes

    @property
    def n_bytes(self) -> int:
        record = self.sample.record
        texts = 2 * (len(record.prompt) + len(record.completion))
        n_ids = len(self.sample.token_ids) + len(self.sample.positions)
        return self.rows_bytes + _OF_ID * n_ids + texts + _BESIDE


_RETRIES_S = (0.5, 2.0, 8.0)


def new_writer() -> str:
    """A name that no other process has."""
    return secrets.token_hex(6)


@dataclass(frozen=True)
class Offered:
    """A result at a sink."""

    receipt: SinkReceipt
    """What is known now."""
    future: Future[SinkReceipt] | None = None
    """What will have become of it; None where that is known, or nobody waits for it."""


class Recorder:
    def __init__(
        self, name: str, config: SinkConfig, receiver: Receiver, tensor: str, writer: str = ""
    ) -> None:
        self.name, self.config = name, config
        self._receiver, self._tensor = receiver, tensor
        self._writer = writer or new_writer()
        self._spill = None
        if config.spill:
            folder = Path(config.spill) / name
            self._spill = SpillFolder(folder, config.spill_bytes, self._writer)
        self._changed = threading.Condition()
        """Notified when something has come, has gone, or is wanted at once."""
        self._waiting: deque[Item] = deque()
        self._n_bytes = self._n_leaving = 0
        """Bytes that are in memory, and those of them that are being given away."""
        self._flush_until = 0.0
        self._lock = threading.Lock()
        self._n_offered = self._taken_bytes = 0
        self._next_number = 0
        self._free: list[int] = []
        """Numbers of shards that could not be written: a reader waits for none for ever."""
        self._again = 0.0
        """When the receiver is asked once more to take what is spilled."""
        self.counts: Counter[str] = Counter()
        """What became of results, by status."""
        self._is_told = False
        """Whether the log has said that something failed."""
        works = [self._give_next] if self._spill is None else [self._give_next, self._spill_next]
        self._threads = Threads(f"inspect-lens-sink-{name}", f"the sink {name!r}", *works)
        if self._spill is not None and self._spill.first() is not None:
            self._threads.begin()  # with what earlier processes have left

    def take(self, done: Done, *, waits: bool = False) -> Offered:
        """Take a result into the queue, or say why not; never waits."""
        with self._lock:
            index = self._n_offered
            self._n_offered += 1
        item = Item(done.captured(self._tensor, index), Future() if waits else None)
        refused = self._put(item)
        if refused is not None:
            self.count(refused[0])
            return Offered(self._receipt(item.sample, refused[0], reason=refused[1]))
        self._threads.begin()
        self._tell_held()
        told = self._receipt(item.sample, "queued", reason="waits for the next shard")
        return Offered(told, item.future)

    def _put(self, item: Item) -> tuple[SinkStatus, str] | None:
        """Take a sample in; else what becomes of it, and why."""
        config, size = self.config, item.n_bytes
        limit = config.limit_bytes
        with self._changed:
            if limit and self._taken_bytes + item.rows_bytes > limit:
                return "dropped", f"the operator's limit for the sink is reached ({limit} bytes)"
            full = self._n_bytes / config.memory_bytes
            kept = 1.0 if config.when_slow != "sample" else 2 * (1 - full)
            if kept < 1 and lot(config.seed, "slow", item.sample.record.id) >= kept:
                return "sampled_out", f"the sink is slow; its memory is {full:.0%} full"
            if self._n_bytes + size > config.memory_bytes:
                return "dropped", (
                    f"{self._n_bytes} of {config.memory_bytes} bytes wait for the sink, and "
                    f"{size} more came"
                )
            self._waiting.append(item)
            self._n_bytes += size
            self._taken_bytes += item.rows_bytes
            self._changed.notify_all()
        return None

    def count(self, status: SinkStatus, rows: int = 0, n_bytes: int = 0) -> None:
        with self._lock:
            self.counts[status] += 1
        add("inspect_lens_sink_results_total", 1, self.name, status)
        add("inspect_lens_sink_rows_total", rows, self.name)
        add("inspect_lens_sink_bytes_total", n_bytes, self.name)

    def failed(self, error: BaseException) -> None:
        """Count a result that never came here; the first failure is logged."""
        self._told(error)
        self.count("failed")

    def describe(self) -> dict[str, object]:
        """What an operator wants to know; clients may see it, so it has no path."""
        config = self.config
        return {
            "kind": "store" if config.store is not None else "callback",
            "layers": config.layers,
            "site": config.site,
            "positions": config.positions,
            "dtype": config.dtype,
            "share": config.share,
            "requests": config.requests,
            "when_slow": config.when_slow,
            "queued_bytes": self._n_bytes,
            "spilled_bytes": 0 if self._spill is None else self._spill.n_bytes,
            "counts": dict(self.counts),
        }

    def flush(self, timeout_s: float) -> bool:
        """Have what waits in memory given away; False where the time was too short."""
        with self._changed:
            self._flush_until = max(self._flush_until, time.monotonic() + timeout_s)
            self._changed.notify_all()
            return self._changed.wait_for(lambda: not self._n_bytes, timeout_s)

    def _receipt(
        self,
        sample: Captured,
        status: SinkStatus,
        *,
        shard: str | None = None,
        reason: str | None = None,
    ) -> SinkReceipt:
        rows = sample.record.n_rows
        return SinkReceipt(name=self.name, status=status, rows=rows, shard=shard, reason=reason)

    # -- threads -----------------------------------------------------------------------

    def _due_in(self) -> float:
        """Seconds until what waits is to be given away; infinite where nothing waits."""
        if not self._waiting:
            return float("inf")
        now, config = time.monotonic(), self.config
        is_full = self._n_bytes - self._n_leaving >= config.shard_bytes
        if is_full or self._receiver.is_eager or now < self._flush_until:
            return 0.0
        first = next((i.came for i in self._waiting if i.future is not None), float("inf"))
        return min(self._waiting[0].came + config.shard_s, first + config.linger_s) - now

    def _pop(self, most: int) -> list[Item]:
        """What waited longest, until it has so many bytes."""
        items: list[Item] = []
        size = 0
        while self._waiting and size < most:
            items.append(self._waiting.popleft())
            size += items[-1].n_bytes
        self._n_leaving += size
        return items

    def _give_next(self) -> None:
        """Give away what is due, or what is spilled, or wait."""
        with self._changed:
            wait_s = self._due_in()
            most = 1 if self._receiver.is_eager else self.config.shard_bytes
            items = self._pop(most) if wait_s <= 0 else []
            spilled = None if self._spill is None else self._spill.first()
            if not items and spilled is not None:
                wait_s = min(wait_s, self._again - time.monotonic())
            if not items and wait_s > 0:
                self._changed.wait(None if wait_s == float("inf") else wait_s)
                return
        if items:
            self._give(items)
        elif spilled is not None and time.monotonic() >= self._again:
            self._give_spilled(spilled)

    def _number(self) -> int:
        with self._lock:
            if self._free:
                return self._free.pop(0)
            self._next_number += 1
            return self._next_number - 1

    def _give(self, items: Sequence[Item]) -> None:
        number = self._number()
        try:
            given = self._tried(number, [item.sample for item in items])
        except Exception as error:  # noqa: BLE001 - of a file system
            if self._spill is None or not self._has_spilled(items, number):
                self._free.append(number)
                self._settle(items, "failed", reason=self._told(error))
            return
        if not given.errors:
            self._settle(items, "written", shard=given.shard)
            return
        self._free.append(number)
        for item, error_of in zip(items, given.errors, strict=True):
            if error_of is None:
                self._settle([item], "written")
            else:
                self._settle([item], "failed", reason=self._told(error_of))

    def _tried(self, number: int, samples: Sequence[Captured]) -> Given:
        for pause in _RETRIES_S:
            try:
                return self._receiver.give(self._writer, number, samples, ())
            except Exception as error:
                if isinstance(error, SpecError) or self._spill is not None:
                    raise  # a wrong folder stays wrong, and a disk of this host takes the rest
            time.sleep(pause)
        return self._receiver.give(self._writer, number, samples, ())

    def _told(self, error: BaseException) -> str:
        """Log the first failure; what a client is told has no path of the server."""
        if not self._is_told:
            self._is_told = True
            logger.error(
                "inspect_lens: the sink %r has failed, and goes on; further failures are only "
                "counted (inspect_lens_sink_results_total)",
                self.name,
                exc_info=error,
            )
        return f"{type(error).__name__}; the server's log has more"

    def _settle(
        self,
        items: Sequence[Item],
        status: SinkStatus,
        *,
        shard: str | None = None,
        reason: str | None = None,
    ) -> None:
        is_there = status == "written"
        for item in items:
            rows = item.sample.record.n_rows if is_there else 0
            self.count(status, rows, item.rows_bytes if is_there else 0)
        with self._changed:
            size = sum(item.n_bytes for item in items)
            self._n_bytes -= size
            self._n_leaving -= size
            self._changed.notify_all()
        self._tell_held()
        for item in items:
            if item.future is not None and item.future.set_running_or_notify_cancel():
                item.future.set_result(
                    self._receipt(item.sample, status, shard=shard, reason=reason)
                )

    def _tell_held(self) -> None:
        spilled = 0 if self._spill is None else self._spill.n_bytes
        note("inspect_lens_sink_queue_bytes", self._n_bytes, self.name)
        note("inspect_lens_sink_spilled_bytes", spilled, self.name)

    # -- spilling ----------------------------------------------------------------------

    def _spill_next(self) -> None:
        """Write to disk what waits while more than half of the memory is taken."""
        with self._changed:
            most = self.config.memory_bytes
            self._changed.wait_for(lambda: self._waiting and 2 * self._n_bytes > most)
            items = self._pop(self.config.shard_bytes)
        number = self._number()
        if not self._has_spilled(items, number):
            self._free.append(number)
            reason = f"the disk for what is spilled is full (spill_bytes={self.config.spill_bytes})"
            self._settle(items, "dropped", reason=reason)

    def _has_spilled(self, items: Sequence[Item], number: int) -> bool:
        """Spill items; False where that cannot be done."""
        assert self._spill is not None
        try:
            parts = shard_parts([item.sample for item in items])
            if not self._spill.put(self._writer, number, parts):
                return False
        except Exception as error:  # noqa: BLE001 - a full disk
            self._told(error)
            return False
        self._settle(items, "spilled", reason="on a disk of the server, to be written later")
        return True

    def _give_spilled(self, one: Spilled) -> None:
        assert self._spill is not None
        try:
            content = one.path.read_bytes()
            samples = decode_shard(content, where=one.path.name)
        except Exception as error:  # noqa: BLE001 - somebody has damaged it
            self._spill.remove(one)
            self.failed(error)
            return
        try:
            given = self._receiver.give(one.writer, one.number, samples, [content])
        except Exception as error:  # noqa: BLE001 - of a file system
            self._told(error)
            self._again = time.monotonic() + _RETRIES_S[-1]
            return
        for i, sample in enumerate(samples):
            error_of = given.errors[i] if given.errors else None
            if error_of is not None:
                self.failed(error_of)
            else:
                n_bytes = 0 if sample.acts is None else sample.acts.nbytes
                self.count("written", sample.record.n_rows, n_bytes)
        self._spill.remove(one)
        self._tell_held()
