"""Getting rows out of the ring into shared memory: at once on a CPU, on a side stream on a GPU.

On a GPU the step loop only records events and starts copies; it never waits for the device. The
number that says "the rows are there" is itself copied behind them in the same stream.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from inspect_lens._engine.protocol.shared_memory import ArenaWriter

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

    def taps(self, rows: torch.Tensor, ranks: tuple[int, ...]) -> torch.Tensor:
        """Some taps of (taps, …) rows."""
        if ranks == tuple(range(ranks[0], ranks[0] + len(ranks))):
            return rows[ranks[0] : ranks[0] + len(ranks)]
        return torch.stack([rows[rank] for rank in ranks])

    def apply(
        self, readout: Callable[[torch.Tensor], torch.Tensor], rows: torch.Tensor
    ) -> torch.Tensor:
        """What a readout makes of rows."""
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
        where = torch.from_numpy(index).pin_memory().to(rows.device, non_blocking=True)
        return rows.index_select(1, where)

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
