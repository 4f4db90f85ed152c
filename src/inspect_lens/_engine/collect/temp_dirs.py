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
import time
from pathlib import Path

__all__ = ["PREFIX", "hold", "let_go", "new_folder", "sweep"]

PREFIX = ".inspect-lens-tmp-"
"""Nobody names a folder of results like this."""
_YOUNG_S = 60.0
"""Between making a folder and holding it its maker may be slow."""


def new_folder() -> tuple[Path, int]:
    """A folder of one's own, held.

    Returns:
        The folder, and what `let_go` wants.
    """
    sweep()
    folder = Path(tempfile.mkdtemp(prefix=PREFIX))
    return folder, hold(folder)


def hold(folder: Path) -> int:
    """Keep a folder from being removed by others, together with whoever else holds it.

    Returns:
        What `let_go` wants.
    """
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    fcntl.flock(lock, fcntl.LOCK_SH)
    return lock


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
                if found.st_uid == os.getuid() and found.st_mtime < time.time() - _YOUNG_S:
                    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                    let_go(folder, lock)
