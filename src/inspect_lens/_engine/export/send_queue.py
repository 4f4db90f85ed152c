"""Many rows leave bit by bit, each time in front of a step.

A GPU serves copies to the host in the order in which they are asked for, whatever the streams: seen
on an H200, where a copy of 4 KiB took 2.4 ms behind 128 MiB, and 9.7 ms behind 512. The tokens that
a step has sampled come to the host in the same way, and the engine plans the next step but one with
them. So what a step leaves is asked for behind its tokens, and of the rows of a long prompt no more
at a time than a step has time for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch

from inspect_lens.spec import EnginePath

from .transport import Exporter, Rows

_AT_ONCE = 32 << 20
"""Bytes that are sent with their step: two thirds of a millisecond."""
_PIECE = 128 << 20
"""Bytes of what is sent bit by bit, where one tap does not have more: asking for each takes time of
the step loop's thread."""
_MORE = 64 << 20
"""Bytes that leave in front of a step beside as many as come with one, to make up for prompts."""
_STEPS = 4
"""Steps of which the least that one of them brings is what comes with a step."""


@dataclass(frozen=True, slots=True)
class _Piece:
    reply: str
    rows: Rows
    path: EnginePath
    taps: range
    nbytes: int


class Outbox:
    """Sends rows at once, or lets them wait for their turn."""

    def __init__(
        self,
        exporter: Exporter,
        ring: torch.Tensor,
        *,
        is_wanted: Callable[[bytes], bool],
        drop: Callable[[str], None],
        fail: Callable[[bytes, Exception], None],
    ) -> None:
        self._exporter = exporter
        self._ring = ring
        self._is_wanted = is_wanted
        self._drop = drop
        self._fail = fail
        self._waiting: deque[_Piece | Callable[[], None]] = deque()
        self._came = 0
        """Bytes that had to wait since the last step began."""
        self._steps: deque[int] = deque(_STEPS * [0], maxlen=_STEPS)
        """The same, of the last steps."""

    def put(self, reply: str, rows: Rows, path: EnginePath) -> bool:
        """Send rows now where they are few."""
        tensor = rows.tensor
        taps = tensor.shape[0]
        per_tap = tensor[0].numel() * rows.dtype.itemsize
        if taps * per_tap <= _AT_ONCE or not self._is_in_ring(tensor):
            return self._exporter.send(reply, rows, path)
        at_once = max(1, _PIECE // per_tap)
        for tap in range(0, taps, at_once):
            some = range(tap, min(taps, tap + at_once))
            self._waiting.append(_Piece(reply, rows, path, some, len(some) * per_tap))
        self._came += taps * per_tap
        return True

    def then(self, work: Callable[[], None]) -> None:
        """Do something when all that waits by now has been sent."""
        if self._waiting:
            self._waiting.append(work)
        else:
            work()

    def begin_step(self) -> None:
        """Send what a step has time for."""
        self._steps.append(self._came)
        self._came = 0
        if self._waiting:
            self._send(min(self._steps) + _MORE)

    def send_all(self) -> None:
        """Send all that waits."""
        if self._waiting:
            self._send(None)

    def _send(self, nbytes: int | None) -> None:
        waiting = self._waiting
        while waiting:
            piece = waiting[0]
            if not isinstance(piece, _Piece):
                waiting.popleft()
                piece()
                continue
            if nbytes is not None:
                if nbytes <= 0:
                    return
                nbytes -= piece.nbytes
            waiting.popleft()
            if not self._is_wanted(piece.rows.numbers):
                continue
            try:
                if not self._exporter.send(piece.reply, piece.rows, piece.path, piece.taps):
                    self._drop(piece.reply)
            except Exception as error:  # noqa: BLE001 - a fault fails its own requests
                self._fail(piece.rows.numbers, error)

    def _is_in_ring(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() == self._ring.untyped_storage().data_ptr()
