"""How rows leave the worker: an interface, and the simple transport for CPU workers.

The transport sends the rows as message frames. A worker on a GPU overlaps the copy with the
next step; that exporter implements the same interface.
"""

from __future__ import annotations

import time
from typing import Any, Protocol

import torch
import zmq

from ._message import FailureHeader, StepHeader, encode_header

__all__ = ["Exporter", "ZmqExporter"]

_SEND_TIMEOUT_S = 30.0
SEND_QUEUE = 256
"""Messages that may wait for a front-end before the step loop does."""


class Exporter(Protocol):
    """Sends what a step produced to the front-end processes that own the requests."""

    def send_step(self, reply: str, header: StepHeader, blocks: list[torch.Tensor]) -> bool:
        """Send one step's rows; the tensors may be reused when the call returns.

        Args:
            reply: address of the front-end.
            header: describes the blocks.
            blocks: one (layers, tokens, hidden) tensor per block of the header.

        Returns:
            False when the front-end did not take the message: its requests have failed.
        """
        ...

    def send_failure(self, reply: str, header: FailureHeader) -> None:
        """Tell a front-end that a request failed; does nothing when nobody listens."""
        ...

    def wait_for_region(self, region: int) -> None:
        """Order the step that will fill a region of the ring behind the region's last copy."""
        ...

    def release_region(self, region: int) -> None:
        """Note that all copies out of a region have been asked for."""
        ...

    def close(self) -> None:
        """Free sockets."""
        ...


class ZmqExporter:
    """Sends each step as one multipart message over a ZMQ PUSH socket per front-end."""

    def __init__(self) -> None:
        self._context = zmq.Context()
        self._sockets: dict[str, Any] = {}

    def send_step(self, reply: str, header: StepHeader, blocks: list[torch.Tensor]) -> bool:
        """See `Exporter.send_step`."""
        frames: list[Any] = [encode_header(header)]
        frames += [memoryview(_bytes_of(b)) for b in blocks]
        return self._send(reply, frames)

    def send_failure(self, reply: str, header: FailureHeader) -> None:
        """See `Exporter.send_failure`."""
        self._send(reply, [encode_header(header)])

    def wait_for_region(self, region: int) -> None:
        """See `Exporter.wait_for_region`; rows have left when `send_step` returns."""

    def release_region(self, region: int) -> None:
        """See `Exporter.release_region`."""

    def close(self) -> None:
        """See `Exporter.close`."""
        for socket in self._sockets.values():
            socket.close(linger=0)
        self._sockets.clear()
        self._context.term()

    def _send(self, reply: str, frames: list[Any]) -> bool:
        socket = self._sockets.get(reply)
        if socket is None:
            socket = self._context.socket(zmq.PUSH)
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.SNDHWM, SEND_QUEUE)
            socket.connect(reply)
            self._sockets[reply] = socket
        # Back-pressure: wait for a slow front-end, but not for one that has died, since
        # everybody else's step waits with us.
        deadline = time.monotonic() + _SEND_TIMEOUT_S
        while True:
            try:
                socket.send_multipart(frames, flags=zmq.DONTWAIT, copy=True)
                return True
            except zmq.Again:
                if time.monotonic() > deadline:
                    return False
                socket.poll(100, zmq.POLLOUT)


def _bytes_of(block: torch.Tensor) -> Any:
    return block.contiguous().view(torch.uint8).reshape(-1).numpy()
