"""A worker that sends rows, and where in this process the rows of its requests belong."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from inspect_lens._engine.protocol.messages import PATHS, Block, Opening, unpacked
from inspect_lens._engine.protocol.readouts import READOUTS
from inspect_lens._engine.protocol.shared_memory import BOARD_SIZE, ArenaReader

from .stream import Stream

_STREAMS = len(READOUTS)


class Worker:
    """A worker's shared memory, and where the rows of its requests belong, by board record."""

    def __init__(self, reader: ArenaReader) -> None:
        self.reader = reader
        self.attention: dict[int, dict[str, Any]] = {}
        """What it knows of its attention layers, by layer."""
        self.number: NDArray[np.int64] = np.zeros(BOARD_SIZE, dtype=np.int64)
        self.paths: NDArray[np.int64] = np.zeros(BOARD_SIZE, dtype=np.int64)
        self.settled: NDArray[np.int64] = np.zeros(BOARD_SIZE, dtype=np.int64)
        """One past the last position whose row no later step writes again."""
        shape = (_STREAMS, BOARD_SIZE)
        self.base: NDArray[np.int64] = np.full(shape, -1, dtype=np.int64)
        """Index of the row of the worker's first tap at the first position; see `Slab`."""
        self.shift: NDArray[np.int64] = np.zeros(shape, dtype=np.int64)
        """From the index of a row to that of its flag."""
        self.lo: NDArray[np.int64] = np.zeros(shape, dtype=np.int64)
        self.room: NDArray[np.int64] = np.zeros(shape, dtype=np.int64)
        """Rows from one tap to the next."""
        self.reach: NDArray[np.int64] = np.zeros(shape, dtype=np.int64)
        """One past the last position for which there is room."""
        self.listed: dict[tuple[int, int], NDArray[np.int64]] = {}
        """Explicit positions, by stream and record."""

    def learn(self, attention: bytes) -> None:
        """Take note of what the worker tells of its attention layers."""
        if attention:
            self.attention = msgspec.msgpack.decode(attention, type=dict[int, dict[str, Any]])

    def enter(self, opening: Opening, streams: dict[int, Stream]) -> None:
        """Note where the rows of a request belong."""
        record = opening.number % BOARD_SIZE
        for i, stream in streams.items():
            stream.restart(*opening.shares[i])
        self.number[record], self.paths[record] = opening.number, 0
        self.settled[record] = 0
        self.base[:, record] = -1
        self.locate(opening, streams)

    def locate(self, opening: Opening, streams: dict[int, Stream]) -> None:
        """Note where its results lie by now."""
        record = opening.number % BOARD_SIZE
        if self.number[record] != opening.number:
            return
        for i, stream in streams.items():
            if stream.slab is not None:
                first_tap, _ = opening.shares[i]
                slab = stream.slab
                self.base[i, record] = slab.first_row + first_tap * stream.room
                self.shift[i, record] = slab.first_flag - slab.first_row
                self.lo[i, record], self.room[i, record] = stream.lo, stream.room
                self.reach[i, record] = stream.reach
                if stream.listed is not None:
                    self.listed[i, record] = stream.listed

    def paths_of(self, numbers: NDArray[np.int64]) -> list[int]:
        """Of some requests the ways in which their steps ran here, one bit each."""
        record = numbers % BOARD_SIZE
        bits = np.where(self.number[record] == numbers, self.paths[record], 0)
        noted = self.reader.view.board[record]
        found: list[int] = (bits | np.where(noted[:, 0] == numbers, noted[:, 3], 0)).tolist()
        return found

    def leave(self, opening: Opening) -> None:
        """Drop what still comes for a request."""
        self.reader.forget(opening.number)
        record = opening.number % BOARD_SIZE
        if self.number[record] == opening.number:
            self.number[record] = 0
            for stream in range(_STREAMS):
                self.listed.pop((stream, record), None)

    def beyond(self, block: Block) -> dict[int, int]:
        """Requests of a block, by number, that have rows where there is no room for them yet."""
        numbers, ends = unpacked(block.numbers), unpacked(block.first) + unpacked(block.counts)
        record = numbers % BOARD_SIZE
        if not (over := ends > self.reach[block.stream, record]).any():
            return {}
        over &= (self.number[record] == numbers) & (self.base[block.stream, record] >= 0)
        return dict(zip(numbers[over].tolist(), ends[over].tolist(), strict=True))

    def places(
        self, block: Block
    ) -> tuple[NDArray[np.int64], NDArray[np.bool_], NDArray[np.int64], NDArray[np.int64]]:
        """Where the rows of a block belong.

        The records of its requests; of each token whether its request is open; (taps, tokens)
        indices of rows; and of each token the way from the index of a row to that of its flag.
        """
        taps, tokens, _ = block.shape
        numbers, counts, first = (unpacked(v) for v in (block.numbers, block.counts, block.first))
        stream, record = block.stream, numbers % BOARD_SIZE
        base, room = self.base[stream, record], self.room[stream, record]
        is_open = (self.number[record] == numbers) & (base >= 0)
        ends = np.cumsum(counts)
        # Of each token: the row for the worker's first tap.
        start = base + first - self.lo[stream, record]
        target = np.repeat(start - (ends - counts), counts) + np.arange(tokens)
        for i, listed in block.listed.items():
            wanted = self.listed.get((stream, int(record[i])))
            if is_open[i] and wanted is not None:
                at = wanted.searchsorted(unpacked(listed))
                target[ends[i] - counts[i] : ends[i]] = base[i] + at
        step = np.repeat(room, counts)
        return (
            record,
            np.repeat(is_open, counts),
            target + (np.arange(taps)[:, None] + block.tap) * step,
            np.repeat(self.shift[stream, record], counts),
        )


@lru_cache
def paths_of(bits: int) -> tuple[str, ...]:
    """Ways in which steps ran, sorted, from one bit each."""
    return tuple(sorted(path for i, path in enumerate(PATHS) if bits >> i & 1))
