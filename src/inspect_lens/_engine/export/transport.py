"""How results leave the worker: rows in shared memory, and short messages that tell of them."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from inspect_lens._engine.plan.step_plan import Batch, Longs, grown
from inspect_lens._engine.protocol.messages import (
    PATHS,
    Block,
    Failure,
    Message,
    Opened,
    Opening,
    Saved,
    Settled,
    encode,
    packed,
    unpacked,
)
from inspect_lens._engine.protocol.processes import STALLED_S, STOPPED_S, Address, Links
from inspect_lens._engine.protocol.shared_memory import BOARD_SIZE, ArenaWriter
from inspect_lens.errors import CompatError, SpecError
from inspect_lens.spec import N_LATCHES, EnginePath

from .device_copy import Copier
from .link import Channel, Link, LocalChannel

_SEND_TIMEOUT_S = STALLED_S
_BLOCK_BYTES = 512 << 20
"""Bytes of rows that one message tells of. A front-end places the rows of a long step while others
of them are still on their way, and gives their room back bit by bit."""


@dataclass(frozen=True)
class Rows:
    """Rows of one block, and whose they are; all but the tensor as in `Block`."""

    tensor: torch.Tensor
    """(taps, tokens, width)."""
    numbers: bytes
    counts: bytes
    first: bytes
    listed: dict[int, bytes]
    stream: int
    covers: bytes
    dtype: torch.dtype
    """In which the rows are sent."""

    @classmethod
    def of(
        cls,
        tensor: torch.Tensor,
        numbers: Longs,
        counts: Longs,
        first: Longs,
        listed: dict[int, Longs],
        stream: int,
        covers: Longs | None = None,
        dtype: torch.dtype | None = None,
    ) -> Rows:
        """Pack the numbers."""
        return cls(
            tensor,
            packed(numbers),
            packed(counts),
            packed(first),
            {i: packed(positions) for i, positions in listed.items()},
            stream,
            b"" if covers is None else packed(covers),
            dtype or tensor.dtype,
        )


class Exporter:
    """Sends what a step produced to the front-end processes that own the requests."""

    def __init__(self, arena: ArenaWriter, copier: Copier, links: Links | None = None) -> None:
        self.arena = arena
        self.copier = copier
        self.links = links or Links()
        self._channels: dict[str, Channel] = {}
        self.attention = b""
        """What front-ends are told of the attention layers, packed."""
        self._told: set[str] = set()
        """Front-ends that were."""
        self._stuck: set[str] = set()
        """Front-ends that were waited for in vain: they are not, again, for each failure."""
        self._seq = 0

    def announce(self, reply: str, pid: int, openings: list[Opening]) -> bool:
        """Tell a front-end which of its requests this worker has taken up."""
        self._open(reply, pid)
        is_first = reply not in self._told
        self._told.add(reply)
        told = self.attention if is_first else b""
        return self._send(reply, Opened(self.arena.name, openings, told))

    def send(self, reply: str, rows: Rows, path: str, taps: range | None = None) -> bool:
        """Send one block of rows; the tensor may be overwritten once its part is released."""
        reader = self.arena.reader(reply, self._channels[reply])
        taps = range(rows.tensor.shape[0]) if taps is None else taps
        per_tap = rows.tensor[0].numel() * rows.dtype.itemsize
        # A block that leaves no room for the next one would make the step loop wait for it.
        most = min(_BLOCK_BYTES, self.arena.nbytes // 2)
        at_once = max(1, min(len(taps), most // max(per_tap, 1)))
        for tap in taps[::at_once]:
            tensor = rows.tensor[tap : min(tap + at_once, taps.stop)]
            self._seq += 1
            offset = self.arena.place(self._seq, reply, tensor.numel() * rows.dtype.itemsize)
            if offset is None:
                return False
            self.copier.copy(tensor, offset, self._seq, rows.dtype)
            block = Block(
                worker=self.arena.name,
                reader=reader,
                seq=self._seq,
                offset=offset,
                shape=(tensor.shape[0], tensor.shape[1], tensor.shape[2]),
                dtype=str(rows.dtype).removeprefix("torch."),
                stream=rows.stream,
                tap=tap,
                path=path,
                numbers=rows.numbers,
                counts=rows.counts,
                first=rows.first,
                listed=rows.listed,
                covers=rows.covers,
            )
            if not self._send(reply, block):
                return False
        return True

    def settle(self, reply: str, numbers: bytes, settled: bytes) -> bool:
        """Tell a front-end how far its requests are settled, behind the rows of the step."""
        return self._send(reply, Settled(self.arena.name, numbers, settled))

    def send_failure(self, reply: str, failure: Failure) -> None:
        """Tell a front-end that a request failed; does nothing when nobody listens."""
        self._send(reply, failure)

    def send_saved(self, reply: str, pid: int, saved: Saved) -> None:
        """Tell a front-end what hooks of a request saved; without it the request times out."""
        self._open(reply, pid)
        self._send(reply, saved)

    def forget(self, reply: str) -> None:
        """Close the socket to a front-end that has gone, and to which nothing is under way."""
        if (channel := self._channels.pop(reply, None)) is not None:
            channel.close()
        self._stuck.discard(reply)
        self._told.discard(reply)

    def close(self) -> None:
        """Free sockets and memory."""
        for channel in self._channels.values():
            channel.close()
        self._channels.clear()
        self.copier.close()
        self.arena.close()

    def _send(self, reply: str, message: Message) -> bool:
        channel = self._channel(reply)
        data = encode(message)
        # Back-pressure: wait for a slow front-end, but not for one that has died, since
        # everybody else's step waits with us.
        began = time.monotonic()
        most = 0.0 if reply in self._stuck else _SEND_TIMEOUT_S
        while not channel.put(data, message):
            waited = time.monotonic() - began
            is_hopeless = not channel.is_alive() or (waited > STOPPED_S and channel.is_stopped())
            if waited > most or is_hopeless:
                self._stuck.add(reply)
                return False
            channel.wait(0.1)
        self._stuck.discard(reply)
        return True

    def _open(self, reply: str, pid: int) -> None:
        """Take note of a front-end that asks for something; a link that has ended is made anew."""
        channel = self._channels.get(reply)
        if isinstance(channel, Link) and not channel.is_alive():
            self.forget(reply)
            self.arena.forget(reply)
        channel = self._channel(reply)
        if isinstance(channel, LocalChannel):
            channel.pid = pid

    def _channel(self, reply: str) -> Channel:
        channel = self._channels.get(reply)
        if channel is None:
            address = Address.unpack(reply)
            if address.remote and address.host != self.links.own_host:
                channel = Link(address.remote, self.arena, reply, self.links)
            else:
                channel = LocalChannel(address.local)
            self._channels[reply] = channel
        return channel

    def check(self, reply: str) -> None:
        """Refuse requests of a front-end to which this engine is another one."""
        theirs = Address.unpack(reply).facts
        if theirs and theirs != self.links.facts:
            raise CompatError(
                "the hosts of this engine have different INSPECT_LENS_* settings, models or "
                "versions; start all of them with the same ones"
            )


COLUMN = 4
"""Of the board."""

LATCHES = slice(COLUMN + 1, COLUMN + 1 + 2 * N_LATCHES)
"""Columns of the board in which taps note when gates fired, and then how long they were open."""


class Faults:
    """The worker's side of the notes."""

    def __init__(self, board: NDArray[np.int64], copier: Copier) -> None:
        self._column = board[:, COLUMN]
        self.fired = copier.reachable(board[:, LATCHES])
        """What gates that last write to; None where kernels cannot."""
        reachable = copier.reachable(self._column)
        self._is_apart = reachable is None
        self.table = torch.zeros(len(board), dtype=torch.int64) if reachable is None else reachable
        """(records,) int64; what taps write to."""

    def move_to(self, device: torch.device) -> torch.Tensor:
        """The table where taps on a device can write to it."""
        if self._is_apart:
            self.table = self.table.to(device)
        return self.table

    def of(self, records: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which of some requests, by board record, have one."""
        if self._is_apart:
            # Memory could not be pinned, so that rows are copied while the step loop waits, too.
            self._column[:] |= self.table.cpu().numpy()
            self.table.zero_()
        found: NDArray[np.bool_] = self._column[records] != 0
        return found


def overflow() -> SpecError:
    """The error of a request whose steering left a row too large, or not finite."""
    return SpecError(
        "edits: a steered row would have been too large for the dtype of the stream, or not "
        "finite, and was left as it was, so that the output is not that of the steered model; "
        "nothing is returned; lower the scale"
    )


_MOST_AWAY = BOARD_SIZE // 2
"""Removed requests whose number is kept. That is far more than an engine can have pre-empted at
once; only those of whose end no worker was told could be so many."""


class Numbers:
    """Gives each live request a number whose board record nobody else holds."""

    def __init__(self, board: NDArray[np.int64]) -> None:
        self._board = board
        self._away: OrderedDict[str, int] = OrderedDict()
        """Removed requests that are not over: a pre-empted one comes back under its key."""
        self._next = 1
        self._live: set[int] = set()
        self._held: set[int] = set()
        """Records of live requests, and of those that are away."""
        self.fresh: frozenset[int] = frozenset()
        """Of the numbers that were taken last, those of requests that are new here."""
        self.of_slot: NDArray[np.int64] = np.zeros(64, dtype=np.int64)
        """Number of the request in each slot."""

    def take(self, keys: Sequence[str], slots: NDArray[np.int64]) -> list[int]:
        """A number for each; a pre-empted request keeps its own, and what its record says."""
        taken, fresh = [], []
        for key in keys:
            number = self._away.pop(key, None)
            if number is None:
                number = self._next
                while number % BOARD_SIZE in self._held:
                    number += 1
                self._next = number + 1
                fresh.append(number)
            self._live.add(number % BOARD_SIZE)
            self._held.add(number % BOARD_SIZE)
            taken.append(number)
        self.fresh = frozenset(fresh)
        if fresh:
            records = np.asarray(fresh) % BOARD_SIZE
            self._board[records] = (0, -1, *[0] * (self._board.shape[1] - 2))
            self._board[records, 0] = fresh
        self.of_slot = grown(self.of_slot, slots)
        self.of_slot[slots] = taken
        return taken

    def give(self, key: str, number: int, *, is_over: bool = False) -> None:
        """Take note that a request has gone."""
        self._live.discard(number % BOARD_SIZE)
        if is_over:
            self._held.discard(number % BOARD_SIZE)
            return
        self._away[key] = number
        if len(self._away) > _MOST_AWAY:
            self._held.discard(self._away.popitem(last=False)[1] % BOARD_SIZE)

    def finish(self, keys: Collection[str]) -> None:
        """Forget requests that are away and will not come back."""
        for key in keys if self._away else ():
            if (number := self._away.pop(key, None)) is not None:
                self._held.discard(number % BOARD_SIZE)

    @property
    def n_away(self) -> int:
        """Requests that may come back."""
        return len(self._away)

    def has_live(self, numbers: bytes) -> bool:
        """Whether one of some requests is there; by packed numbers."""
        return any(n % BOARD_SIZE in self._live for n in unpacked(numbers).tolist())

    def note_fed(self, steered: Batch, path: EnginePath) -> None:
        """Write on the board how far each steered request has been fed."""
        if not len(steered.slots):
            return
        board, record = self._board, self.of_slot[steered.slots] % BOARD_SIZE
        was = board[record, 1]
        board[record, 1] = np.where(was < 0, steered.position, np.minimum(was, steered.position))
        board[record, 2] = np.maximum(board[record, 2], steered.position + steered.n_tokens)
        self.note_path(steered.slots, path)

    def note_path(self, slots: NDArray[np.int64], path: EnginePath) -> None:
        """Write on the board how a step ran that these requests were part of."""
        self._board[self.of_slot[slots] % BOARD_SIZE, 3] |= 1 << PATHS.index(path)

    def a_path(self, slot: int) -> EnginePath:
        """One of the ways that stand on the board for the request in a slot."""
        bits = int(self._board[self.of_slot[slot] % BOARD_SIZE, 3])
        return next(path for i, path in enumerate(PATHS) if bits >> i & 1)
