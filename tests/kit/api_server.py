"""vLLM's API server as a process below this one."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from .child import ROOT, ChildError, ends_with_this
from .preloaded import is_possible, run_forked

__all__ = ["ApiServer", "api_server", "flags", "preemptions", "total"]

START_CPU_S = 570.0
"""Seconds of a core that a start may take. A loaded machine takes longer to give them, not more."""
STILL_S = 120.0
"""Seconds in which a start that takes no second of a core is taken to hang."""
STOP_S = 30.0


@dataclass(frozen=True)
class ApiServer:
    """A server that is healthy."""

    url: str
    pid: int


@contextlib.contextmanager
def api_server(
    options: Mapping[str, Any],
    *,
    environment: Mapping[str, str],
    log: Path,
    preloaded: bool = False,
    inside: Sequence[str] = (),
) -> Iterator[ApiServer]:
    """Start a server at the root of this repository, and end it with all that it started.

    Args:
        options: of the engine and of the server, by Python's names.
        environment: of the server.
        log: file for what it prints.
        preloaded: whether its processes are forked from one that has vLLM imported, for servers
            of which only answers are tested.
        inside: words of a command that runs another one, such as `unshare -m`.

    Yields:
        The server, once it is healthy.

    Raises:
        ChildError: it ended, hangs, or took too much of a core.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    module = "vllm.entrypoints.openai.api_server"
    if "api_server_count" in options:
        module = "tests.kit.serve_several"  # the other one starts one in any case
    arguments = flags({**options, "host": "127.0.0.1", "port": port})
    is_forked = preloaded and is_possible()
    start = run_forked if is_forked else partial(_run, inside=inside)
    process = start(module, arguments, environment=environment, log=log)
    with contextlib.ExitStack() as stack:
        if not is_forked:
            stack.enter_context(ends_with_this(process.pid))
        stack.callback(_end, process)
        url = f"http://127.0.0.1:{port}"
        _wait_until_ready(process, url, log)
        yield ApiServer(url, process.pid)


def _run(
    module: str,
    arguments: Sequence[str],
    *,
    environment: Mapping[str, str],
    log: Path,
    inside: Sequence[str] = (),
) -> psutil.Process:
    with log.open("wb") as output:
        command = [*inside, sys.executable, "-m", module, *arguments]
        # A server that is ended from outside may be one without the plug-in, which watches nobody.
        return psutil.Popen(
            command,
            cwd=ROOT,
            env=dict(environment),
            stdout=output,
            stderr=output,
            start_new_session=True,
        )


def flags(options: Mapping[str, Any]) -> list[str]:
    """Options as a server's command line; what is False is left out."""
    words: list[str] = []
    for key, value in options.items():
        name = "--" + key.replace("_", "-")
        text = json.dumps(value) if isinstance(value, dict | list) else str(value)
        words += [name] if value is True else [] if value is False else [name, text]
    return words


def preemptions(metrics: str) -> int:
    """Pre-emptions since a server's start, of all its engines.

    Args:
        metrics: text of its route `/metrics`.
    """
    return int(total(metrics, "vllm:num_preemptions_total"))


def total(metrics: str, name: str) -> float:
    """A metric of a server, added up over all its engines; 0 where it has none.

    Args:
        metrics: text of its route `/metrics`.
        name: as it stands there.
    """
    found = re.findall(rf"^{name}(?:\{{[^}}]*\}})? (\S+)$", metrics, re.MULTILINE)
    return sum(float(value) for value in found)


def _wait_until_ready(process: psutil.Process, url: str, log: Path) -> None:
    spent, last, moved = 0.0, 0.0, time.monotonic()
    while _runs(process) and spent < START_CPU_S and time.monotonic() - moved < STILL_S:
        with contextlib.suppress(OSError):
            if urllib.request.urlopen(f"{url}/health", timeout=2).status == 200:
                return
        time.sleep(0.5)
        now = _cpu_s(process)
        if abs(now - last) >= 1.0:  # less where one of them has ended
            spent, last, moved = spent + max(now - last, 0.0), now, time.monotonic()
    raise ChildError(f"the server did not start:\n{log.read_text(errors='replace')[-3000:]}")


def _cpu_s(process: psutil.Process) -> float:
    """Seconds of a core that a process and those below it have taken."""
    found = 0.0
    with contextlib.suppress(psutil.NoSuchProcess):
        for one in (process, *process.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                found += sum(one.cpu_times()[:2])
    return found


def _runs(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _end(process: psutil.Process) -> None:
    below: list[psutil.Process] = []
    with contextlib.suppress(psutil.NoSuchProcess):
        below = process.children(recursive=True)
    for end in (process.terminate, process.kill):
        with contextlib.suppress(psutil.NoSuchProcess, psutil.TimeoutExpired):
            end()
            process.wait(timeout=STOP_S)
    # A server that was ended in order has taken them with it.
    for child in below:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
    psutil.wait_procs(below, timeout=STOP_S)
