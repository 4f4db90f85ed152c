"""Results of the binary transport that wait in another API server of the same engine.

A client fetches a handle over whatever connection it has, and that may end in another process than
the one that made the handle. It cannot choose which: an idle process may take all connections
that come while the others work. So each server hands its payloads to its siblings, over a socket
in the folder that they share.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import socketserver
import struct
import threading
from collections.abc import Iterator
from pathlib import Path

from .payloads import PayloadStore

__all__ = ["ask_sibling", "fetch_payload", "open_door"]

logger = logging.getLogger("vllm.inspect_lens")

_SIZE = struct.Struct("<q")
_GONE = -1
_LONGEST = 256
_TIMEOUT_S = 60.0


def open_door(folder: Path, payloads: PayloadStore) -> None:
    """Hand payloads of this process to whoever asks in a folder, for the life of the process.

    Args:
        folder: which only siblings can enter.
        payloads: of this process.
    """

    class Handler(socketserver.StreamRequestHandler):
        timeout = _TIMEOUT_S

        def handle(self) -> None:
            data = payloads.get(self.rfile.readline(_LONGEST).decode("ascii", "replace").strip())
            self.wfile.write(_SIZE.pack(_GONE if data is None else len(data)))
            if data is not None:
                self.wfile.write(data)

    class Server(socketserver.ThreadingUnixStreamServer):
        daemon_threads = True
        request_queue_size = 128

        def handle_error(self, request: object, client_address: object) -> None:
            logger.warning("inspect_lens: another API server gave up a payload", exc_info=True)

    with _short(folder) as short:
        server = Server(f"{short}/{payloads.name}.sock", Handler)
    threading.Thread(target=server.serve_forever, name="inspect-lens-door", daemon=True).start()


async def fetch_payload(
    handle: str, payloads: PayloadStore, folder: Path | None
) -> bytes | memoryview | None:
    """What waits under a handle, in this process or in another API server of the engine.

    Args:
        handle: what a client has.
        payloads: of this process.
        folder: that the servers share, where there are several.

    Returns:
        The payload; None where it has expired.

    Raises:
        LookupError: none of these processes made the handle.
    """
    if payloads.made(handle):
        return payloads.get(handle)
    if folder is None:
        raise LookupError(handle)
    return await asyncio.get_running_loop().run_in_executor(None, ask_sibling, folder, handle)


def ask_sibling(folder: Path, handle: str) -> bytes | None:
    """Fetch a payload from the process that made its handle.

    Args:
        folder: of `open_door`.
        handle: of another process.

    Returns:
        The payload; None where it has expired.

    Raises:
        LookupError: no process of these made the handle.
    """
    maker = handle.partition("-")[0]
    if not maker.isalnum() or not handle.isascii() or len(handle) >= _LONGEST:
        raise LookupError(handle)
    with socket.socket(socket.AF_UNIX) as door:
        door.settimeout(_TIMEOUT_S)
        try:
            with _short(folder) as short:
                door.connect(f"{short}/{maker}.sock")
        except OSError:
            raise LookupError(handle) from None
        door.sendall(f"{handle}\n".encode())
        with door.makefile("rb") as answer:
            (size,) = _SIZE.unpack(answer.read(_SIZE.size))
            if size == _GONE:
                return None
            data = answer.read(size)
    if len(data) != size:
        raise ConnectionError(f"{maker} sent {len(data)} of {size} bytes")
    return data


@contextlib.contextmanager
def _short(folder: Path) -> Iterator[str]:
    """A path of a folder that leaves room for a name: those of sockets have 107 characters."""
    own = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{own}"
    finally:
        os.close(own)
