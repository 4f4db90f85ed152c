"""Puts rows where the results of their requests lie, and makes room for more of them."""

from __future__ import annotations

from collections.abc import Container, Mapping
from concurrent.futures import ThreadPoolExecutor
from threading import Condition
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from inspect_lens._engine.protocol.messages import PATHS, Block, Opening, unpacked
from inspect_lens.errors import CapacityError
from inspect_lens.spec import EnginePath

from .pending import Pending
from .placement import Worker
from .result_memory import ARRIVED, COVERED, ResultMemory
from .stream import SHARE_BYTES, STORAGE


class Placing:
    """Memory of this process's results. One thread calls it."""

    def __init__(
        self,
        memory: ResultMemory,
        pending: Mapping[str, Pending],
        changed: Condition,
        threads: ThreadPoolExecutor,
        n_threads: int,
    ) -> None:
        self._memory, self._pending, self._changed = memory, pending, changed
        self._threads, self._n_threads = threads, n_threads

    def enter(self, pending: Pending, opening: Opening, worker: Worker) -> None:
        """Make room for a request's rows; `changed` is held.

        A request for which there is no room fails, and no other.
        """
        self._memory.take_back()
        try:
            for stream in pending.streams.values():
                if stream.slab is None and stream.most:
                    stream.open(self._memory)
        except CapacityError as error:
            pending.fail(opening.key, error)
            return
        pending.shares = [(o, w) for o, w in pending.shares if w is not worker]
        pending.shares.append((opening, worker))
        worker.enter(opening, pending.streams)

    def place(self, block: Block, worker: Worker) -> bool:
        """Put rows where they belong; False where they were not the block's any more."""
        if beyond := worker.beyond(block):
            self._grow(block.stream, worker, beyond)
        taps, tokens, width = block.shape
        record, is_open, targets, shift = worker.places(block)
        covers = np.tile(unpacked(block.covers), taps)
        content, all_rows = (
            self._memory.content,
            self._memory.rows(width * np.dtype(STORAGE[block.dtype]).itemsize),
        )
        nbytes = taps * tokens * all_rows.itemsize
        rows = worker.reader.view.data[block.offset : block.offset + nbytes].view(all_rows.dtype)
        where: NDArray[np.int64] = targets.reshape(-1)
        flags: NDArray[np.int64] = (targets + shift).reshape(-1)
        if not is_open.all():
            kept = np.flatnonzero(np.tile(is_open, taps))
            rows, where, flags = rows[kept], where[kept], flags[kept]
            covers = covers[kept] if len(covers) else covers
        # First: who finds that all rows have come makes a receipt of it.
        worker.paths[record] |= 1 << PATHS.index(cast("EnginePath", block.path))
        self._write(all_rows, where, rows)
        if worker.reader.is_revoked(block.reader, block.seq):
            return False
        if len(covers):
            # A row that stands for several tokens lies at the last of them. Which tokens these are
            # is noted before the row is: another thread takes a result once all of it has come.
            others = covers - 1
            ends = np.cumsum(others)
            behind = np.repeat(flags - others - (ends - others), others) + np.arange(ends[-1])
            content[behind] = COVERED
        content[flags] = ARRIVED
        return True

    def fail(self, block: Block, worker: Worker, error: CapacityError) -> None:
        """Fail the requests of a block."""
        numbers = set(unpacked(block.numbers).tolist())
        with self._changed:
            for key, pending, _ in self._of(worker, numbers):
                pending.fail(key, error)

    def _grow(self, kind: int, worker: Worker, until: dict[int, int]) -> None:
        """Make room for positions of requests, by number, that became long."""
        for key, pending, opening in self._of(worker, until):
            stream = pending.streams[kind]
            try:
                # Only this thread writes rows; whoever reads them holds the lock.
                larger = stream.larger(until[opening.number])
            except CapacityError as error:
                with self._changed:
                    pending.fail(key, error)
                    worker.leave(opening)
                continue
            with self._changed:
                stream.slab, stream.room = larger
                for other, where in pending.shares:
                    where.locate(other, pending.streams)

    def _of(self, worker: Worker, numbers: Container[int]) -> list[tuple[str, Pending, Opening]]:
        """Requests of a worker, by number; asked for where something went wrong, or rarely."""
        return [
            (key, pending, opening)
            for key, pending in list(self._pending.items())
            for opening, where in pending.shares
            if where is worker and opening.number in numbers
        ]

    def _write(self, to: NDArray[Any], where: NDArray[np.int64], rows: NDArray[Any]) -> None:
        n = len(where)
        parts = min(self._n_threads, n) if rows.nbytes > SHARE_BYTES else 1
        ends = [n * k // parts for k in range(parts + 1)]

        def copy(a: int, b: int) -> None:
            to[where[a:b]] = rows[a:b]

        if parts == 1:
            copy(0, n)
        else:
            list(self._threads.map(copy, ends[:-1], ends[1:]))
