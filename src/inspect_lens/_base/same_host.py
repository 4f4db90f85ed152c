"""Results given to another process of the same user on the same host, by a Unix socket.

HTTP is sent by the server's event loop, which all requests share. Threads send a result by a socket
in a folder that only this user can enter, so whoever asks there has shown which user it is. The
path is made from the handle and never taken from a server, so a hostile server cannot make a client
look elsewhere. Each end also asks the kernel which user the other one is.

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
from typing import Any

import numpy as np
from typing_extensions import override

from inspect_lens.errors import CaptureError

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
    """Give results to processes of this user; `name` is what handles begin with, in hexadecimal."""
    sweep()
    folder, lock = held(lambda: _made(_folder(name)))
    _held.append((folder, lock))
    with _short(folder) as short:
        server = _Server(f"{short}/{_SOCKET}", get)
    _servers.append(server)
    threading.Thread(target=server.serve_forever, name="inspect-lens-results", daemon=True).start()
    return folder


_held: list[tuple[Path, int]] = []
_servers: list[_Server] = []


@atexit.register
def _end() -> None:
    for folder, lock in _held:
        let_go(folder, lock)


def _forget() -> None:
    """Close what a forked child has of its parent: a server that it keeps would seem to live."""
    for _, lock in _held:
        os.close(lock)
    for server in _servers:
        for connection in (server.socket, *server.connections):
            os.close(connection.detach())
    for kept in _kept.values():
        for connection in kept:
            connection.close()
    for inherited in (_held, _servers, _kept):
        inherited.clear()


os.register_at_fork(after_in_child=_forget)


def fetch_here(handle: str, *, timeout_s: float | None = 60.0) -> memoryview | None:
    """Fetch a tensor's bytes from a server of this user on this host, without HTTP.

    Args:
        handle: from `activations` of an answer, where the transport is `binary`.
        timeout_s: how long to wait for a next piece; None waits for ever.

    Returns:
        `nbytes` bytes in the shape and dtype that stand beside the handle; None where they were
        fetched before, or have expired.

    Raises:
        NotHere: the server runs as another user, or on another host; a `LookupError`. Get
            `/v1/activations/{handle}` from it.
        CaptureError: the server has the handle, and what it stands for did not come.

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
    while True:
        kept = _kept_one(name)
        try:
            connection = kept or _connected(name)
        except OSError:
            raise NotHere(handle) from None
        try:
            _set_timeouts(connection, timeout_s, timeout_s)
            found = _asked(connection, handle)
        except _Closed:
            connection.close()
            if kept is None:
                raise NotHere(handle) from None
            continue  # the server closes those that nobody uses
        except OSError as error:
            # It may have taken the result out of its store, so nobody is asked again.
            connection.close()
            why = str(error)
            if isinstance(error, BlockingIOError):
                why = f"the server on this host gave nothing for {timeout_s:g} s"
            raise CaptureError(f"activations: handle {handle!r}: {why}; ask for it anew") from None
        _keep(name, connection)
        return found


def _kept_one(name: str) -> socket.socket | None:
    with contextlib.suppress(KeyError, IndexError):
        return _kept[name].pop()
    return None


def _keep(name: str, connection: socket.socket) -> None:
    if name not in _kept:
        _close_ended()
    kept = _kept.setdefault(name, [])
    if len(kept) < _CONNECTIONS:
        kept.append(connection)
    else:
        connection.close()


def _close_ended() -> None:
    """Close connections to servers that have ended: their names never come again."""
    for kept in list(_kept.values()):
        for connection in list(kept):
            try:
                connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
            except BlockingIOError:
                continue  # it lives, and has nothing to say
            except OSError:
                pass
            with contextlib.suppress(ValueError):  # another thread has just taken it
                kept.remove(connection)
                connection.close()


def is_here(name: str) -> bool:
    """Whether a process that serves results by this name runs as this user on this host."""
    try:
        _connected(name).close()
    except OSError:
        return False
    return True


class _Closed(OSError):
    """The server ended the connection before it answered."""


def _asked(connection: socket.socket, handle: str) -> memoryview | None:
    try:
        connection.sendall(f"{handle}\n".encode())
        answer = _received(connection, _SIZE.size)
    except (BrokenPipeError, ConnectionResetError):
        raise _Closed from None
    (size,) = _SIZE.unpack(answer)
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


_kept: dict[str, list[socket.socket]] = {}
"""Connections that nobody uses at present, by server."""


def _connected(name: str) -> socket.socket:
    """A connection to a process of this user."""
    if not hasattr(socket, "SO_PEERCRED") or not _NAME.fullmatch(name):
        raise FileNotFoundError(name)
    made = socket.socket(socket.AF_UNIX)
    try:
        _set_timeouts(made, _TIMEOUT_S, _TIMEOUT_S)
        with _short(_folder(name)) as short:
            made.connect(f"{short}/{_SOCKET}")
        _check_user(made)
    except OSError:
        made.close()
        raise
    return made


def _set_timeouts(connection: socket.socket, receive_s: float | None, send_s: float | None) -> None:
    """Have the kernel end what takes too long."""
    # Python's own timeouts let go of the interpreter for each piece that a socket takes.
    for option, seconds in ((socket.SO_RCVTIMEO, receive_s), (socket.SO_SNDTIMEO, send_s)):
        # Nothing at all stands for ever.
        microseconds = 0 if seconds is None else max(int(seconds * 1e6), 1)
        timeval = _TIMEVAL.pack(*divmod(microseconds, 1_000_000))
        connection.setsockopt(socket.SOL_SOCKET, option, timeval)


def _check_user(connection: socket.socket) -> None:
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    if _CREDENTIALS.unpack(found)[1] != os.getuid():
        raise PermissionError("the other end of the socket is another user's")


class _Server(socketserver.ThreadingUnixStreamServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, path: str, get: GetResult) -> None:
        self.get = get
        self.connections: set[socket.socket] = set()
        super().__init__(path, _Connection)

    @override
    def process_request(self, request: Any, client_address: Any) -> None:
        self.connections.add(request)
        super().process_request(request, client_address)

    @override
    def shutdown_request(self, request: Any) -> None:
        self.connections.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: object, client_address: object) -> None:
        logger.warning("inspect_lens: a result could not be given away", exc_info=True)


class _Connection(socketserver.StreamRequestHandler):
    server: _Server

    def handle(self) -> None:
        _set_timeouts(self.connection, _IDLE_S, _TIMEOUT_S)
        # A client that goes, or asks for nothing for long, is no fault.
        with contextlib.suppress(OSError):
            _check_user(self.connection)
            while (line := self.rfile.readline(_LONGEST)).endswith(b"\n"):
                self._give(line.decode("ascii", "replace").rstrip("\n"))

    def _give(self, handle: str) -> None:
        # In a call of its own: what was given is not held until the next one is asked for.
        data = self.server.get(handle)
        size = _SIZE.pack(_GONE if data is None else len(data))
        # In one call: threads that wait for the interpreter twice keep the event loop twice.
        sent = self.connection.sendmsg((size, data or b"")) - len(size)
        if sent < 0:
            raise TimeoutError("the client takes nothing")
        if data is not None and sent < len(data):
            self.connection.sendall(memoryview(data)[sent:])


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
