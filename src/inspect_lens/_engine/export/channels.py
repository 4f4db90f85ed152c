"""Ways to a front-end: a socket of this host, or a link to another one (`link.py`)."""

from __future__ import annotations

from typing import Any, Protocol

import zmq

from inspect_lens._engine.protocol.messages import Message
from inspect_lens._engine.protocol.processes import Peer, Process

__all__ = ["SEND_QUEUE", "Channel", "LocalChannel"]

SEND_QUEUE = 8192
"""Messages that may wait for a front-end before the step loop does."""


class Channel(Peer, Protocol):
    """Takes messages for one front-end, in their order."""

    def put(self, data: bytes, message: Message) -> bool:
        """Send a message; False where too many wait.

        Args:
            data: the message, encoded.
            message: the same.
        """
        ...

    def wait(self, seconds: float) -> None:
        """Wait until fewer do."""
        ...

    def close(self) -> None:
        """Send nothing more."""
        ...


class LocalChannel:
    """A front-end of this host, which reads the worker's memory."""

    def __init__(self, address: str) -> None:
        # The process's own: ending a context waits for all its sockets, at exit for ever.
        self._socket: Any = zmq.Context.instance().socket(zmq.PUSH)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, SEND_QUEUE)
        self._socket.connect(address)
        self.process: Process | None = None
        """None where it has asked for nothing yet."""

    def put(self, data: bytes, message: Message) -> bool:
        """See `Channel.put`."""
        try:
            self._socket.send(data, flags=zmq.DONTWAIT)
        except zmq.Again:
            return False
        return True

    def wait(self, seconds: float) -> None:
        """See `Channel.wait`."""
        self._socket.poll(1000 * seconds, zmq.POLLOUT)

    def is_alive(self) -> bool:
        """See `Peer.is_alive`."""
        return self.process is None or self.process.is_alive()

    def is_stopped(self) -> bool:
        """See `Peer.is_stopped`."""
        return self.process is not None and self.process.is_stopped()

    def close(self) -> None:
        """See `Channel.close`."""
        self._socket.close(linger=0)

    def __str__(self) -> str:
        """For logs."""
        return str(self.process or "a front-end")
