"""Whose results a message from a worker holds."""

from __future__ import annotations

from collections.abc import Mapping

from inspect_lens._engine.protocol.messages import (
    Block,
    Failure,
    Message,
    Opened,
    Settled,
    unpacked,
)

from .pending import Pending
from .placement import Worker

__all__ = ["blamed"]


def blamed(
    message: Message,
    pending: Mapping[str, Pending],
    workers: Mapping[str, Worker],
    error: BaseException,
) -> list[Failure]:
    """Requests of a message that something went wrong with.

    Args:
        message: that was not taken in, or not whole.
        pending: requests whose results are expected, by key.
        workers: by name of their memory.
        error: what went wrong.

    Returns:
        The failure of each that is still expected.
    """
    if isinstance(message, Opened):
        keys = {opening.key for opening in message.openings}
    elif isinstance(message, Block | Settled):
        worker, numbers = workers.get(message.worker), set(unpacked(message.numbers).tolist())
        keys = {
            key
            for key, one in pending.items()
            for opening, its in one.shares
            if its is worker and opening.number in numbers
        }
    else:
        keys = {message.key}
    kind, text = type(error).__name__, f"its results could not be taken in: {error}"
    return [Failure(key, kind, text) for key in pending if key in keys]
