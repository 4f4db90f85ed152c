"""A server ends with the process that started it, however that one ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from inspect_lens._engine.protocol import processes
from inspect_lens._vllm import plugin

SERVER = """
import os, signal, subprocess, sys, time
from inspect_lens._engine.protocol import processes
processes._POLL_S, processes._GRACE_S = 0.05, 0.5
if {deaf}:
    signal.signal(signal.SIGTERM, lambda *_: None)
sleeper = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(120)"
below = subprocess.Popen([sys.executable, "-c", sleeper], stdout=subprocess.DEVNULL)
processes.end_with({parent})
print(os.getpid(), below.pid, flush=True)
time.sleep(120)
"""
CLIENT = """
import os, subprocess, sys, time
source = {server!r}.replace("PARENT", str(os.getpid()))
subprocess.Popen([sys.executable, "-c", source])
time.sleep(120)
"""


@pytest.fixture
def started() -> Iterator[list[psutil.Process]]:
    found: list[psutil.Process] = []
    yield found
    for process in found:
        if process.is_running():
            process.kill()


def start(source: str, started: list[psutil.Process]) -> subprocess.Popen[str]:
    """A process in which, or below which, a server starts; `started` gets all of them."""
    client = subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE, text=True)
    started.append(psutil.Process(client.pid))
    assert client.stdout is not None
    numbers = client.stdout.readline().split()
    started += [psutil.Process(int(number)) for number in numbers if int(number) != client.pid]
    return client


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.parametrize("deaf", [False, True])
def test_a_server_and_what_it_started_end_with_their_parent(
    started: list[psutil.Process], number: int, deaf: bool
) -> None:
    source = SERVER.format(deaf=deaf, parent="PARENT")
    client = start(CLIENT.format(server=source), started)
    server, below = started[1:]
    with pytest.raises(psutil.TimeoutExpired):
        server.wait(0.3)
    assert below.is_running(), "while the parent lives"
    os.kill(client.pid, number)
    client.wait(10)
    # Neither is a child of this process, so they are gone when they have been waited for.
    assert psutil.wait_procs([server, below], timeout=20)[1] == []


ENGINE = """
import multiprocessing, os, sys, time
from inspect_lens._engine.protocol import processes
processes._POLL_S, processes._GRACE_S = 0.05, 0.5

def run(pipe):
    parent = os.getppid()
    if {is_late}:
        pipe.send(os.getpid())
        while os.getppid() == parent:
            time.sleep(0.05)
    processes.end_engine_with_parent()
    if not {is_late}:
        pipe.send(os.getpid())
    time.sleep(120)

if __name__ == "__main__":
    context = multiprocessing.get_context({method!r})
    ends = [context.Pipe() for _ in {names!r}]
    for (_, end), name in zip(ends, {names!r}):
        context.Process(target=run, name=name, args=(end,)).start()
    print(*[end.recv() for end, _ in ends], flush=True)
    time.sleep(120)
"""


@pytest.mark.parametrize("is_late", [False, True], ids=["running", "starting"])
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_an_engine_ends_with_the_process_that_started_it_and_nothing_else_does(
    started: list[psutil.Process], method: str, is_late: bool, tmp_path: Path
) -> None:
    program = tmp_path / "program.py"
    names = ["EngineCore", "EngineCore_DP1", "mine"]
    program.write_text(ENGINE.format(method=method, names=names, is_late=is_late))
    source = f"import runpy; runpy.run_path({str(program)!r}, run_name='__main__')"
    client = start(source, started)
    *engines, other = started[1:]
    with pytest.raises(psutil.TimeoutExpired):
        engines[0].wait(0.3)
    os.kill(client.pid, signal.SIGKILL)
    client.wait(10)
    assert psutil.wait_procs(engines, timeout=20)[1] == []
    assert other.is_running(), "what a user starts is his"


def test_a_parent_that_has_gone_before_counts(started: list[psutil.Process]) -> None:
    start(SERVER.format(deaf=True, parent=2**22 + 1), started)
    assert psutil.wait_procs(started, timeout=20)[1] == []


@pytest.mark.parametrize("is_server", [True, False])
def test_of_all_processes_of_vllm_the_server_alone_looks_at_its_parent(
    monkeypatch: pytest.MonkeyPatch, is_server: bool
) -> None:
    ended: list[int] = []
    monkeypatch.setattr(processes, "end_with", ended.append)
    # vLLM starts its engines and workers with multiprocessing.
    monkeypatch.setattr(plugin, "parent_process", lambda: None if is_server else object())
    monkeypatch.setenv("INSPECT_LENS_PARENT", "123")
    monkeypatch.setenv("INSPECT_LENS_DISABLE", "1")
    plugin.register()
    assert ended == ([123] if is_server else [])
    assert ("INSPECT_LENS_PARENT" in os.environ) is not is_server
