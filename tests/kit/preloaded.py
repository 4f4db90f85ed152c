"""Starts processes of vLLM as forks of one that has it imported: an import takes eleven seconds.

vLLM on CPUs starts a process for the engine and one for each worker, and a server is one more; each
imports vLLM. Here, Python's own `forkserver` imports it once for a process of tests, and runs
nothing. What it forks starts as with `spawn`: with the environment, the folder and the arguments
of the process that asked. What that one starts in turn is forked below it, so that trees of
processes are those of `spawn`.

Tests of how processes are started and end start theirs as a user does.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import runpy
import socket
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing import (
    context,
    forkserver,
    get_context,
    popen_forkserver,
    resource_tracker,
    spawn,
)
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import psutil

# Not from `repository`, which needs packages that machines for measuring lack.
ROOT = Path(__file__).resolve().parents[2]

__all__ = ["become_server", "forked", "is_possible", "run_forked"]

# Some of them are read when a library is loaded. vLLM sets them for its workers.
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
    "TORCHINDUCTOR_CPP_DYNAMIC_THREADS": "1",
}

# Python's own, which are replaced in some processes.
_SPAWN: Any = spawn
_FORK: Any = forkserver
_PROCESS: Any = context.SpawnProcess
_prepare, _preparation_data = spawn.prepare, spawn.get_preparation_data
_serve_one = _FORK._serve_one


@functools.cache
def is_possible() -> bool:
    """Whether vLLM runs on the CPU here: a GPU's libraries may not survive a fork."""
    import torch

    return torch.version.cuda is None and torch.version.hip is None


@contextlib.contextmanager
def forked() -> Iterator[None]:
    """Fork what is meant to be spawned meanwhile, and what that starts, where it is possible."""
    if not is_possible():
        yield
        return
    _start()
    _fork_in_place_of_spawn()
    try:
        yield
    finally:
        _SPAWN.get_preparation_data = _preparation_data
        _PROCESS._Popen = staticmethod(_spawn)


def run_forked(
    module: str, arguments: Sequence[str], *, environment: Mapping[str, str], log: Path
) -> psutil.Process:
    """Start `python -m module arguments` at the root of this repository.

    Args:
        module: its name.
        arguments: the command line after it.
        environment: of the process.
        log: file for what it prints.
    """
    asked = (module, list(arguments), dict(environment), str(log))
    process = get_context("spawn").Process(target=_run, args=asked)
    with forked():
        process.start()
    return psutil.Process(process.pid)


def _run(module: str, arguments: list[str], environment: dict[str, str], log: str) -> None:
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    _set_environment(environment)
    os.chdir(ROOT)
    folders = environment.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = [folder for folder in folders if folder not in sys.path]
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _spawn(process: BaseProcess) -> Any:
    from multiprocessing.popen_spawn_posix import Popen

    return Popen(process)


def _start() -> None:
    """Start the process that imports, or see that it still runs."""
    before = {name: os.environ.get(name) for name in _ENVIRONMENT}
    os.environ.update(_ENVIRONMENT)
    try:
        forkserver.set_forkserver_preload([f"{__package__}.preload"])
        with contextlib.chdir(ROOT):
            forkserver.ensure_running()
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _fork_in_place_of_spawn() -> None:
    def data(name: str) -> dict[str, Any]:
        return _preparation_data(name) | {"lens_environment": dict(os.environ)}

    _SPAWN.get_preparation_data = data
    _PROCESS._Popen = staticmethod(popen_forkserver.Popen)


def become_server() -> None:
    """In the process that imports: make what it forks behave as what is spawned."""

    def prepare(data: dict[str, Any]) -> None:
        _set_environment(data.pop("lens_environment"))
        _fork_server()
        _prepare(data)

    def serve_one(*args: Any) -> int:
        code = int(_serve_one(*args))
        # The server ends a child at once, without what a process does at its end.
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        return code

    _SPAWN.prepare, _FORK._serve_one = prepare, serve_one
    _fork_in_place_of_spawn()


def _set_environment(environment: Mapping[str, str]) -> None:
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]
    os.environ.update(environment)
    # These are read when libraries are loaded, or once, and that has been done already.
    tempfile.tempdir = None
    if threads := environment.get("OMP_NUM_THREADS"):
        import torch

        torch.set_num_threads(int(threads))
    if cores := environment.get("GOMP_CPU_AFFINITY"):
        os.sched_setaffinity(0, map(int, cores.split()))
    if "PROMETHEUS_MULTIPROC_DIR" in environment:  # several API servers share counters
        from prometheus_client import values as untyped

        values: Any = untyped
        values.ValueClass = values.get_value_class()


def _fork_server() -> None:
    """Fork what will fork for this process, while it has one thread."""
    server = _FORK._forkserver
    with socket.socket(socket.AF_UNIX) as listener:
        # A name without a file.
        listener.bind(f"\0inspect-lens-{os.getpid()}")
        listener.listen()
        alive_r, alive_w = os.pipe()
        if not (pid := os.fork()):
            code = 1
            try:
                _close_all_but(0, 1, 2, listener.fileno(), alive_r)
                forkserver.main(listener.detach(), alive_r, [])
                code = 0
            except SystemExit:
                code = 0
            finally:
                os._exit(code)
        os.close(alive_r)
        server._forkserver_address = listener.getsockname()
    server._forkserver_alive_fd, server._forkserver_pid = alive_w, pid


def _close_all_but(*kept: int) -> None:
    for fd in map(int, os.listdir("/proc/self/fd")):
        if fd not in kept:
            with contextlib.suppress(OSError):
                os.close(fd)
    tracker: Any = resource_tracker
    tracker._resource_tracker._fd = None
