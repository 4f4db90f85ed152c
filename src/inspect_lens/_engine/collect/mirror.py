"""A copy of the memory of a worker on another host: what is read is what that worker sent."""

from __future__ import annotations

import mmap
import threading
from collections import deque
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from inspect_lens._engine.protocol.frames import MOST_ASKED, FrameError, Hello
from inspect_lens._engine.protocol.shared_memory import (
    BOARD_COLUMNS,
    BOARD_SIZE,
    HEAD_BYTES,
    ArenaReader,
    View,
)

__all__ = ["Mirror"]

_COLUMNS = 1 + BOARD_COLUMNS
"""Of what is told of the board: the request, and its record."""


class Mirror(ArenaReader):
    """Looks to the collector as the worker's memory does; filled by the listener's thread.

    The board is asked for: tokens of a request come another way than its records, so those that
    were read before the request ended may lack what its last steps did.
    """

    def __init__(self, hello: Hello, wake: Callable[[], None]) -> None:
        """Reserve addresses; memory is taken where something is written.

        Args:
            hello: what the worker said of itself.
            wake: has the listener look what to send.
        """
        self.name, self.nbytes = hello.worker, hello.nbytes
        self.view = View(mmap.mmap(-1, HEAD_BYTES + hello.nbytes))
        self._reader, self._wake = hello.reader, wake
        self.is_lost = False
        self._lock = threading.Lock()
        self._to_ask: deque[int] = deque()
        self._told: dict[int, bool] = {}
        """By request that was asked for: whether it was answered."""
        self._told_cursor = 0

    @property
    def is_alive(self) -> bool:
        """Whether the link to the worker is."""
        return not self.is_lost

    def lose(self) -> None:
        """Take note that the worker has gone."""
        self.is_lost = True

    def is_told(self, number: int) -> bool:
        """See `ArenaReader.is_told`; asks for a request when first called."""
        with self._lock:
            if (told := self._told.get(number)) is None:
                self._told[number] = told = False
                self._to_ask.append(number)
                self._wake()
            return told

    def ask_again(self, number: int) -> None:
        """See `ArenaReader.ask_again`."""
        with self._lock:
            if self._told.get(number):
                del self._told[number]

    def forget(self, number: int) -> None:
        """See `ArenaReader.forget`."""
        with self._lock:
            self._told.pop(number, None)

    def done(self, reader: int, seq: int) -> None:
        """See `ArenaReader.done`."""
        super().done(self._reader, seq)
        self._wake()

    def cursor(self) -> int | None:
        """What the worker has to be told of the cursor; None where it knows."""
        now = int(self.view.cursors[self._reader])
        if now == self._told_cursor:
            return None
        self._told_cursor = now
        return now

    def asked(self) -> bytes:
        """Numbers of requests to ask the worker for; empty where there are none."""
        with self._lock:
            n = min(len(self._to_ask), MOST_ASKED)
            numbers = [self._to_ask.popleft() for _ in range(n)]
        return np.asarray(numbers, dtype="<i8").tobytes()

    def write(self, offset: int, content: memoryview) -> None:
        """Put bytes where they lie in the worker's memory.

        Raises:
            FrameError: they would lie elsewhere.
        """
        if not 0 <= offset <= offset + len(content) <= self.nbytes:
            raise FrameError(f"{len(content)} bytes at {offset} lie outside of the worker's memory")
        self.view.data[offset : offset + len(content)] = np.frombuffer(content, dtype=np.uint8)

    def land(self, seq: int) -> None:
        """Take note that rows are whole."""
        self.view.landed[0] = max(seq, int(self.view.landed[0]))

    def revoke(self, seq: int) -> None:
        """Take note that blocks will be overwritten."""
        revoked = self.view.revoked
        revoked[self._reader] = max(seq, int(revoked[self._reader]))

    def note(self, content: memoryview) -> None:
        """Take note of records that were asked for.

        Raises:
            FrameError: the bytes are none.
        """
        if len(content) % (8 * _COLUMNS):
            raise FrameError(f"{len(content)} bytes are no records of the board")
        both: NDArray[np.int64] = np.frombuffer(content, dtype="<i8").reshape(-1, _COLUMNS)
        self.view.board[both[:, 0] % BOARD_SIZE] = both[:, 1:]
        with self._lock:
            for number in both[:, 0].tolist():
                if number in self._told:
                    self._told[number] = True
