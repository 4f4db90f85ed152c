"""Files on any fsspec path: whole reads, and writes that are there entirely or not at all.

fsspec is imported where a path is not a local one: the process beside an eval does without.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from uuid import uuid4

from inspect_lens._base.untrusted import read_regular
from inspect_lens.errors import ArtifactError, CaptureError

__all__ = [
    "absolute",
    "has_file",
    "is_local",
    "join",
    "parent",
    "read_file",
    "stamp_of",
    "stem",
    "write_file",
]

_PARTS = 16
"""Of a file that go into one system call: the least that POSIX promises."""


def write_file(uri: str, parts: Iterable[bytes | memoryview], *, mode: int = 0o666) -> None:
    """Write a file so that a reader sees all of it or none."""
    try:
        if is_local(uri):
            # What nearly all calls write; asking fsspec costs half as much as the file.
            _replace(uri, parts, mode)
            return
        import fsspec

        filesystem, path = fsspec.core.url_to_fs(uri)
        if "file" in filesystem.protocol:
            _replace(path, parts, mode)
        else:
            filesystem.makedirs(parent(path), exist_ok=True)
            # Object stores show an upload only when it is complete.
            filesystem.pipe_file(path, b"".join(parts))
    except (OSError, ImportError, ValueError) as error:
        raise CaptureError(
            f"{uri}: could not write captured activations ({error}); free space, choose another "
            "place with -M activations_dir= or INSPECT_LENS_DIR, or keep them in memory with "
            "-M activations=memory"
        ) from error


def read_file(uri: str, *, most: int | None = None) -> bytes | None:
    """Read a file; a local one has to be a regular file."""
    try:
        if is_local(uri):
            return read_regular(uri, most=most)
        import fsspec

        filesystem, path = fsspec.core.url_to_fs(uri)
        if most is not None and (size := filesystem.size(path)) is not None and size > most:
            raise ValueError(f"it has {size} bytes, and should have {most} at most")
        data: bytes = filesystem.cat_file(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ImportError, ValueError) as error:
        raise ArtifactError(f"{uri}: could not be read ({error})") from error
    return data


def has_file(uri: str) -> bool:
    """Whether a file is there and can be asked for."""
    if is_local(uri):
        return os.path.isfile(uri)
    try:
        import fsspec

        filesystem, path = fsspec.core.url_to_fs(uri)
        return bool(filesystem.exists(path))
    except (OSError, ImportError, ValueError):
        return False


def is_local(uri: str) -> bool:
    """Whether a path needs no fsspec: absolute, and without a protocol."""
    return os.path.isabs(uri) and "::" not in uri and "://" not in uri


def stamp_of(path: str) -> str | None:
    """What changes when a local file is written again; None where there is no such file."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return f"{found.st_ino}:{found.st_size}:{found.st_mtime_ns}"


def parent(uri: str) -> str:
    """Everything before the last slash; `/` for what lies at the root of the disk."""
    folder = uri.rpartition("/")[0]
    return folder or "/" * uri.startswith("/")


def stem(uri: str) -> str:
    """The last part without its last extension."""
    return uri.rpartition("/")[2].rpartition(".")[0] or uri.rpartition("/")[2]


def join(root: str, relative: str) -> str:
    """Put a relative URI below a root; an absolute one stays as it is."""
    if "://" in relative or relative.startswith("/") or not root:
        return relative
    return f"{root.rstrip('/')}/{relative}"


def absolute(uri: str) -> str:
    """A local path made absolute; URLs stay as they are, without `file://`."""
    if uri.startswith("file://"):
        uri = uri.removeprefix("file://")
    return uri if "://" in uri else os.path.abspath(uri)


def _replace(path: str, parts: Iterable[bytes | memoryview], mode: int) -> None:
    """Write a local file in few system calls.

    Each gives the interpreter away, and a thread that wants it back from a busy event loop waits
    5 ms, so this counts more than the bytes. The disk is not waited for: an agent's calls write
    faster than disks are. A machine that loses its power may lose files of the last half minute;
    their hashes in the log tell.
    """
    folder = os.path.dirname(path)
    temporary = os.path.join(folder, f".{uuid4().hex}.tmp")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
    try:
        file = os.open(temporary, flags, mode)
    except FileNotFoundError:
        os.makedirs(folder, exist_ok=True)
        file = os.open(temporary, flags, mode)
    try:
        try:
            _write_all(file, parts)
        finally:
            os.close(file)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _write_all(file: int, parts: Iterable[bytes | memoryview]) -> None:
    """Write parts one behind the other; a system call need not take all that it is given."""
    left = [memoryview(part).cast("B") for part in parts if len(part)]
    while left:
        many = hasattr(os, "writev")
        done = os.writev(file, left[:_PARTS]) if many else os.write(file, left[0])
        while left and done >= len(left[0]):
            done -= len(left.pop(0))
        if done:
            left[0] = left[0][done:]
