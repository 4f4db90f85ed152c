"""What the API servers of one engine share by name: a folder that goes with the last of them.

Requests come to any of the servers, so a name that one of them takes has to be known to all before
the next request. A counter in shared memory says whether anything has changed since a server last
looked, which costs a request one comparison; only then is the folder read.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import hashlib
import json
import mmap
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

from inspect_lens._base.temp_dirs import PREFIX, held, let_go, sweep
from inspect_lens.errors import CapacityError
from inspect_lens.probe import write_atomic
from inspect_lens.spec import (
    AutoencoderEntry,
    EngineConfig,
    EngineEdits,
    EngineProbe,
    LensEntry,
    ServerConfig,
)

from .contents import N_COUNTS, Item, Uses

_KINDS: Final[Mapping[type, str]] = {
    EngineProbe: "probe",
    EngineEdits: "edits",
    LensEntry: "entry",
    AutoencoderEntry: "sae_entry",
    EngineConfig: "config",
    ServerConfig: "server",
}
"""Key of each kind in a file."""

_PROCESSES_MOST = 64


def folder_of_siblings() -> Path:
    """The folder of all processes that this process's parent has started, and nobody else's."""
    parent = os.getppid()
    name = f"{PREFIX}servers-{os.getuid()}-{parent}-{_start_of(parent)}"
    return Path(tempfile.gettempdir()) / name


class SharedNames:
    """Items by name, the same in all processes that open the folder."""

    def __init__(
        self, folder: Path, parse: Callable[[Mapping[str, Any]], tuple[str, Item]]
    ) -> None:
        sweep()
        self._parse = parse
        self._lock: int | None
        self.folder, self._lock = held(lambda: _own(folder))
        self._guard = os.open(folder / "guard", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        size = mmap.PAGESIZE + 4 * _PROCESSES_MOST * N_COUNTS
        os.ftruncate(self._guard, size)
        self._memory = mmap.mmap(self._guard, size)
        self._count = np.frombuffer(self._memory, dtype=np.int64, count=2)
        """Changes, and processes."""
        table = np.frombuffer(self._memory, dtype=np.int32, offset=mmap.PAGESIZE)
        with self.locked():
            row = int(self._count[1])
            if row >= _PROCESSES_MOST:
                raise OSError(f"more than {_PROCESSES_MOST} API servers")
            self._count[1] += 1
        self.uses = Uses(table.reshape(_PROCESSES_MOST, N_COUNTS), row)
        """Of contents by requests under way, in all processes."""
        self._seen = 0
        self._read: dict[str, tuple[str, tuple[Item, str]]] = {}
        """What files hold, by file name."""
        self._pid = os.getpid()
        atexit.register(self.close)

    @property
    def is_new(self) -> bool:
        return not self._count[0]

    @property
    def has_changed(self) -> bool:
        """Whether somebody has written something since `read` was called last."""
        return bool(self._count[0] != self._seen)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        # A description of its own: locks of one description do not keep its holders apart.
        own = os.open(self.folder / "guard", os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.flock(own, fcntl.LOCK_EX)
            yield
        finally:
            os.close(own)

    def read(self) -> dict[str, tuple[Item, str]]:
        """All items and the references to them; call it with the lock."""
        files = sorted(self.folder.glob("*.json"))
        for file in files:
            if file.name not in self._read:
                body = json.loads(file.read_text(encoding="utf-8"))
                reference = body.pop("reference")
                name, item = self._parse(body)
                self._read[file.name] = name, (item, reference)
        here = {file.name for file in files}
        self._read = {name: item for name, item in self._read.items() if name in here}
        self._seen = int(self._count[0])
        return dict(self._read.values())

    def put(self, name: str, item: Item, reference: str = "") -> None:
        """Let a name stand for an item, and for nothing else; call it with the lock."""
        kind = _KINDS[type(item)]
        wire = item.model_dump(mode="json")
        body = json.dumps({"name": name, kind: wire, "reference": reference})
        file = f"{self._stem(name)}-{int(self._count[0])}.json"
        before = list(self.folder.glob(f"{self._stem(name)}-*.json"))
        try:
            write_atomic(self.folder / file, body.encode())
        except OSError as error:
            raise CapacityError(
                f"{name!r} could not be kept for the other API servers ({error.strerror}); free "
                f"space in the folder of temporary files (TMPDIR) of this server"
            ) from error
        for old in before:
            old.unlink()
            self._read.pop(old.name, None)
        self._read[file] = name, (item, reference)
        self._changed()

    def drop(self, name: str) -> None:
        """Remove a name; call it with the lock."""
        for file in self.folder.glob(f"{self._stem(name)}-*.json"):
            file.unlink()
            self._read.pop(file.name, None)
        self._changed()

    def close(self) -> None:
        """Let go of the folder; the last one removes it."""
        # A forked child has the object, and none of the right to clean up.
        if self._lock is None or os.getpid() != self._pid:
            return
        let_go(self.folder, self._lock)
        os.close(self._guard)
        self._lock = None

    def _changed(self) -> None:
        self._count[0] += 1
        self._seen = int(self._count[0])

    @staticmethod
    def _stem(name: str) -> str:
        return hashlib.sha256(name.encode()).hexdigest()[:32]


def _own(folder: Path) -> Path:
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise PermissionError(f"{folder} belongs to another user, or lets others in")
    return folder


def _start_of(process: int) -> str:
    """When a process began, in ticks since the system came up: its number is used again."""
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19]
