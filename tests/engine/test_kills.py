"""A process of a server that is stopped or killed: what each request gets, and what is left."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.kit.api_server import ApiServer, api_server

pytestmark = pytest.mark.engine

logger = logging.getLogger(__name__)

MODEL = "organism/checkpoint"
LAYERS = 6
STOPPED_S = 3.0
PATIENCE_S = 120.0
"""Of a client, and for processes to end: far longer than either takes on a busy machine. Whoever is
left waiting is left for ever."""


def ask(url: str, *, captures: bool, stream: bool, n: int) -> str:
    """Send a request.

    Returns:
        `whole`: an answer with all that it should have; `short`: an answer without; else what
        went wrong: `broken` connection, no answer in time (`late`), HTTP status, or status in a
        stream.
    """
    body: dict[str, Any] = {"model": MODEL, "prompt": "hello there", "max_tokens": n}
    body |= {"ignore_eos": True, "stream": stream}
    if captures:
        body["inspect_lens"] = {"capture": {"layers": "all"}}
    try:
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=PATIENCE_S)
    except httpx.TimeoutException:
        return "late"
    except httpx.TransportError:
        return "broken"
    if answer.status_code != 200:
        logger.info("%s", answer.text[:300])
        return f"HTTP {answer.status_code}"
    if stream:
        lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
        errors = [json.loads(line) for line in lines if line.startswith('{"error"')]
        if errors:
            return f"stream {errors[0]['error']['code']}"
        if lines[-1] != "[DONE]":
            return "broken"
        found = [json.loads(line) for line in lines[:-1]]
    else:
        found = [answer.json()]
    if not captures:
        return "whole"
    receipts = [one["inspect_lens"] for one in found if "inspect_lens" in one]
    is_whole = bool(receipts) and receipts[-1]["capture"]["rows"] == LAYERS * (
        receipts[-1]["n_prompt"] + n - 1
    )
    return "whole" if is_whole else "short"


KINDS = [(captures, stream) for captures in (True, False) for stream in (True, False)] * 2


OPTIONS = {
    "model": MODEL,
    "dtype": "float32",
    "kv_cache_memory_bytes": 64 << 20,
    "api_server_count": 2,
    "distributed_executor_backend": "mp",  # the worker is a process of its own
    "enforce_eager": True,
}


@pytest.mark.nightly(
    held_by="tests/engine/test_api_servers.py::test_a_worker_that_is_killed",
    why="a server of five processes for each role",
)
@pytest.mark.parametrize("role", ["ApiServer_0", "EngineCore"])
def test_a_process_of_the_server(role: str, tmp_path: Path) -> None:
    with (
        # Addresses of sockets lie there, and have to be short.
        tempfile.TemporaryDirectory(prefix="kill-") as temporary,
        api_server(
            OPTIONS, environment=os.environ | {"TMPDIR": temporary}, log=tmp_path / "log"
        ) as server,
    ):
        stop_and_kill(role, server, tmp_path / "log", Path(temporary))


@pytest.mark.nightly(
    held_by=(
        "tests/unit/engine/protocol/test_with_parent.py::"
        "test_an_engine_ends_with_the_process_that_started_it_and_nothing_else_does"
    ),
    why="a server of three processes",
)
def test_the_only_api_server(tmp_path: Path) -> None:
    options = {key: value for key, value in OPTIONS.items() if key != "api_server_count"}
    with (
        tempfile.TemporaryDirectory(prefix="kill-") as temporary,
        api_server(
            options, environment=os.environ | {"TMPDIR": temporary}, log=tmp_path / "log"
        ) as server,
    ):
        below = psutil.Process(server.pid).children(recursive=True)
        assert len(below) >= 2, "an engine and a worker"
        assert ask(server.url, captures=True, stream=False, n=8) == "whole"
        os.kill(server.pid, signal.SIGKILL)
        _, alive = psutil.wait_procs(below, timeout=PATIENCE_S)
        assert not alive, alive
        assert not list(Path(temporary).glob(".inspect-lens-tmp-*"))


@pytest.mark.nightly(
    held_by=(
        "tests/unit/engine/protocol/test_arena.py::"
        "test_the_memory_has_no_name_and_goes_with_its_holders"
    ),
    why="a server in a file system of its own",
)
@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("unshare"), reason="needs a namespace")
@pytest.mark.parametrize("is_used", [False, True], ids=["at the first request", "later"])
def test_a_full_dev_shm(tmp_path: Path, is_used: bool) -> None:
    """vLLM's own segments lie there; it ends at the first page of theirs that has no room."""
    own = 'mount -t tmpfs -o size=500m tmpfs /dev/shm && exec "$@"'
    options = {key: value for key, value in OPTIONS.items() if key != "api_server_count"}
    with api_server(
        options,
        environment=os.environ,
        log=tmp_path / "log",
        inside=["unshare", "-m", "bash", "-c", own, "bash"],
    ) as server:
        tree = [psutil.Process(server.pid), *psutil.Process(server.pid).children(recursive=True)]
        if is_used:
            assert ask(server.url, captures=True, stream=False, n=8) == "whole"
        fill = ["nsenter", "-t", str(server.pid), "-m", "dd", "if=/dev/zero", "of=/dev/shm/full"]
        assert subprocess.run([*fill, "bs=1M"], capture_output=True, check=False).returncode
        answer = ask(server.url, captures=True, stream=False, n=200)
        if is_used:
            assert answer == "whole", "pages that were touched before are there"
            return
        assert answer in ("HTTP 500", "broken")
        _, alive = psutil.wait_procs(tree, timeout=PATIENCE_S)
        assert not [one for one in alive if one.status() != psutil.STATUS_ZOMBIE]


def stop_and_kill(role: str, server: ApiServer, log: Path, temporary: Path) -> None:
    """Stop a process under load, let it go on, then kill it.

    Args:
        role: of the process, as the log names it.
        server: with `OPTIONS`; it has ended afterwards.
        log: of the server.
        temporary: where the server keeps files of a while.
    """
    tree = [psutil.Process(server.pid), *psutil.Process(server.pid).children(recursive=True)]
    named = re.findall(rf"\({role} pid=(\d+)\)", log.read_text(errors="replace"))
    (victim,) = [process for process in tree if str(process.pid) in named]
    with ThreadPoolExecutor(len(KINDS)) as pool:

        def begin(n: int) -> list[Any]:
            asked = [
                pool.submit(ask, server.url, captures=captures, stream=stream, n=n)
                for captures, stream in KINDS
            ]
            time.sleep(0.5)
            return asked

        # Stopped for a while: everybody waits, and nobody loses anything.
        asked = begin(200)
        os.kill(victim.pid, signal.SIGSTOP)
        time.sleep(STOPPED_S)
        os.kill(victim.pid, signal.SIGCONT)
        assert {one.result() for one in asked} == {"whole"}, role

        # It stands still before they begin, so that none of them ends before it, however fast.
        os.kill(victim.pid, signal.SIGSTOP)
        asked = begin(900)
        assert not any(one.done() for one in asked)
        began = time.monotonic()
        victim.kill()
        answers = [one.result() for one in asked]
        learned_s = time.monotonic() - began
        _, alive = psutil.wait_procs(tree, timeout=PATIENCE_S)
        ended_s = time.monotonic() - began
        logger.info("%s: %s; %.1f s, end %.1f s", role, sorted(answers), learned_s, ended_s)
        assert not {"whole", "short", "late"} & set(answers)
        assert not alive, alive
        _nothing_is_left(temporary)


def _nothing_is_left(folder: Path) -> None:
    """Nobody holds a folder of ours: the next server to start removes what a killed one left."""
    for path in folder.glob(".inspect-lens-tmp-*"):
        held = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        finally:
            os.close(held)
