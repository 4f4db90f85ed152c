"""Whose results a message from a worker holds, and whose are lost with a worker."""

from __future__ import annotations

from collections.abc import Mapping

from inspect_lens import errors
from inspect_lens._engine.protocol.messages import (
    Block,
    Failure,
    Message,
    Opened,
    Settled,
    unpacked,
)
from inspect_lens._engine.protocol.shared_memory import ArenaReader
from inspect_lens.errors import CaptureError

from .pending import Pending
from .placement import Worker

__all__ = ["as_error", "blamed", "lost"]


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


def as_error(failure: Failure) -> errors.LensError:
    """The error of a request that has failed, as its worker named it."""
    kind = getattr(errors, failure.kind, None)
    if not (isinstance(kind, type) and issubclass(kind, errors.LensError)):
        return CaptureError(f"the worker failed this request: {failure.kind}: {failure.message}")
    return kind(failure.message)


def lost(pending: Mapping[str, Pending], reader: ArenaReader, why: str) -> dict[str, CaptureError]:
    """Fail requests that need a worker which has gone; the collector's lock is held.

    Args:
        pending: requests whose results are expected, by key.
        reader: of the worker's memory.
        why: what is known of it.

    Returns:
        The error of each, by key.
    """
    error = CaptureError(f"a worker on another host has gone: {why}; nothing partial is returned")
    failed: dict[str, CaptureError] = {}
    for key, one in list(pending.items()):
        if any(worker.reader is reader for _, worker in one.shares):
            one.fail(key, error)
            failed[key] = error
    return failed
