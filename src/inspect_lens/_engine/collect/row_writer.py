"""Puts rows where the results of their requests lie, and makes room for more of them."""

from __future__ import annotations

from collections.abc import Container, Mapping
from concurrent.futures import ThreadPoolExecutor
from threading import Condition
from typing import cast

import numpy as np
from numpy.typing import NDArray

from inspect_lens._engine.protocol.messages import PATHS, Block, Opening, unpacked
from inspect_lens.errors import CapacityError
from inspect_lens.spec import EnginePath

from .pending import Pending
from .placement import Worker
from .result_memory import Budget, SlabPool
from .stream import STORAGE

__all__ = ["Placing"]


class Placing:
    """Memory of this process's results. One thread calls it."""

    def __init__(
        self,
        budget: Budget,
        pending: Mapping[str, Pending],
        changed: Condition,
        threads: ThreadPoolExecutor,
        n_threads: int,
    ) -> None:
        """Begin without memory."""
        self._budget, self._pending, self._changed = budget, pending, changed
        self._threads, self._n_threads = threads, n_threads
        self._pools: dict[int, SlabPool] = {}

    def enter(self, pending: Pending, opening: Opening, worker: Worker) -> None:
        """Make room for a request's rows; `changed` is held.

        A request for which there is no room fails, and no other.
        """
        try:
            for stream in pending.streams.values():
                if stream.slab is None and stream.most:
                    stream.open(self._pool(stream.row_bytes))
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
        record, is_open, targets = worker.places(block)
        covers = np.tile(unpacked(block.covers), taps)
        row_bytes = width * np.dtype(STORAGE[block.dtype]).itemsize
        pool = self._pool(row_bytes)
        nbytes = taps * tokens * row_bytes
        rows = worker.reader.view.data[block.offset : block.offset + nbytes].view(pool.rows.dtype)
        where: NDArray[np.int64] = targets.reshape(-1)
        if not is_open.all():
            kept = np.flatnonzero(np.tile(is_open, taps))
            rows, where = rows[kept], where[kept]
            covers = covers[kept] if len(covers) else covers
        # First: who finds that all rows have come makes a receipt of it.
        worker.paths[record] |= 1 << PATHS.index(cast("EnginePath", block.path))
        pool.write(rows, where, self._threads, self._n_threads)
        if worker.reader.is_revoked(block.reader, block.seq):
            return False
        behind = None
        if len(covers):
            # A row that stands for several tokens lies at the last of them. Which tokens these are
            # is noted before the row is: another thread takes a result once all of it has come.
            others = covers - 1
            ends = np.cumsum(others)
            behind = np.repeat(where - others - (ends - others), others) + np.arange(ends[-1])
            pool.covered[behind], pool.covered[where] = True, False
        pool.arrived[where] = True
        if behind is not None:
            pool.arrived[behind] = True
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
                larger = stream.larger(self._pool(stream.row_bytes), until[opening.number])
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

    def _pool(self, row_bytes: int) -> SlabPool:
        if row_bytes not in self._pools:
            self._pools[row_bytes] = SlabPool(row_bytes, self._budget)
        return self._pools[row_bytes]
