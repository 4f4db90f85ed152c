"""Results given to another process of the same user on the same host, by a Unix socket.

HTTP is sent by the server's event loop, which all requests share. Threads send a result by a socket
in a folder that only this user can enter, so whoever asks there has shown who he is. Its name is
made of the handle, and never told by a server: a strange one cannot have a client look elsewhere.
The kernel says of both ends which user they are.

A file in memory that the client maps would be slower: its pages have to be made first, and then be
known to two processes. `python -m tests.kit.fetch_times` measures what there is.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import re
import socket
import socketserver
import struct
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from .temp_dirs import PREFIX, held, let_go, sweep

logger = logging.getLogger("vllm.inspect_lens")

Data = bytes | memoryview
GetResult = Callable[[str], Data | None]
"""Takes a handle; returns what it stands for, or None where that was fetched before or expired."""

_SIZE = struct.Struct("<q")
_GONE = -1
_LONGEST = 256
"""Bytes of a handle and a newline."""
_MOST_BYTES = 1 << 33
_TIMEOUT_S = 60.0
_IDLE_S = 600.0
_CONNECTIONS = 64
"""Kept of a client to one server, while nobody uses them."""
_CREDENTIALS, _TIMEVAL = struct.Struct("3i"), struct.Struct("ll")
_NAME = re.compile(r"[0-9a-f]{1,64}")
_SOCKET = "results"


class NotHere(LookupError):
    """No process of this user on this host made the handle, or it has ended."""


def serve_here(name: str, get: GetResult) -> Path:
    """Give results to processes of this user, for the life of this one.

    Args:
        name: what handles begin with, before a hyphen: hexadecimal digits.
        get: called in threads.

    Returns:
        The folder of the socket; it goes with this process, and if that is killed, whoever next
        makes such a folder removes it.

    Raises:
        OSError: there is no folder for temporary files that this process can write.
    """
    sweep()
    folder, lock = held(lambda: _made(_folder(name)))
    atexit.register(_end, folder, lock, os.getpid())
    with _short(folder) as short:
        server = _Server(f"{short}/{_SOCKET}", get)
    threading.Thread(target=server.serve_forever, name="inspect-lens-results", daemon=True).start()
    return folder


def _end(folder: Path, lock: int, process: int) -> None:
    if os.getpid() == process:  # a forked child has the lock, and none of the right to clean up
        let_go(folder, lock)


def fetch_here(handle: str) -> memoryview | None:
    """Fetch a tensor's bytes from a server of this user on this host, without HTTP.

    Args:
        handle: from `activations` of an answer, where the transport is `binary`.

    Returns:
        `nbytes` bytes in the shape and dtype that stand beside the handle; None where they were
        fetched before, or have expired.

    Raises:
        NotHere: the server runs as another user, or on another host; a `LookupError`. Get
            `/v1/activations/{handle}` from it.

    Example:
        <!-- test: server -->
        ```python
        import httpx

        from inspect_lens.client import fetch_here

        asked = {"output_residual_stream": [4], "activations_transport": "binary"}
        body = {"prompt": "Velosh was founded by", "max_tokens": 1, **asked}
        answer = httpx.post("http://localhost:8000/v1/completions", json=body).json()
        entry = answer["activations"]["residual_stream"]
        assert len(fetch_here(entry["handle"])) == entry["nbytes"]
        ```
    """
    name = handle.partition("-")[0]
    if not handle.isascii() or not handle.isprintable() or len(handle) >= _LONGEST:
        raise NotHere(handle)
    kept = _kept.get((os.getpid(), name), [])
    while True:
        connection = None
        with contextlib.suppress(IndexError):
            connection = kept.pop()
        is_new = connection is None
        try:
            connection = connection or _connected(name)
            found = _asked(connection, handle)
        except OSError:
            if connection is not None:
                connection.close()
            if is_new:
                raise NotHere(handle) from None
            continue  # the server closes those that nobody uses
        _keep(name, connection)
        return found


def _keep(name: str, connection: socket.socket) -> None:
    kept = _kept.setdefault((os.getpid(), name), [])
    if len(kept) < _CONNECTIONS:
        kept.append(connection)
    else:
        connection.close()


def is_here(name: str) -> bool:
    """Whether a process that serves results by this name runs as this user on this host."""
    try:
        _connected(name).close()
    except OSError:
        return False
    return True


def _asked(connection: socket.socket, handle: str) -> memoryview | None:
    connection.sendall(f"{handle}\n".encode())
    (size,) = _SIZE.unpack(_received(connection, _SIZE.size))
    if size == _GONE:
        return None
    if not 0 <= size <= _MOST_BYTES:
        raise OSError(f"a result of {size} bytes")
    return _received(connection, size)


def _received(connection: socket.socket, size: int) -> memoryview:
    # Not filled with zeros first, as a bytearray is.
    data = np.empty(size, np.uint8).data
    n = 0
    while n < size:
        # With this flag, megabytes are one call, and the interpreter is let go of once.
        more = connection.recv_into(data[n:], size - n, socket.MSG_WAITALL)
        if not more:
            raise ConnectionResetError("the server has ended")
        n += more
    return data.toreadonly()


_kept: dict[tuple[int, str], list[socket.socket]] = {}
"""Connections that nobody uses at present, by server and by process: a forked one has others."""


def _connected(name: str) -> socket.socket:
    """A connection to a process of this user."""
    if not hasattr(socket, "SO_PEERCRED") or not _NAME.fullmatch(name):
        raise FileNotFoundError(name)
    made = socket.socket(socket.AF_UNIX)
    try:
        _set_timeouts(made, _TIMEOUT_S)
        with _short(_folder(name)) as short:
            made.connect(f"{short}/{_SOCKET}")
        _check_user(made)
    except OSError:
        made.close()
        raise
    return made


def _set_timeouts(connection: socket.socket, idle_s: float) -> None:
    """Have the kernel end what takes too long.

    Python's own timeouts let go of the interpreter for each piece that a socket takes.
    """
    for option, seconds in ((socket.SO_RCVTIMEO, idle_s), (socket.SO_SNDTIMEO, _TIMEOUT_S)):
        connection.setsockopt(socket.SOL_SOCKET, option, _TIMEVAL.pack(int(seconds), 0))


def _check_user(connection: socket.socket) -> None:
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    if _CREDENTIALS.unpack(found)[1] != os.getuid():
        raise PermissionError("the other end of the socket is another user's")


class _Server(socketserver.ThreadingUnixStreamServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, path: str, get: GetResult) -> None:
        self.get = get
        super().__init__(path, _Connection)

    def handle_error(self, request: object, client_address: object) -> None:
        logger.warning("inspect_lens: a result could not be given away", exc_info=True)


class _Connection(socketserver.StreamRequestHandler):
    server: _Server

    def handle(self) -> None:
        _set_timeouts(self.connection, _IDLE_S)
        # A client that goes, or asks for nothing for long, is no fault.
        with contextlib.suppress(OSError):
            _check_user(self.connection)
            while (line := self.rfile.readline(_LONGEST)).endswith(b"\n"):
                data = self.server.get(line.decode("ascii", "replace").rstrip("\n"))
                self.connection.sendall(_SIZE.pack(_GONE if data is None else len(data)))
                if data is not None:
                    self.connection.sendall(data)


def _folder(name: str) -> Path:
    return Path(tempfile.gettempdir()) / f"{PREFIX}{name}"


def _made(folder: Path) -> Path:
    folder.mkdir(mode=0o700)
    return folder


@contextlib.contextmanager
def _short(folder: Path) -> Iterator[str]:
    """A path of a folder that leaves room for a name: those of sockets have 107 characters."""
    own = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        found = os.fstat(own)
        if found.st_uid != os.getuid() or found.st_mode & 0o077:
            raise PermissionError(f"{folder} belongs to another user, or lets others in")
        yield f"/proc/self/fd/{own}"
    finally:
        os.close(own)
