"""Workers that Ray places on two hosts: results as of one host, to the bit."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.engine.test_hosts import (
    COMMON,
    ENVIRONMENT,
    Answer,
    ask_all,
    check_same,
    client_of,
    free_port,
    on_one_host,
    register,
)
from tests.kit.api_server import api_server
from tests.kit.child import ROOT
from tests.kit.ray_on_cpu import ray_environment, why_no_ray
from tests.kit.two_hosts import FIRST, SECOND, TwoHosts, two_hosts, why_not

__all__ = ["on_one_host"]

WHY_NOT = why_no_ray() or why_not()
pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT)),
]
START_S = 90.0


@contextlib.contextmanager
def cluster(hosts: TwoHosts, environment: Mapping[str, str], folder: str) -> Iterator[str]:
    """A node of Ray on each host, with a place for one worker; yields the cluster's address."""
    address = f"{FIRST}:{free_port()}"
    node = ["-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats"]
    head = [*node, "--head", f"--port={address.rpartition(':')[2]}", f"--temp-dir={folder}"]
    head += [f"--node-ip-address={FIRST}", "--include-dashboard=false"]
    other = [*node, f"--address={address}", f"--node-ip-address={SECOND}"]
    with (hosts.folder / "head.log").open("wb") as log:
        first = subprocess.Popen(
            [sys.executable, *head],
            cwd=ROOT,
            env={**environment, **hosts.own_of_first()},
            stdout=log,
            stderr=log,
        )
    second = hosts.start_on_second(other, environment, hosts.folder / "node.log")
    try:
        wait_for_nodes(address, environment, first)
        yield address
    finally:
        first.terminate()
        first.wait(30)
        hosts.cut_power()
        second.wait(20)


def wait_for_nodes(
    address: str, environment: Mapping[str, str], head: subprocess.Popen[bytes]
) -> None:
    look = (
        "import ray; ray.init(address='auto', logging_level='ERROR', log_to_driver=False); "
        "raise SystemExit(sum(n['Alive'] for n in ray.nodes()) < 2)"
    )
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and head.poll() is None:
        found = subprocess.run(
            [sys.executable, "-c", look],
            env={**environment, "RAY_ADDRESS": address},
            capture_output=True,
            timeout=START_S,
            check=False,
        )
        if found.returncode == 0:
            return
        time.sleep(0.5)
    raise AssertionError("the nodes of Ray did not find each other")


def test_tensor_parallel_ranks_that_ray_places_on_two_hosts(
    on_one_host: dict[str, Answer],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = tmp_path_factory.mktemp("hosts")
    environment = ENVIRONMENT | ray_environment(tmp_path_factory.mktemp("ray"), places=1)
    # Where the API server starts only: vLLM hands its environment to the workers.
    bare = {name: value for name, value in environment.items() if "INSPECT_LENS_" not in name}
    options: dict[str, Any] = COMMON | {
        "tensor_parallel_size": 2,
        "distributed_executor_backend": "ray",
        "api_server_count": 1,
    }
    with (
        # Sockets lie in it, whose paths have to be short.
        tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as short,
        two_hosts(Path(folder)) as hosts,
        cluster(hosts, bare, short) as address,
        api_server(
            options,
            environment=environment | hosts.own_of_first() | {"RAY_ADDRESS": address},
            log=folder / "server.log",
        ) as server,
        client_of(server.url) as client,
    ):
        register(client)
        check_same(ask_all(client), on_one_host)
        assert client.get("/v1/inspect_lens").json()["open_requests"] == 0
        # Rows of one rank came from the other host.
        links = psutil.Process(server.pid).net_connections("tcp")
        assert [link for link in links if link.raddr and link.raddr.ip == SECOND]
