"""How results leave the worker: rows in shared memory, and short messages that tell of them.

Rows are copied at once on a CPU, and on a side stream on a GPU, where the step loop only records
events and starts copies; it never waits for the device. The number that says "the rows are there"
is itself copied behind them in the same stream.
"""

from __future__ import annotations

import contextlib
import logging
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import zmq
from numpy.typing import NDArray

from inspect_lens._engine.plan import Batch, Longs, grown
from inspect_lens._engine.protocol.messages import (
    BOARD_SIZE,
    PATHS,
    SEND_QUEUE,
    ArenaWriter,
    Block,
    Channel,
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
from inspect_lens.errors import CompatError, SpecError
from inspect_lens.spec import N_LATCHES, EnginePath

from .link import Link

logger = logging.getLogger("vllm.inspect_lens")

_EVENT: Any = torch.cuda.Event  # its constructor has no types
_PIECE = 32 << 20
"""Bytes that are converted to another dtype at once, on their way."""

_NUMBERS = 1 << 20
"""Sequence numbers that lie on the device: 8 MiB."""


class Copier:
    """Copies what a step left in the ring: here at once, as for a CPU."""

    def __init__(self, arena: ArenaWriter) -> None:
        self._view = arena.view

    def wait_for(self, part: int) -> None:
        """Order the step that is about to begin behind the last copies out of a released part."""

    def select(self, rows: torch.Tensor, index: NDArray[np.int64]) -> torch.Tensor:
        """Some tokens of (taps, tokens, width) rows."""
        return rows[:, torch.from_numpy(index)]

    def gather(self, rows: torch.Tensor, index: NDArray[np.int64], into: torch.Tensor) -> None:
        """Copy some of (rows, width) to others."""
        torch.index_select(rows, 0, self._index(index, rows.device), out=into)

    def scatter(self, rows: torch.Tensor, index: NDArray[np.int64], into: torch.Tensor) -> None:
        """Copy (rows, width) to some others."""
        into.index_copy_(0, self._index(index, rows.device), rows)

    def _index(self, index: NDArray[np.int64], device: torch.device) -> torch.Tensor:
        return torch.from_numpy(index)

    def taps(self, rows: torch.Tensor, ranks: tuple[int, ...]) -> torch.Tensor:
        """Some taps of (taps, …) rows."""
        if ranks == tuple(range(ranks[0], ranks[0] + len(ranks))):
            return rows[ranks[0] : ranks[0] + len(ranks)]
        return torch.stack([rows[rank] for rank in ranks])

    def apply(
        self, readout: Callable[[torch.Tensor], torch.Tensor], rows: torch.Tensor
    ) -> torch.Tensor:
        return readout(rows)

    def copy(self, rows: torch.Tensor, offset: int, seq: int, dtype: torch.dtype) -> None:
        """Copy rows to an offset of the shared memory as `dtype`, and then `seq` to `landed`."""
        source = rows.to(dtype).contiguous().view(torch.uint8).reshape(-1).numpy()
        self._view.data[offset : offset + len(source)] = source
        self._view.landed[0] = seq

    def release(self, part: int) -> None:
        """Note that all copies out of a part of the ring have been asked for."""

    def reachable(self, values: NDArray[Any]) -> torch.Tensor | None:
        """A part of the shared memory for kernels to write to; None where they cannot."""
        return torch.from_numpy(values)

    def close(self) -> None:
        """Let go of the shared memory, once the copies into it have been made."""


class StreamCopier(Copier):
    """Copies on a stream of its own, into shared memory that the driver has pinned.

    That stream has copies only. A kernel in it, however small, makes the kernels of the model's
    stream several percent slower from then on (seen on an H200, at 8 sequences, until another
    process used the device); so what is made of rows is made in the model's stream.
    """

    def __init__(self, arena: ArenaWriter, device: torch.device, parts: int) -> None:
        super().__init__(arena)
        make_stream: Any = torch.cuda.Stream  # its constructor has no types
        self._stream = make_stream(device)
        self._filled = _EVENT()
        self._released = [_EVENT() for _ in range(parts)]
        self._numbers = torch.arange(_NUMBERS, dtype=torch.int64, device=device)
        self._first_number = 0
        whole = torch.from_numpy(arena.view.whole)
        self._data = torch.from_numpy(arena.view.data)
        self._landed = torch.from_numpy(arena.view.landed)
        self._cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        code = self._cudart.cudaHostRegister(whole.data_ptr(), whole.numel(), 0)
        self._unpin: Callable[[], object] = lambda: None
        self._is_pinned = int(code) == 0
        if self._is_pinned:
            # An engine that is dropped without a word must not leave pages registered: the next
            # one may be given the same addresses. `whole` is held, and so mapped, until then.
            self._unpin = unpin = weakref.finalize(self, _unpin, self._cudart, self._stream, whole)
            unpin.atexit = False  # the process ends, and its pages with it
        else:
            # The runtime would report the error once more, to whoever launches the next kernel.
            with contextlib.suppress(RuntimeError):
                torch.zeros(1, device=device)
            # Copies are then made while the step loop waits: slow, and still right.
            logger.warning(
                "inspect_lens: %d MiB of shared memory could not be pinned (CUDA error %d); "
                "captures will be slow. Lower INSPECT_LENS_SHM_BYTES or raise the memlock limit",
                whole.numel() >> 20,
                int(code),
            )

    def wait_for(self, part: int) -> None:
        # The main stream waits, the CPU does not.
        torch.cuda.current_stream().wait_event(self._released[part])

    def select(self, rows: torch.Tensor, index: NDArray[np.int64]) -> torch.Tensor:
        return rows.index_select(1, self._index(index, rows.device))

    def _index(self, index: NDArray[np.int64], device: torch.device) -> torch.Tensor:
        return torch.from_numpy(index).pin_memory().to(device, non_blocking=True)

    def apply(
        self, readout: Callable[[torch.Tensor], torch.Tensor], rows: torch.Tensor
    ) -> torch.Tensor:
        with torch.inference_mode():
            return readout(rows)

    def copy(self, rows: torch.Tensor, offset: int, seq: int, dtype: torch.dtype) -> None:
        source = rows.contiguous().reshape(-1)
        size = source.numel()
        if source.dtype != dtype and size * dtype.itemsize <= _PIECE:
            source = source.to(dtype)
        # What is not part of the ring must not be used again before it is copied.
        source.record_stream(self._stream)
        self._filled.record()
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(self._filled)
            # The rows of a long prompt are converted here after all, in the memory of one piece:
            # the model's stream would need it for all of them at once.
            step = size if source.dtype == dtype else _PIECE // dtype.itemsize
            for a in range(0, size, max(step, 1)):
                piece = source[a : a + step].to(dtype).view(torch.uint8)
                begin = offset + a * dtype.itemsize
                self._data[begin : begin + piece.numel()].copy_(piece, non_blocking=True)
            self._landed.copy_(self._number(seq), non_blocking=True)

    def release(self, part: int) -> None:
        self._released[part].record(self._stream)

    def reachable(self, values: NDArray[Any]) -> torch.Tensor | None:
        # Pinned memory has an address there, which Triton takes.
        return torch.from_numpy(values) if self._is_pinned else None

    def close(self) -> None:
        # Pages that stay registered cannot be mapped and registered again.
        self._unpin()

    def _number(self, seq: int) -> torch.Tensor:
        """A sequence number on the device: from a table, because to write one takes a kernel."""
        while seq - self._first_number >= _NUMBERS:
            self._numbers.add_(_NUMBERS)  # in the stream of the copies that have read it
            self._first_number += _NUMBERS
        i = seq - self._first_number
        return self._numbers[i : i + 1]


def _unpin(cudart: Any, stream: Any, whole: torch.Tensor) -> None:
    stream.synchronize()
    cudart.cudaHostUnregister(whole.data_ptr())


def copier_for(arena: ArenaWriter, device: torch.device, parts: int) -> Copier:
    """The copier for a device, of a ring of so many parts."""
    if device.type == "cuda":
        return StreamCopier(arena, device, parts)
    return Copier(arena)


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


class LocalChannel(Channel):
    """A front-end of this host, which reads the worker's memory."""

    def __init__(self, address: str) -> None:
        super().__init__()
        # The process's own: ending a context waits for all its sockets, at exit for ever.
        self._socket: Any = zmq.Context.instance().socket(zmq.PUSH)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, SEND_QUEUE)
        self._socket.connect(address)

    def put(self, data: bytes, message: Message) -> bool:
        try:
            self._socket.send(data, flags=zmq.DONTWAIT)
        except zmq.Again:
            return False
        return True

    def wait(self, seconds: float) -> None:
        self._socket.poll(1000 * seconds, zmq.POLLOUT)

    def close(self) -> None:
        self._socket.close(linger=0)


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
