"""Messages of workers, each worker's in their order, and none behind rows of another worker.

A worker tells of rows while they are on their way. Its later messages wait for them, and those of
other workers do not: a worker may wait for room in its memory, which comes free when its rows are
taken, while the rows of another one wait for a step that both make together.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from inspect_lens import errors
from inspect_lens._engine.protocol.messages import (
    Block,
    Failure,
    Message,
    Opened,
    Settled,
    unpacked,
)
from inspect_lens.errors import CaptureError

from .placement import Pending, Worker

_WAIT_S = 60.0
_POLL_LEAST_S, _POLL_MOST_S = 0.001, 0.004
_POLL_SHARE = 0.125
"""Of the time that has been waited: the pause before the next look."""
_LOOKS = 256
"""After which it is looked whether a worker is still there."""


@dataclass(slots=True)
class _Queue:
    messages: deque[Message] = field(default_factory=deque)
    """The first of them tells of rows that have not come."""
    since: float = 0.0
    """When these were first waited for."""
    looks: int = 0


class Inbox:
    """Hands messages on, when their turn has come."""

    def __init__(
        self,
        handle: Callable[[Message], None],
        *,
        has_landed: Callable[[Block], bool],
        is_alive: Callable[[str], bool],
    ) -> None:
        self._handle = handle
        self._has_landed, self._is_alive = has_landed, is_alive
        self._queues: dict[str, _Queue] = {}

    def __bool__(self) -> bool:
        """Whether any message waits."""
        return bool(self._queues)

    def put(self, message: Message) -> None:
        """Hand a message on, or keep it until the rows before it have come."""
        worker = getattr(message, "worker", None)
        queue = self._queues.get(worker) if worker is not None else None
        if queue is not None:
            queue.messages.append(message)
        elif isinstance(message, Block) and not self._has_landed(message):
            self._queues[message.worker] = _Queue(deque((message,)), time.monotonic())
        else:
            self._handle(message)

    def turn(self) -> bool:
        """Hand on what has come of each worker; whether that was anything."""
        any_came = False
        for worker, queue in list(self._queues.items()):
            # A few at a time: others' turn comes between.
            first = queue.messages[0]
            if isinstance(first, Block) and not self._is_due(first, queue):
                continue
            any_came = True
            queue.messages.popleft()
            if queue.messages:
                queue.since, queue.looks = time.monotonic(), 0
            else:
                del self._queues[worker]
            self._handle(first)
        return any_came

    def pause(self, hurry: threading.Event) -> None:
        """Wait a little for rows.

        Messages come while the step still runs: most of the waiting is for the device. The longer
        it has lasted, the longer is the pause before the next look, since every look takes
        Python's lock from a thread that hands requests over or takes their tokens.
        """
        since = max((queue.since for queue in self._queues.values()), default=0.0)
        waited = time.monotonic() - since
        pause = min(max(waited * _POLL_SHARE, _POLL_LEAST_S), _POLL_MOST_S)
        if hurry.is_set():
            time.sleep(_POLL_LEAST_S)
        else:
            hurry.wait(pause)

    def _is_due(self, block: Block, queue: _Queue) -> bool:
        if self._has_landed(block):
            return True
        queue.looks += 1
        is_gone = not queue.looks % _LOOKS and not self._is_alive(block.worker)
        return is_gone or time.monotonic() - queue.since > _WAIT_S


def blamed(
    message: Message,
    pending: Mapping[str, Pending],
    workers: Mapping[str, Worker],
    error: BaseException,
) -> list[Failure]:
    """Requests of a message that something went wrong with."""
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


logger = logging.getLogger("vllm.inspect_lens")


class Notifier:
    """Threads wait on it, and others are called; while anybody does, rows are hurried."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        """Held by whoever reads or changes what requests have."""
        self.hurry = threading.Event()
        """Set while somebody waits for rows, or reads scores as they come."""
        self.n_waiting = 0
        """Who waits or watches."""
        self._watchers: list[Callable[[], None]] = []

    def wait_for(self, is_ready: Callable[[], bool], timeout_s: float, every_s: float) -> bool:
        """Wait until something is so; the lock is held, and let go of meanwhile."""
        if is_ready():
            self.calm()
            return True
        deadline = time.monotonic() + timeout_s
        self.n_waiting += 1
        self.hurry.set()
        try:
            while (now := time.monotonic()) < deadline:
                self.changed.wait(min(deadline - now, every_s))
                if is_ready():
                    return True
            return False
        finally:
            self.n_waiting -= 1
            self.calm()

    def watch(self, call: Callable[[], None]) -> None:
        """Have something called whenever anything has come, until `unwatch`."""
        with self.changed:
            self._watchers.append(call)
            self.n_waiting += 1
            self.hurry.set()

    def unwatch(self, call: Callable[[], None]) -> None:
        """Undo `watch`."""
        with self.changed:
            self._watchers.remove(call)
            self.n_waiting -= 1
            self.calm()

    def tell(self) -> None:
        """Something has come; the lock is held."""
        self.changed.notify_all()
        for call in tuple(self._watchers):
            try:
                call()
            except BaseException:
                # All results come by this thread. Who watches looks again by itself, too.
                logger.exception("inspect_lens: somebody could not be told of results")

    def calm(self) -> None:
        """Let rows take their time if nobody waits any more."""
        # A batch that ends at once is taken request by request: clearing takes longer than a look.
        if not self.n_waiting and self.hurry.is_set():
            self.hurry.clear()
