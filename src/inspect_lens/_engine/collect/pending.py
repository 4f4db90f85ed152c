"""What the front-end keeps of a running request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from inspect_lens._engine.export.transport import COLUMN, LATCHES
from inspect_lens._engine.hooks.results import unpack_saved
from inspect_lens._engine.protocol.edits import EVERY
from inspect_lens._engine.protocol.envelope import Envelope
from inspect_lens._engine.protocol.messages import Failure, Opening, Saved
from inspect_lens._engine.protocol.shared_memory import BOARD_SIZE
from inspect_lens.spec import N_LATCHES, TensorData

from .placement import Worker, paths_of
from .stream import Stream


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
    """By running gate, its note; see `gate_history.open_among`."""


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
        """What comes, by kind; asked for under the collector's lock.

        Made when it is first asked for, which is no more in the way of the next request.
        """
        asked, n_prompt = self._envelope.results, self._envelope.n_prompt
        return {i: Stream(one, n_prompt) for i, one in enumerate(asked) if one is not None}

    def fail(self, key: str, error: Exception) -> None:
        """Take note that it has failed, for the first reason; the collector's lock is held."""
        self.failure = self.failure or Failure(key, type(error).__name__, str(error))

    def accept(self, message: Saved | Failure) -> None:
        """Take what hooks saved on a stage, in the place of what it sent before; or its failure."""
        if isinstance(message, Failure):
            self.failure = message
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
        for opening, worker in self.shares:
            record = worker.reader.view.board[opening.number % BOARD_SIZE].tolist()
            if record[0] == opening.number and record[COLUMN]:
                return True
        return False

    def fired(self, n_fed: int) -> dict[int, int]:
        """By gate that lasts, the position at which it fired; not those that did not."""
        behind = self._notes(slice(0, N_LATCHES))
        return {latch: note - 1 for latch, note in behind.items() if note <= n_fed}

    def open_at(self) -> dict[int, int]:
        """By running gate, its note; see `gate_history.open_among`."""
        return self._notes(slice(N_LATCHES, None))

    def _notes(self, columns: slice) -> dict[int, int]:
        """By gate that lasts, the number above 0 that its worker has noted of it."""
        found: dict[int, int] = {}
        if not self._edited.has_latches:
            return found
        for opening, worker in self.shares:
            record = worker.reader.view.board[opening.number % BOARD_SIZE]
            if record[0] == opening.number:
                notes = enumerate(record[LATCHES][columns].tolist())
                found |= {latch: note for latch, note in notes if note > 0}
        return found

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
