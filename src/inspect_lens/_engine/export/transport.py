"""How results leave the worker: rows in shared memory, and short messages that tell of them."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
import zmq

from inspect_lens._engine.plan.step_plan import Longs
from inspect_lens._engine.protocol.messages import (
    Block,
    Failure,
    Message,
    Opened,
    Opening,
    Saved,
    Settled,
    encode,
    packed,
)
from inspect_lens._engine.protocol.processes import STALLED_S, STOPPED_S, is_alive, is_stopped
from inspect_lens._engine.protocol.shared_memory import ArenaWriter

from .device_copy import Copier

__all__ = ["Exporter", "Rows"]

_SEND_TIMEOUT_S = STALLED_S
_BLOCK_BYTES = 512 << 20
"""Bytes of rows that one message tells of. A front-end places the rows of a long step while others
of them are still on their way, and gives their room back bit by bit."""
SEND_QUEUE = 8192
"""Messages that may wait for a front-end before the step loop does."""


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

    def __init__(self, arena: ArenaWriter, copier: Copier) -> None:
        self.arena = arena
        self.copier = copier
        self._sockets: dict[str, Any] = {}
        self._pids: dict[str, int] = {}
        self.attention = b""
        """What front-ends are told of the attention layers, packed."""
        self._told: set[str] = set()
        """Front-ends that were."""
        self._stuck: set[str] = set()
        """Front-ends that were waited for in vain: they are not, again, for each failure."""
        self._seq = 0

    def announce(self, reply: str, pid: int, openings: list[Opening]) -> bool:
        """Tell a front-end which of its requests this worker has taken up.

        Returns:
            False when the front-end did not take the message: its requests have failed.
        """
        is_first = reply not in self._told
        self._told.add(reply)
        self._pids[reply] = pid
        told = self.attention if is_first else b""
        return self._send(reply, Opened(self.arena.name, openings, told))

    def send(self, reply: str, rows: Rows, path: str, taps: range | None = None) -> bool:
        """Send one block of rows; the tensor may be overwritten once its part is released.

        Args:
            reply: address of the front-end.
            rows: what to send.
            path: how the forward pass ran.
            taps: of the rows; by default all.

        Returns:
            False when the front-end did not take the message: its requests have failed.

        Raises:
            CapacityError: there was no room, and none came free.
        """
        reader = self.arena.reader(reply, self._pids[reply])
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
        """Tell a front-end how far its requests are settled, behind the rows of the step.

        Returns:
            False when the front-end did not take the message: its requests have failed.
        """
        return self._send(reply, Settled(self.arena.name, numbers, settled))

    def send_failure(self, reply: str, failure: Failure) -> None:
        """Tell a front-end that a request failed; does nothing when nobody listens."""
        self._send(reply, failure)

    def send_saved(self, reply: str, pid: int, saved: Saved) -> None:
        """Tell a front-end what hooks of a request saved; without it the request times out."""
        self._pids[reply] = pid
        self._send(reply, saved)

    def forget(self, reply: str) -> None:
        """Close the socket to a front-end that has gone, and to which nothing is under way."""
        if (socket := self._sockets.pop(reply, None)) is not None:
            socket.close(linger=0)
        self._pids.pop(reply, None)
        self._stuck.discard(reply)
        self._told.discard(reply)

    def close(self) -> None:
        """Free sockets and memory."""
        for socket in self._sockets.values():
            socket.close(linger=0)
        self._sockets.clear()
        self.copier.close()
        self.arena.close()

    def _send(self, reply: str, message: Message) -> bool:
        socket = self._sockets.get(reply)
        if socket is None:
            # The process's own: ending a context waits for all its sockets, at exit for ever.
            socket = zmq.Context.instance().socket(zmq.PUSH)
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.SNDHWM, SEND_QUEUE)
            socket.connect(reply)
            self._sockets[reply] = socket
        data = encode(message)
        # Back-pressure: wait for a slow front-end, but not for one that has died, since
        # everybody else's step waits with us.
        began = time.monotonic()
        most = 0.0 if reply in self._stuck else _SEND_TIMEOUT_S
        while True:
            try:
                socket.send(data, flags=zmq.DONTWAIT)
                self._stuck.discard(reply)
                return True
            except zmq.Again:
                waited = time.monotonic() - began
                if waited > most or self._is_hopeless(reply, waited):
                    self._stuck.add(reply)
                    return False
                socket.poll(100, zmq.POLLOUT)

    def _is_hopeless(self, reply: str, waited_s: float) -> bool:
        """Whether a front-end is gone, or stopped."""
        if (pid := self._pids.get(reply)) is None:
            return False
        return not is_alive(pid) or (waited_s > STOPPED_S and is_stopped(pid))
