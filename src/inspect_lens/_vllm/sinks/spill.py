"""A folder of this host that keeps shards until a slow sink takes them; it outlives a kill."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from inspect_lens._intake import write_file

__all__ = ["SpillFolder", "Spilled"]

_SHARD = re.compile(r"shard-([0-9a-f]{12})-(\d+)\.safetensors")
_LOCK = re.compile(r"([0-9a-f]{12})\.lock")


@dataclass(frozen=True)
class Spilled:
    """A shard in the folder."""

    path: Path
    writer: str
    number: int
    n_bytes: int


class SpillFolder:
    """Shards of this process, and of processes that ended before theirs were taken.

    Each process holds a lock on a file with its name, which goes with it, however it ends.
    """

    def __init__(self, folder: Path, most_bytes: int, writer: str) -> None:
        """Open the folder, or make it.

        Args:
            folder: of one sink.
            most_bytes: of the shards that this process writes.
            writer: name of this process.

        Raises:
            OSError: it cannot be made or written.
        """
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._folder, self._most = folder, most_bytes
        self._lock = threading.Lock()
        self._waiting: deque[Spilled] = deque()
        self._held: dict[str, int] = {}
        """By writer, a lock that this process has."""
        if not self._hold(writer):
            raise OSError(f"{folder}: another process is called {writer}")
        self._adopt()
        self.n_bytes = sum(one.n_bytes for one in self._waiting)
        """Of all that waits here for this process."""

    def put(self, writer: str, number: int, parts: Sequence[bytes | memoryview]) -> bool:
        """Keep a shard; False where there is no room for it.

        Raises:
            CaptureError: it could not be written.
        """
        size = sum(memoryview(part).nbytes for part in parts)
        with self._lock:
            if self.n_bytes + size > self._most:
                return False
            self.n_bytes += size
        path = self._folder / f"shard-{writer}-{number:06d}.safetensors"
        try:
            write_file(str(path.absolute()), parts, mode=0o600)
        except BaseException:
            with self._lock:
                self.n_bytes -= size
            raise
        with self._lock:
            self._waiting.append(Spilled(path, writer, number, size))
        return True

    def first(self) -> Spilled | None:
        """The shard that has waited longest."""
        with self._lock:
            return self._waiting[0] if self._waiting else None

    def remove(self, one: Spilled) -> None:
        """Forget a shard that was taken."""
        with self._lock:
            with contextlib.suppress(ValueError):
                self._waiting.remove(one)
                self.n_bytes -= one.n_bytes
            one.path.unlink(missing_ok=True)

    def _hold(self, writer: str) -> bool:
        """Take the lock of a writer; False while its process lives."""
        lock = os.open(
            self._folder / f"{writer}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600
        )
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(lock)
            return False
        self._held[writer] = lock
        return True

    def _adopt(self) -> None:
        """Take over what processes left that have ended."""
        ours = set(self._held)
        for path in sorted(self._folder.glob("*.lock")):
            match = _LOCK.fullmatch(path.name)
            if match and match[1] not in ours:
                self._hold(match[1])
        found: dict[str, list[Spilled]] = {writer: [] for writer in self._held}
        for path in sorted(self._folder.glob("shard-*.safetensors")):
            if (match := _SHARD.fullmatch(path.name)) and match[1] in found:
                one = Spilled(path, match[1], int(match[2]), path.stat().st_size)
                found[match[1]].append(one)
        for writer, shards in found.items():
            self._waiting.extend(shards)
            if not shards and writer not in ours:
                # Still held, so that nobody else takes it up between.
                (self._folder / f"{writer}.lock").unlink(missing_ok=True)
