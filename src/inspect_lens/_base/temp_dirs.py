"""Folders for temporary files that do not outlive the processes that use them, even killed ones.

vLLM kills API servers that do not end at once, and then nobody is left to clean up. So whoever uses
a folder holds a lock on it, which goes with the process, and the next one to make a folder removes
those that nobody holds. Programs that clean up old temporary files leave locked folders alone, too.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

PREFIX = ".inspect-lens-tmp-"
"""Nobody names a folder of results like this."""


def new_folder() -> tuple[Path, int]:
    """A folder of one's own, held."""
    sweep()
    return held(lambda: Path(tempfile.mkdtemp(prefix=PREFIX)))


def held(make: Callable[[], Path]) -> tuple[Path, int]:
    """Make a folder, or find one, and keep others from removing it."""
    while True:
        folder = make()
        # Until it is held, others may take it for one that was left, and remove it.
        with contextlib.suppress(FileNotFoundError):
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            fcntl.flock(lock, fcntl.LOCK_SH)
            if os.fstat(lock).st_nlink:
                return folder, lock
            os.close(lock)


def let_go(folder: Path, lock: int) -> None:
    """Hold a folder no longer; the last one to do so removes it."""
    with contextlib.suppress(OSError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
    os.close(lock)


def sweep() -> None:
    """Remove folders of ours that nobody holds."""
    with contextlib.suppress(OSError):
        for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
            with contextlib.suppress(OSError):
                found = folder.lstat()
                if found.st_uid == os.getuid():
                    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                    let_go(folder, lock)
