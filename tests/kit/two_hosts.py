"""A second host on this machine: namespaces of network, processes, mounts and IPC of its own.

The first host is the machine as it is. They share the files of the disk, and nothing else: no
shared memory, no process that one sees of the other, and one wire between them.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from .api_server import ApiServer, api_server, flags
from .child import ROOT

__all__ = ["FIRST", "SECOND", "TwoHosts", "two_hosts", "why_not"]

FIRST, SECOND = "10.213.77.1", "10.213.77.2"
_WIRES = f"lens-a{os.getpid()}", f"lens-b{os.getpid()}"
_SPACE = f"lens-{os.getpid()}"
_OWN_MEMORY = 'mount -t tmpfs tmpfs /dev/shm && exec "$@"'


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=20)


def why_not() -> str | None:
    """Why there can be no second host here, or None."""
    if os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("unshare"):
        return "namespaces need root, ip and unshare"
    try:
        _ip("netns", "add", f"{_SPACE}-try")
        _ip("netns", "delete", f"{_SPACE}-try")
        subprocess.run(["unshare", "-m", "-i", "-p", "-f", "true"], check=True, timeout=20)
    except (subprocess.SubprocessError, OSError) as error:
        return f"namespaces cannot be made: {error}"
    return None


class TwoHosts:
    """Starts servers over both hosts."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def run_on_second(
        self, options: Mapping[str, Any], environment: Mapping[str, str], log: Path
    ) -> subprocess.Popen[bytes]:
        """Start a headless server on the second host."""
        program = ["-m", "tests.kit.serve_several", *flags({**options, "headless": True})]
        return self.start_on_second(program, environment, log)

    def start_on_second(
        self, program: Sequence[str], environment: Mapping[str, str], log: Path
    ) -> subprocess.Popen[bytes]:
        """Start a program of Python on the second host."""
        inside = ["unshare", "-m", "-i", "-p", "-f", "--mount-proc", "--kill-child"]
        inside += ["bash", "-c", _OWN_MEMORY, "second", sys.executable]
        own = {"VLLM_HOST_IP": SECOND, "GLOO_SOCKET_IFNAME": _WIRES[1]}
        with log.open("wb") as output:
            return subprocess.Popen(
                ["ip", "netns", "exec", _SPACE, *inside, *program],
                cwd=ROOT,
                env={**environment, **own},
                stdout=output,
                stderr=output,
            )

    def own_of_first(self) -> dict[str, str]:
        """What processes of the first host have in their environment, and others have not."""
        return {"VLLM_HOST_IP": FIRST, "GLOO_SOCKET_IFNAME": _WIRES[0]}

    def pids_of_second(self) -> list[int]:
        """Processes that run on the second host."""
        found = subprocess.run(
            ["ip", "netns", "pids", _SPACE], check=True, capture_output=True, text=True, timeout=20
        )
        return list(map(int, found.stdout.split()))

    def cut_power(self) -> None:
        """End all that runs on the second host, without a word."""
        deadline = time.monotonic() + 20
        while (pids := self.pids_of_second()) and time.monotonic() < deadline:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)

    def cut_wire(self) -> None:
        """Lose every packet between the hosts; nobody is told."""
        _ip("-n", _SPACE, "link", "set", _WIRES[1], "down")

    @contextlib.contextmanager
    def server(
        self,
        first: Mapping[str, Any],
        second: Mapping[str, Any],
        environment: Mapping[str, str],
    ) -> Iterator[ApiServer]:
        """An engine over both hosts; the API server runs on the first.

        Args:
            first: options of the first host.
            second: of the second.
            environment: of both.
        """
        own = self.own_of_first()
        far = self.run_on_second(second, environment, self.folder / "second.log")
        try:
            with api_server(
                {**first, "api_server_count": 1},
                environment={**environment, **own},
                log=self.folder / "first.log",
            ) as made:
                yield made
        finally:
            self.cut_power()
            far.wait(timeout=20)


@contextlib.contextmanager
def two_hosts(folder: Path) -> Iterator[TwoHosts]:
    """Have a second host for a while.

    Args:
        folder: for logs.
    """
    _ip("netns", "add", _SPACE)
    made = TwoHosts(folder)
    try:
        _ip("link", "add", _WIRES[0], "type", "veth", "peer", "name", _WIRES[1], "netns", _SPACE)
        _ip("address", "add", f"{FIRST}/24", "dev", _WIRES[0])
        _ip("-n", _SPACE, "address", "add", f"{SECOND}/24", "dev", _WIRES[1])
        _ip("link", "set", _WIRES[0], "up")
        _ip("-n", _SPACE, "link", "set", _WIRES[1], "up")
        _ip("-n", _SPACE, "link", "set", "lo", "up")
        yield made
    finally:
        made.cut_power()
        # Now: with its other end it would go when the last socket there has.
        with contextlib.suppress(subprocess.CalledProcessError):
            _ip("link", "delete", _WIRES[0])
        _ip("netns", "delete", _SPACE)
