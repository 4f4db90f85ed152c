"""What it takes to fetch a result from an API server, by HTTP and from the same host.

    python -m tests.kit.fetch_times

prints microseconds for one result: of the server's event loop, of its whole process, and of the
client. No model runs: the application has the routes of the lens between as many others as vLLM's.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import urllib3

from inspect_lens.client import fetch_here

ROWS, WIDTH = 149, 4096
"""One layer of 150 tokens in bfloat16, 1.2 MB."""
FETCHES, ROUNDS, THREADS = 200, 5, 8
_OTHER_ROUTES = 60


def serve(port: int) -> None:
    """Run a server until it is ended."""
    import uvicorn
    from fastapi import FastAPI
    from prometheus_fastapi_instrumentator import Instrumentator

    from inspect_lens._vllm.http import server
    from inspect_lens._vllm.http.bodies import payloads

    app = FastAPI()

    async def nothing() -> dict[str, str]:
        return {}

    async def cpu() -> list[float]:
        return [time.thread_time(), time.process_time()]

    async def make() -> list[str]:
        return [payloads.put(np.zeros(2 * ROWS * WIDTH, np.uint8).data) for _ in range(FETCHES)]

    for i in range(_OTHER_ROUTES):
        app.add_api_route(f"/v1/other{i}", nothing)
    app.add_api_route("/cpu", cpu)
    app.add_api_route("/make", make)
    Instrumentator().instrument(app)
    server._routers((), lambda app: None)(app)
    payloads.serve(is_needed=True)
    uvicorn.run(app, port=port, log_level="warning")


def main() -> None:
    """Print what each way takes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    code = f"from tests.kit.fetch_times import serve; serve({port})"
    server = subprocess.Popen([sys.executable, "-c", code], env=os.environ)
    try:
        _wait(url)
        pool = urllib3.PoolManager(maxsize=THREADS)
        ways: dict[str, Callable[[str], Any]] = {
            "HTTP": lambda handle: pool.request("GET", f"{url}/v1/activations/{handle}").data,
            "same host": fetch_here,
        }
        sys.stdout.write("| way | event loop | server | client |\n|---|---|---|---|\n")
        for name, way in ways.items():
            runs = [_run(url, way) for _ in range(ROUNDS)]
            found = [round(statistics.median(column)) for column in zip(*runs, strict=True)]
            sys.stdout.write(f"| {name} | {found[0]} µs | {found[1]} µs | {found[2]} µs |\n")
    finally:
        server.terminate()
        server.wait()


def _run(url: str, way: Callable[[str], Any]) -> Sequence[float]:
    handles = _get(f"{url}/make")
    loop, process = _get(f"{url}/cpu")
    own = time.process_time()
    with ThreadPoolExecutor(THREADS) as threads:
        sizes = {len(data) for data in threads.map(way, handles)}
    own = time.process_time() - own
    assert sizes == {2 * ROWS * WIDTH}
    after = _get(f"{url}/cpu")
    return [1e6 * took / FETCHES for took in (after[0] - loop, after[1] - process, own)]


def _wait(url: str) -> None:
    until = time.monotonic() + 120
    while True:
        try:
            _get(f"{url}/cpu")
        except OSError:
            if time.monotonic() > until:
                raise
            time.sleep(0.2)
        else:
            return


def _get(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=60) as answer:
        return json.loads(answer.read())


if __name__ == "__main__":
    main()
