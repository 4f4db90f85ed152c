"""Running requests: what has come of each, and where the rows that workers send for it belong."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from threading import Condition
from typing import Any, cast

import msgspec
import numpy as np
from numpy.typing import NDArray

from inspect_lens._engine.export.transport import COLUMN, LATCHES
from inspect_lens._engine.hooks.results import unpack_saved
from inspect_lens._engine.protocol.edits import EVERY
from inspect_lens._engine.protocol.messages import (
    BOARD_SIZE,
    PATHS,
    ArenaReader,
    Block,
    Envelope,
    Failure,
    Opening,
    Saved,
    unpacked,
)
from inspect_lens._engine.protocol.readouts import READOUTS
from inspect_lens.errors import CapacityError
from inspect_lens.spec import N_LATCHES, EnginePath, TensorData

from .result_memory import ARRIVED, COVERED, SHARE_BYTES, STORAGE, ResultMemory, Stream

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
        """Records; of each token whether its request is open; indices of rows; way to flags."""
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


@dataclass
class Placing:
    """Memory of this process's results. One thread calls it."""

    memory: ResultMemory
    pending: Mapping[str, Pending]
    changed: Condition
    threads: ThreadPoolExecutor
    n_threads: int

    def enter(self, pending: Pending, opening: Opening, worker: Worker) -> None:
        """Make room for a request's rows, or fail it; `changed` is held."""
        self.memory.take_back()
        try:
            for stream in pending.streams.values():
                if stream.slab is None and stream.most:
                    stream.open(self.memory)
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
        all_rows = self.memory.rows(width * np.dtype(STORAGE[block.dtype]).itemsize)
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
            self.memory.content[behind] = COVERED
        self.memory.content[flags] = ARRIVED
        return True

    def fail(self, block: Block, worker: Worker, error: CapacityError) -> None:
        numbers = set(unpacked(block.numbers).tolist())
        with self.changed:
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
                with self.changed:
                    pending.fail(key, error)
                    worker.leave(opening)
                continue
            with self.changed:
                stream.slab, stream.room = larger
                for other, where in pending.shares:
                    where.locate(other, pending.streams)

    def _of(self, worker: Worker, numbers: Container[int]) -> list[tuple[str, Pending, Opening]]:
        """Requests of a worker, by number; asked for where something went wrong, or rarely."""
        return [
            (key, pending, opening)
            for key, pending in list(self.pending.items())
            for opening, where in pending.shares
            if where is worker and opening.number in numbers
        ]

    def _write(self, to: NDArray[Any], where: NDArray[np.int64], rows: NDArray[Any]) -> None:
        n = len(where)
        parts = min(self.n_threads, n) if rows.nbytes > SHARE_BYTES else 1
        ends = [n * k // parts for k in range(parts + 1)]

        def copy(a: int, b: int) -> None:
            to[where[a:b]] = rows[a:b]

        if parts == 1:
            copy(0, n)
        else:
            list(self.threads.map(copy, ends[:-1], ends[1:]))


@dataclass(frozen=True)
class Collected:
    """What arrived for one request."""

    tensors: dict[int, TensorData]
    """(rows of a token, or shares of workers, positions, width or columns) of each result."""
    n_steered: int
    """Tokens that the worker steered; one that was computed twice counts once."""
    paths: tuple[str, ...]
    fired: dict[int, int] = field(default_factory=dict)
    """By gate that lasts, the position at which it fired."""
    attention: dict[int, dict[str, Any]] = field(default_factory=dict)
    """By layer, what the pattern of its attention depends on."""
    open_at: dict[int, int] = field(default_factory=dict)
    """By running gate, its note; see `programs.open_among`."""


@dataclass(frozen=True)
class Further:
    """What has come of a running request since somebody asked last."""

    rows: dict[int, NDArray[Any]]
    """(rows of a token, or shares of workers, positions, width or columns) of each result."""
    fired: dict[int, int]
    """By gate that lasts, the position at which it fired, if it has."""
    attention: dict[int, dict[str, Any]]
    """By layer, what the pattern of its attention depends on."""


class Pending:
    """A request whose results are on their way."""

    def __init__(self, envelope: Envelope, n_hook_layers: int = 0) -> None:
        self._envelope, self._edited = envelope, envelope.edited
        self.n_steered = len(envelope.edited.taps)
        self.n_hook_layers = n_hook_layers
        """Layers where it runs hooks, over all stages of a pipeline."""
        self._saved: dict[tuple[int, ...], Saved] = {}
        """What hooks saved on each stage, by its layers."""
        self.shares: list[tuple[Opening, Worker]] = []
        self.failure: Failure | None = None

    @cached_property
    def streams(self) -> dict[int, Stream]:
        """What comes, by kind; made when it is first asked for, under the collector's lock."""
        asked, n_prompt = self._envelope.results, self._envelope.n_prompt
        return {i: Stream(one, n_prompt) for i, one in enumerate(asked) if one is not None}

    def fail(self, key: str, error: Exception) -> None:
        """Take note that it has failed, for the first reason; the collector's lock is held."""
        self.failure = self.failure or Failure(key, type(error).__name__, str(error))

    def accept(self, message: Saved | Failure) -> None:
        """Take what hooks saved on a stage, in the place of what it sent before; or its failure."""
        if isinstance(message, Failure):
            # What other workers tell of later comes of the first one.
            self.failure = self.failure or message
            return
        self._saved[tuple(unpack_saved(message.data)["layers"])] = message

    def saved(self, n_fed: int) -> list[Saved]:
        """What came of the stages that have seen so many tokens."""
        return [message for message in self._saved.values() if message.n_fed >= n_fed]

    def has_saved(self, n_fed: int) -> bool:
        """Whether all stages have sent what hooks saved, or the request has failed."""
        come = sum(message.n_layers for message in self.saved(n_fed))
        return self.failure is not None or come >= self.n_hook_layers

    def fed(self) -> tuple[int, int]:
        """First and one past the last position that all workers report to have steered."""
        if sum(opening.n_steered for opening, _ in self.shares) < self.n_steered:
            return 0, 0
        first, last = 0, EVERY
        for opening, worker in self.shares:
            if opening.n_steered:
                record = worker.reader.view.board[opening.number % BOARD_SIZE].tolist()
                if record[0] != opening.number:
                    return 0, 0
                first, last = max(first, record[1]), min(last, record[2])
        return first, last

    @property
    def has_overflown(self) -> bool:
        """Whether a worker has left a steered row as it was, which would have been too large."""
        if not self.n_steered:
            return False
        return any(record[COLUMN] for record in self._records())

    def fired(self, n_fed: int) -> dict[int, int]:
        """By gate that lasts, the position at which it fired; not those that did not."""
        behind = self._notes(slice(0, N_LATCHES))
        return {latch: note - 1 for latch, note in behind.items() if note <= n_fed}

    def open_at(self) -> dict[int, int]:
        """By running gate, its note; see `programs.open_among`."""
        return self._notes(slice(N_LATCHES, None))

    def _notes(self, columns: slice) -> dict[int, int]:
        """By gate that lasts, the number above 0 that its worker has noted of it."""
        found: dict[int, int] = {}
        if not self._edited.has_latches:
            return found
        for record in self._records():
            notes = enumerate(record[LATCHES][columns].tolist())
            found |= {latch: note for latch, note in notes if note > 0}
        return found

    def _records(self) -> Iterator[NDArray[np.int64]]:
        """What the boards of its workers say of it."""
        for opening, worker in self.shares:
            record = worker.reader.view.board[opening.number % BOARD_SIZE]
            if record[0] == opening.number:
                yield record

    @property
    def is_told(self) -> bool:
        """Whether the boards hold all of a request that has ended; asks workers that are far."""
        return all([w.reader.is_told(opening.number) for opening, w in self.shares])

    def is_settled(self, counts: Mapping[int, int], settled: int | None) -> bool:
        """Whether no row, and no steering, can come a second time."""
        if settled is None:
            return True
        for opening, worker in self.shares:
            record = opening.number % BOARD_SIZE
            needed = self._edited.until if opening.n_steered else 0
            for i, stream in self.streams.items():
                if opening.shares[i][1]:
                    needed = max(needed, stream.end(counts[i]))
            if worker.number[record] != opening.number:
                return False
            if worker.settled[record] < min(settled, needed):
                return False
        return True

    def settled_until(self, n_fed: int, settled: int | None) -> int:
        """One past the last of the fed positions whose rows are sure to be no rejected draft's."""
        if settled is None:
            return n_fed
        for opening, worker in self.shares:
            record = opening.number % BOARD_SIZE
            known = int(worker.settled[record]) if worker.number[record] == opening.number else 0
            # The last step was told of behind its rows: those of drafts that it fed are there.
            n_fed = n_fed if known >= settled else min(n_fed, known)
        return n_fed if self.shares else 0

    def has_further(self, since: Mapping[int, int], n_fed: int, settled: int | None) -> bool:
        """Whether the rows of all tokens that were fed have come of some results, or never will."""
        if self.failure is not None:
            return True
        if self.settled_until(n_fed, settled) < n_fed:
            return False
        fed = self._envelope.results_of(n_fed)
        return all(self.streams[i].has_further(n, fed[i]) for i, n in since.items())

    def further(self, since: Mapping[int, int], n_fed: int, settled: int | None) -> Further:
        """What has come of some results behind so many positions of each."""
        fed = self._envelope.results_of(self.settled_until(n_fed, settled))
        rows = {i: self.streams[i].further(n, max(n, fed[i])) for i, n in since.items()}
        return Further(rows, self.fired(n_fed), self.attention)

    def is_ready(self, counts: Mapping[int, int], n_fed: int, settled: int | None) -> bool:
        """Whether everything has arrived, or the request has failed."""
        if self.failure is not None:
            return True
        if not self.is_told:
            return False
        if self.n_steered and self.fed()[1] < min(n_fed, self._edited.until):
            for opening, worker in self.shares:
                worker.reader.ask_again(opening.number)
            return False
        if not self.is_settled(counts, settled):
            return False
        return all(stream.has(counts[i]) for i, stream in self.streams.items())

    def preview(
        self, counts: Mapping[int, int], threads: ThreadPoolExecutor
    ) -> dict[int, TensorData] | None:
        """Arrays in which all results will lie once their rows have come; see `take`."""
        if len(self.shares) != 1:
            return None
        made: dict[int, TensorData] = {}
        for i, stream in self.streams.items():
            if stream.slab is None or counts[i] != stream.room or not stream.is_plain:
                return None
            if self.shares[0][0].shares[i] != (0, stream.taps):
                return None
            made[i] = stream.take(stream.room, threads)
        return made

    @property
    def attention(self) -> dict[int, dict[str, Any]]:
        """What its workers know of their attention layers, by layer."""
        return {n: known for _, worker in self.shares for n, known in worker.attention.items()}

    @property
    def is_whole(self) -> bool:
        """Whether all rows have come that may come, and none of them a second time."""
        has_all = all(s.has(s.most) for s in self.streams.values())
        return self.failure is None and has_all and self.is_told

    def lack(self, counts: Mapping[int, int], n_fed: int, settled: int | None) -> str:
        """What has not come of a request that is not ready, in words."""
        if self.n_steered and (fed := self.fed()[1]) < min(n_fed, self._edited.until):
            return (
                f"the engine fed {n_fed} tokens and the worker reported steering up to token "
                f"{fed}, so that the output must not be used,"
            )
        if not self.is_settled(counts, settled):
            return (
                "the last step was not reported, so that rows of rejected drafts may be among "
                "those that arrived and steering is not confirmed,"
            )
        for i, stream in self.streams.items():
            if missing := stream.taps * counts[i] - int(stream.arrived(counts[i]).sum()):
                return f"{missing} of {stream.taps * counts[i]} captured rows did not arrive"
        return "its results did not arrive"

    def steered_tokens(self, n_fed: int) -> int:
        """Tokens that were steered, counted once each."""
        if not self.n_steered:
            return 0
        first, last = self.fed()
        return self.steered_between(first, min(last, n_fed))

    def steered_between(self, first: int, last: int) -> int:
        """Of the tokens from a first position to a last one, excluded, those that are steered."""
        edited = self._edited
        found = sum(max(0, min(last, hi) - max(first, lo)) for lo, hi in edited.spans)
        if len(edited.named):
            a, b = edited.named.searchsorted((first, last))
            found += int(b - a)
        return found

    @property
    def until(self) -> int:
        return self._edited.until


def paths_of_all(requests: Sequence[Pending]) -> list[tuple[str, ...]]:
    """Of each request the ways in which its steps ran, sorted."""
    bits = [0] * len(requests)
    at: dict[str, tuple[Worker, list[int], list[int]]] = {}
    for i, request in enumerate(requests):
        for opening, worker in request.shares:
            _, of, numbers = at.setdefault(worker.reader.name, (worker, [], []))
            of.append(i)
            numbers.append(opening.number)
    for worker, of, numbers in at.values():
        for i, found in zip(of, worker.paths_of(np.asarray(numbers)), strict=True):
            bits[i] |= found
    return list(map(paths_of, bits))


def told_of_edits(pending: Mapping[str, Pending], n_fed: Mapping[str, int]) -> dict[str, Collected]:
    """What workers have told of some requests, where that is all; looked up for all at once."""
    by_worker: dict[str, tuple[Worker, list[str], list[int]]] = {}
    for key in n_fed:
        request = pending.get(key)
        if request is None or request.failure is not None or len(request.shares) != 1:
            continue
        opening, worker = request.shares[0]
        if opening.n_steered >= request.n_steered and worker.reader.is_told(opening.number):
            _, keys, numbers = by_worker.setdefault(worker.reader.name, (worker, [], []))
            keys.append(key)
            numbers.append(opening.number)
    found: dict[str, Collected] = {}
    for worker, keys, numbers in by_worker.values():
        known = np.asarray(numbers)
        ways = worker.paths_of(known)
        board = worker.reader.view.board[known % BOARD_SIZE, : COLUMN + 1].tolist()
        for key, number, (owner, first, last, _, fault), way in zip(
            keys, numbers, board, ways, strict=True
        ):
            request, n = pending[key], n_fed[key]
            if owner == number and not fault and last >= min(n, request.until):
                n_steered = request.steered_between(first, min(last, n))
                found[key] = Collected({}, n_steered, paths_of(way))
    return found
