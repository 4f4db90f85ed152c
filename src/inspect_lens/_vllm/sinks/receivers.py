"""Who takes the samples of a sink in the end: a folder of shards, or somebody's function."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Protocol

from inspect_lens._intake import write_file
from inspect_lens._shards import Captured, ShardWriter
from inspect_lens.errors import SpecError

GROUP = "inspect_lens.sinks"
"""Entry points of functions."""

Function = Callable[[Captured, Mapping[str, Any]], object]
Parts = Sequence[bytes | memoryview]


@dataclass(frozen=True)
class Given:
    """What became of samples that were given away."""

    shard: str | None = None
    """File that has them."""
    errors: Sequence[BaseException | None] = ()
    """Of each sample, where each has its own."""


class Receiver(Protocol):
    """Takes samples, in a thread of the sink's own."""

    is_eager: bool
    """Whether it takes samples one by one, and need not wait for more."""

    def give(self, writer: str, number: int, samples: Sequence[Captured], parts: Parts) -> Given:
        """Give samples away."""
        ...


class StoreReceiver:
    is_eager = False

    def __init__(self, writer: ShardWriter) -> None:
        self._writer = writer

    def give(self, writer: str, number: int, samples: Sequence[Captured], parts: Parts) -> Given:
        """Write a shard; the same one may be written again."""
        name, _ = self._writer.write(number, samples, writer=writer, parts=parts)
        return Given(shard=name)


class FunctionReceiver:
    is_eager = True

    def __init__(self, function: Function, about: Mapping[str, Any]) -> None:
        self._function, self._about = function, about

    def give(self, writer: str, number: int, samples: Sequence[Captured], parts: Parts) -> Given:
        """Call it; what it raises is of that sample alone."""
        errors: list[BaseException | None] = []
        for sample in samples:
            try:
                self._function(sample, self._about)
                errors.append(None)
            except BaseException as error:  # noqa: BLE001 - somebody's code, in a thread of ours
                errors.append(error)
        return Given(errors=errors)


def find_function(name: str) -> Function:
    found = {point.name: point for point in entry_points(group=GROUP)}
    if name not in found:
        raise SpecError(
            f"INSPECT_LENS_SINKS: callback={name!r} is no entry point of {GROUP!r}; installed are "
            f"{', '.join(sorted(found)) or 'none'}; install the package that has it beside the "
            "server"
        )
    try:
        function: Any = found[name].load()
    except Exception as error:
        raise SpecError(
            f"INSPECT_LENS_SINKS: callback={name!r} cannot be loaded: {error}"
        ) from error
    if not callable(function):
        raise SpecError(f"INSPECT_LENS_SINKS: callback={name!r} is no function")
    made: Function = function
    return made


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
        """Keep a shard; False where there is no room for it."""
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
        with self._lock:
            return self._waiting[0] if self._waiting else None

    def remove(self, one: Spilled) -> None:
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
