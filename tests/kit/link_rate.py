"""What rows from another host cost: seconds of a CPU for a gigabyte, with and without encryption.

`python -m tests.kit.link_rate` sends rows from one process to another over the connection that
workers of other hosts have, and prints JSON. Seconds of a CPU do not depend on what else runs.
"""

from __future__ import annotations

import json
import multiprocessing
import platform
import tempfile
import time
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import psutil
import typer
import zmq

from inspect_lens._engine.collect.listener import Listener
from inspect_lens._engine.export.link import Link
from inspect_lens._engine.protocol.messages import ArenaWriter, Block, decode, encode
from inspect_lens._engine.protocol.processes import Links

from .far_worker import block_of

FLOATS = 4 << 20
"""Of a step: 1,000 rows of 8,192 numbers in 16 bits."""
NBYTES = 4 * FLOATS
LINKS = Links(
    address="127.0.0.1",
    key="a secret of two hosts",
    timeout_s=60.0,
    most_bytes=1 << 30,
    most_message=1 << 20,
)


def _send(address: str, links: Links, steps: int, pipe: Connection) -> None:
    arena = ArenaWriter(16 * NBYTES)
    link = Link(address, arena, "reply", links)
    pipe.recv()
    began = time.process_time()
    for seq in range(1, steps + 1):
        offset = arena.place(seq, "reply", NBYTES)
        assert offset is not None, "the other end stands still"
        arena.view.landed[0] = seq
        block = block_of(arena, seq, offset, FLOATS)
        while not link.put(encode(block), block):
            link.wait(1.0)
    pipe.recv()
    pipe.send(time.process_time() - began)
    link.close()
    arena.close()


def measured(links: Links, steps: int) -> dict[str, float]:
    """Send so many steps' rows.

    Returns:
        Gigabytes per second here, and seconds of a CPU for a gigabyte at either end.
    """
    context = zmq.Context()
    with tempfile.TemporaryDirectory(prefix="link-", dir="/tmp") as folder:
        socket: Any = context.socket(zmq.PULL)
        socket.bind(f"ipc://{folder}/rows")
        listener = Listener(
            links,
            f"ipc://{folder}/rows",
            lost=lambda mirror, why: None,
            told=lambda: None,
            came=lambda: None,
        )
        pipe, other = multiprocessing.Pipe()
        spawn = multiprocessing.get_context("spawn")
        worker = spawn.Process(target=_send, args=(listener.address, links, steps, other))
        worker.start()
        pipe.send("begin")
        began = used = 0.0
        for step in range(steps):
            message = decode(socket.recv())
            assert isinstance(message, Block)
            mirror = listener.mirror(message.worker)
            assert mirror is not None
            mirror.done(message.reader, message.seq)
            if not step:  # before it, the process starts and the ends shake hands
                began, used = time.monotonic(), time.process_time()
        seconds, mine = time.monotonic() - began, time.process_time() - used
        pipe.send("end")
        theirs = float(pipe.recv())
        worker.join(20)
        listener.close()
        context.destroy(linger=0)
    gigabytes = steps * NBYTES / 1e9
    return {
        "gigabytes_per_second": round((steps - 1) / steps * gigabytes / seconds, 3),
        "worker_cpu_seconds_per_gigabyte": round(theirs / gigabytes, 2),
        "front_end_cpu_seconds_per_gigabyte": round(mine * steps / (steps - 1) / gigabytes, 2),
    }


def main(steps: int = 60) -> None:
    """Print what both kinds of connection cost."""
    found = {
        "command": f"python -m tests.kit.link_rate --steps {steps}",
        "machine": {
            "cores": psutil.cpu_count(),
            "python": platform.python_version(),
            "zmq": zmq.zmq_version(),
            "load_average": psutil.getloadavg()[0],
        },
        "encrypted": measured(LINKS, steps),
        "open": measured(replace(LINKS, key=""), steps),
    }
    typer.echo(json.dumps(found, indent=2))


if __name__ == "__main__":
    typer.run(main)
