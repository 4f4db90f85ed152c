"""How rows leave a GPU: copied on a side stream into pinned memory, sent by a thread.

The step loop only records events and starts copies; it never waits for the GPU, except for
free pinned memory when the front-end takes rows more slowly than the model makes them.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from dataclasses import dataclass
from typing import Any

import torch

from inspect_lens.errors import CapacityError

from ._exporter import Exporter
from ._message import FailureHeader, StepHeader

__all__ = ["SideStreamExporter"]

logger = logging.getLogger("vllm.inspect_lens")

_POOL_TIMEOUT_S = 60.0


_EVENT: Any = torch.cuda.Event  # its constructor has no types


@dataclass
class _Job:
    reply: str
    header: StepHeader | FailureHeader
    blocks: list[torch.Tensor]
    buffers: list[torch.Tensor]
    copied: Any


class _PinnedPool:
    """Pinned buffers by size, bounded in bytes; `take` waits when all are in use."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._allocated = 0
        self._free: dict[int, list[torch.Tensor]] = {}
        self._changed = threading.Condition()

    def take(self, nbytes: int) -> torch.Tensor:
        size = 1 << max(16, (nbytes - 1).bit_length())
        with self._changed:
            while True:
                if self._free.get(size):
                    return self._free[size].pop()
                if self._allocated + size <= self._max_bytes or not self._allocated:
                    self._allocated += size
                    break
                if any(self._free.values()):
                    # Other sizes lie idle: let one go and look again.
                    other = next(s for s, held in self._free.items() if held)
                    self._free[other].pop()
                    self._allocated -= other
                    continue
                if not self._changed.wait(_POOL_TIMEOUT_S):
                    raise CapacityError(
                        f"no pinned memory came free within {_POOL_TIMEOUT_S:g} s: the front-end "
                        "takes rows more slowly than the model makes them"
                    )
        try:
            return torch.empty(size, dtype=torch.uint8, pin_memory=True)
        except BaseException:
            with self._changed:
                self._allocated -= size
            raise

    def give(self, buffer: torch.Tensor) -> None:
        with self._changed:
            self._free.setdefault(buffer.numel(), []).append(buffer)
            self._changed.notify_all()


class SideStreamExporter:
    """Wraps an exporter that sends host memory."""

    def __init__(
        self, inner: Exporter, device: torch.device, *, regions: int, max_bytes: int = 4 << 30
    ) -> None:
        self._inner = inner
        make_stream: Any = torch.cuda.Stream  # its constructor has no types
        self._stream = make_stream(device)
        self._pool = _PinnedPool(max_bytes)
        self._released = [_EVENT() for _ in range(regions)]
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._dead: set[str] = set()
        self._thread = threading.Thread(target=self._run, name="inspect-lens-export", daemon=True)
        self._thread.start()

    def send_step(self, reply: str, header: StepHeader, blocks: list[torch.Tensor]) -> bool:
        """See `Exporter.send_step`; False once an earlier message was not taken."""
        if reply in self._dead:
            return False
        filled = _EVENT()
        filled.record()
        buffers: list[torch.Tensor] = []
        targets: list[torch.Tensor] = []
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(filled)
            for block in blocks:
                nbytes = block.numel() * block.element_size()
                buffer = self._pool.take(nbytes)
                target = buffer[:nbytes].view(block.dtype).view(block.shape)
                target.copy_(block, non_blocking=True)
                # A selected block is a fresh tensor: its memory must outlive the copy.
                block.record_stream(self._stream)
                buffers.append(buffer)
                targets.append(target)
            copied = _EVENT(blocking=True)
            copied.record(self._stream)
        self._jobs.put(_Job(reply, header, targets, buffers, copied))
        return True

    def send_failure(self, reply: str, header: FailureHeader) -> None:
        """See `Exporter.send_failure`; in order behind the rows already sent."""
        self._jobs.put(_Job(reply, header, [], [], None))

    def wait_for_region(self, region: int) -> None:
        """See `Exporter.wait_for_region`: the main stream waits, the CPU does not."""
        torch.cuda.current_stream().wait_event(self._released[region])

    def release_region(self, region: int) -> None:
        """See `Exporter.release_region`."""
        self._released[region].record(self._stream)

    def close(self) -> None:
        """See `Exporter.close`."""
        self._jobs.put(None)
        self._thread.join(timeout=5)
        self._inner.close()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            if isinstance(job.header, FailureHeader):
                with contextlib.suppress(Exception):  # nobody can be told
                    self._inner.send_failure(job.reply, job.header)
                continue
            try:
                job.copied.synchronize()
                # One message that was not taken took its time-out; the next do not wait again.
                if job.reply not in self._dead and not self._inner.send_step(
                    job.reply, job.header, job.blocks
                ):
                    self._dead.add(job.reply)
            except Exception:
                # The thread must live: others wait for its buffers. The front-end times out.
                logger.exception("inspect_lens: rows could not be sent to %s", job.reply)
                self._dead.add(job.reply)
            finally:
                for buffer in job.buffers:
                    self._pool.give(buffer)
