"""Large tensors of edits in files, so that a batch that shares them does not carry them each time.

A request goes through a socket and two loops on its way to a worker. Some hundred kilobytes of
directions would be copied at every stage, once for each request of a batch that is edited alike.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Final

from inspect_lens.errors import CaptureError

__all__ = ["LARGE", "MOST", "file_of", "read_file"]

LARGE: Final = 1 << 16
"""Bytes from which on data lie in a file: to write and to read one takes as long as to send them
once."""
MOST: Final = 1 << 20
"""Bytes up to which: a server's loop, which all clients share, does not wait longer for a disk."""

_NUMBERS = count()
_FILES: Final[weakref.WeakKeyDictionary[object, dict[Path, str]]] = weakref.WeakKeyDictionary()
"""Of what the data belong to: by folder, where they lie."""
_LOCK = threading.Lock()


def file_of(parts: Sequence[memoryview | bytes], owner: object, folder: Path | None) -> str | None:
    """A file that has some data, which is sent in their place.

    Args:
        parts: the data, to be read by workers.
        owner: what they belong to, which always has the same; the file goes when it does.
        folder: of this process, where all its workers can read; None where some can not.

    Returns:
        Its path; None where the data are to be sent.
    """
    nbytes = sum(memoryview(part).nbytes for part in parts)
    if folder is None or not LARGE <= nbytes <= MOST:
        return None
    with _LOCK:
        files = _FILES.setdefault(owner, {})
        if folder not in files:
            path = folder / f"edits-{next(_NUMBERS)}"
            try:
                path.write_bytes(b"".join(parts))
            except OSError:
                # No room, or no folder any more.
                _remove(path, os.getpid())
                return None
            weakref.finalize(owner, _remove, path, os.getpid()).atexit = False
            files[folder] = str(path)
        return files[folder]


def read_file(path: str) -> bytes:
    """Read what `file_of` wrote.

    Raises:
        CaptureError: the file has gone, as the process that wrote it has.
    """
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise CaptureError(
            f"edits: what the request brought lies in a file that cannot be read ({error}); the "
            "process that took it in may have ended, so try again"
        ) from None


def _remove(path: Path, pid: int) -> None:
    # A fork of the process has the same objects, and not the right to clean up.
    if os.getpid() == pid:
        with contextlib.suppress(OSError):
            path.unlink()
