"""The sending half of a worker, in a process of its own that counts as another host."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from inspect_lens._engine.export import link as link_module
from inspect_lens._engine.export.link import Link
from inspect_lens._engine.protocol import messages
from inspect_lens._engine.protocol.messages import ArenaWriter, Block, Failure, encode
from inspect_lens._engine.protocol.processes import Links

__all__ = ["FarWorker", "block_bytes", "block_of"]

CHUNK = 1000
"""Bytes of a frame, so that blocks of a few kilobytes take several."""


def block_bytes(seed: int, nbytes: int) -> np.ndarray[Any, Any]:
    """What lies in a block."""
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


def block_of(arena: ArenaWriter, seq: int, offset: int, floats: int, *, stream: int = 0) -> Block:
    """The message about rows that lie in a worker's memory.

    Args:
        arena: the memory.
        seq: number of the block.
        offset: where it lies, in bytes.
        floats: how many numbers of 32 bits it has.
        stream: whose rows they are.
    """
    return Block(
        worker=arena.name,
        reader=0,
        seq=seq,
        offset=offset,
        shape=(1, floats, 1),
        dtype="float32",
        stream=stream,
        tap=0,
        path="eager",
        numbers=b"",
        counts=b"",
        first=b"",
        listed={},
    )


class _Half:
    """A worker's memory and its link."""

    def __init__(self, address: str, links: Links, nbytes: int) -> None:
        self.arena = ArenaWriter(nbytes)
        self.link = Link(address, self.arena, "reply", links)
        self.seq = 0
        self.placed = 0

    def put(self, data: bytes, message: Any) -> bool:
        return self.link.put(data, message)

    def block(self, seed: int, floats: int) -> bool:
        """Send a block; False where the front-end stands still."""
        self.seq += 1
        offset = self.arena.place(self.seq, "reply", 4 * floats)
        if offset is None:
            return False
        self.placed = max(self.placed, self.arena.bytes_in_use)
        self.arena.view.data[offset : offset + 4 * floats] = block_bytes(seed, 4 * floats)
        self.arena.view.landed[0] = self.seq
        block = block_of(self.arena, self.seq, offset, floats, stream=seed)
        return self.put(encode(block), block)

    def message(self, seed: int, nbytes: int) -> bool:
        """Send a message that is so large."""
        failure = Failure(str(seed), "CaptureError", "x" * nbytes)
        return self.put(encode(failure), failure)


def _serve(pipe: Connection, patches: dict[str, Any]) -> None:
    link_module.CHUNK = CHUNK
    for name, value in patches.items():
        setattr(link_module if hasattr(link_module, name) else messages, name, value)
    half: _Half | None = None
    while (order := pipe.recv()) is not None:
        name, arguments = order
        if name == "begin":
            half = _Half(*arguments)
            pipe.send(half.arena.name)
            continue
        assert half is not None
        if name == "send":
            pipe.send([getattr(half, kind)(seed, size) for kind, seed, size in arguments[0]])
        elif name == "alive":
            until = time.monotonic() + arguments[0]
            while half.link.is_alive() and time.monotonic() < until:
                time.sleep(0.01)
            pipe.send(half.link.is_alive())
        elif name == "board":
            half.arena.view.board[: len(arguments[0])] = arguments[0]
            pipe.send(None)
        elif name == "held":
            pipe.send((half.placed, half.arena.bytes_in_use, half.arena.waited_s))
        elif name == "end":
            half.link.close()
            half.arena.close()
            pipe.send(None)


class FarWorker:
    """Starts the process, and tells it what to do."""

    def __init__(self, **patches: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, other = context.Pipe()
        self.process = context.Process(target=_serve, args=(other, patches), daemon=True)
        self.process.start()

    @property
    def pid(self) -> int:
        """Of the process."""
        assert self.process.pid is not None
        return self.process.pid

    def ask(self, name: str, *arguments: Any) -> Any:
        """Do something, and wait until it is done."""
        self.tell(name, *arguments)
        assert self.pipe.poll(60), f"no answer to {name}"
        return self.pipe.recv()

    def tell(self, name: str, *arguments: Any) -> None:
        """Do something; the answer lies in `pipe`."""
        self.pipe.send((name, arguments))

    def begin(self, address: str, links: Links, nbytes: int = 1 << 16) -> str:
        """Connect; returns the name of the memory."""
        return str(self.ask("begin", address, links, nbytes))

    def send(self, orders: Sequence[tuple[str, int, int]]) -> list[bool]:
        """Send some of ("block" or "message", seed, size), in this order."""
        return list(self.ask("send", orders))

    def close(self) -> None:
        """End the process."""
        if self.process.is_alive():
            self.process.kill()
        self.process.join(10)
