"""The process that takes captures in: the same results as threads, and it may die at any time."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import thread
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import fsspec
import numpy as np
import psutil
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from inspect_ai.log import read_eval_log
from inspect_ai.model import GenerateConfig, ModelOutput
from inspect_ai.solver import Generate, TaskState, solver

from inspect_lens._intake import Beside, _process, read_file
from inspect_lens.errors import CaptureError
from inspect_lens.model import (
    _response,
    lens_config,
    read_activations,
    resident_activation_bytes,
)
from inspect_lens.model._handle import MEMORY
from inspect_lens.probe import Probe, ProbeCard
from tests.kit.fake_server import FakeLensServer, residual

from .conftest import GetModel, ready

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def check(acts: Any, layer: int = 1, hidden: int = 8) -> None:
    tokens = [*acts.prompt_token_ids, *acts.token_ids]
    expected = residual(tokens, (layer,), list(range(len(tokens) - 1)), hidden)
    np.testing.assert_array_equal(acts.numpy(), expected.to_float32())


class Slow(FakeLensServer):
    """Bytes take their time."""

    wait_s = 0.5

    def get(self, path: str) -> tuple[int, Any]:
        if path.startswith("/v1/activations/"):
            time.sleep(self.wait_s)
        return super().get(path)


async def test_a_call_has_what_it_has_by_threads(
    beside: Beside, server: FakeLensServer, model_of: GetModel, tmp_path: Path
) -> None:
    config = lens_config(capture=[1])
    by_thread = await model_of(server, activations_dir=str(tmp_path / "a")).generate(
        "a b", config=config
    )
    pid = await ready(beside)
    before = resident_activation_bytes()
    model = model_of(server, activations_dir=str(tmp_path / "b"))
    output = await model.generate("a b", config=config)
    one, other = by_thread.metadata["activations"], output.metadata["activations"]
    assert resident_activation_bytes() == before  # no byte of it came here
    assert (one.sha256, one.tensors) == (other.sha256, other.tensors)
    assert (one.n_prompt, one.n_completion) == (other.n_prompt, other.n_completion)
    assert one.receipt == other.receipt
    assert other.origin == {**one.origin, "message_id": output.message.id}
    check(other)
    assert beside.pid == pid
    assert sorted(p.suffix for p in (tmp_path / "b").rglob("*.*")) == [".lens", ".safetensors"]


async def test_a_file_that_was_changed_is_not_believed(
    beside: Beside, server: FakeLensServer, model_of: GetModel, tmp_path: Path
) -> None:
    await ready(beside)
    model = model_of(server, activations_dir=str(tmp_path))
    acts = (await model.generate("a b", config=lens_config(capture=[1]))).metadata["activations"]
    (path,) = tmp_path.rglob("*.safetensors")
    data = bytearray(path.read_bytes())
    data[-60] ^= 1
    path.write_bytes(data)
    with pytest.raises(ValueError, match="the log refers to"):
        acts.numpy()


async def test_what_the_server_says_is_raised(
    beside: Beside, model_of: GetModel, tmp_path: Path
) -> None:
    await ready(beside)
    with FakeLensServer(expire_handles=True) as server:
        model = model_of(server, activations_dir=str(tmp_path))
        with pytest.raises(CaptureError, match=r"HTTP 410; it expired"):
            await model.generate("a b", config=lens_config(capture=[1]))
        assert len([path for path in server.read if "activations" in path]) == 1
    assert beside.is_ready


async def test_a_folder_that_cannot_be_made_is_an_error(
    beside: Beside, server: FakeLensServer, model_of: GetModel, tmp_path: Path
) -> None:
    await ready(beside)
    (tmp_path / "file").write_text("")
    model = model_of(server, activations_dir=str(tmp_path / "file"))
    with pytest.raises(CaptureError, match="could not write captured activations"):
        await model.generate("a b", config=lens_config(capture=[1]))


async def test_killed_in_the_middle_and_nothing_is_lost(
    beside: Beside, model_of: GetModel, tmp_path: Path
) -> None:
    first = await ready(beside)
    with Slow() as server:
        model = model_of(server, activations_dir=str(tmp_path))
        found: list[Any] = []

        async def call() -> None:
            output = await model.generate("a b", config=lens_config(capture=[1]))
            found.append(output.metadata["activations"])

        async with anyio.create_task_group() as group:
            for _ in range(12):
                group.start_soon(call)
            while not any("activations" in path for path in server.read):
                await anyio.sleep(0.01)
            os.kill(first, signal.SIGKILL)
        for acts in found:
            check(acts)
        assert len(found) == 12
        # Another one takes its place, and the dead one is buried.
        assert await ready(beside) != first
        assert not psutil.pid_exists(first)
        await call()
        check(found[-1])


@pytest.mark.slow
async def test_one_that_dies_again_and_again_is_given_up(
    beside: Beside, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = Beside()
    monkeypatch.setattr(_process, "STARTS", 2)
    for _ in range(2):
        os.kill(await ready(mine), signal.SIGKILL)
        while mine.is_ready:
            await anyio.sleep(0.01)
    for _ in range(20):
        mine.prepare()
    assert mine.pid is None
    assert mine.send(b"{") is None


@asynccontextmanager
async def cancelled(
    beside: Beside, model_of: GetModel, folder: Path
) -> AsyncIterator[tuple[Slow, Callable[[str], Awaitable[ModelOutput]]]]:
    """A server of which one call was cancelled, and what calls it again."""
    await ready(beside)
    with Slow() as server:
        model = model_of(server, activations_dir=str(folder))
        call = partial(model.generate, config=lens_config(capture=[1]))
        with anyio.move_on_after(0.25) as scope:
            await call("a b")
        assert scope.cancelled_caught
        yield server, call


async def test_a_cancelled_call_disturbs_no_other(
    beside: Beside, model_of: GetModel, tmp_path: Path
) -> None:
    async with cancelled(beside, model_of, tmp_path) as (_, call):
        check((await call("c d e")).metadata["activations"])


async def test_a_cancelled_call_leaves_no_file(
    beside: Beside, model_of: GetModel, tmp_path: Path
) -> None:
    """No log would name it."""
    async with cancelled(beside, model_of, tmp_path) as (server, call):
        await anyio.sleep(2 * server.wait_s)
        assert files_in(tmp_path) == []
        await call("c d e")
        assert len(files_in(tmp_path)) == 1


class NoDelete(MemoryFileSystem):  # type: ignore[misc]
    """A bucket whose service has a fault of its own."""

    protocol = "no-delete"

    def rm_file(self, path: str) -> None:
        raise RuntimeError("503")


fsspec.register_implementation(NoDelete.protocol, NoDelete)


@pytest.mark.parametrize("where", ["beside", "thread", "bucket"])
async def test_a_call_that_fails_behind_its_capture_leaves_no_file(
    beside: Beside,
    model_of: GetModel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    where: str,
) -> None:
    async def full(*_: object) -> None:
        raise CaptureError("the disk is full")

    if where == "beside":
        await ready(beside)
    # What cannot be removed changes nothing of the error.
    folder = f"{NoDelete.protocol}://files" if where == "bucket" else str(tmp_path / "files")
    facts = ProbeCard(name="org/sum", layers=(2,), hidden=8)
    probe = Probe.from_direction(np.arange(1.0, 9.0), card=facts)
    monkeypatch.setattr(_response, "write_small", full)
    with FakeLensServer() as server:
        model = model_of(server, activations_dir=folder)
        config = lens_config(capture=[2], probes=[probe])
        with pytest.raises(CaptureError, match="the disk is full"):
            await model.generate("a b", config=config)
    await anyio.sleep(0.2)
    assert files_in(tmp_path / "files") == []


def files_in(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def test_each_event_loop_has_a_process_that_ends_with_it(
    beside: Beside, model_of: GetModel, tmp_path: Path
) -> None:
    async def once(server: FakeLensServer) -> int:
        pid = await ready(beside)
        model = model_of(server, activations_dir=str(tmp_path))
        output = await model.generate("a b", config=lens_config(capture=[1]))
        check(output.metadata["activations"])
        return pid

    with FakeLensServer() as server:
        for _ in range(2):
            with asyncio.Runner() as runner:  # Inspect may have replaced `asyncio.run`
                pid, until = runner.run(once(server)), time.monotonic() + 20
            while psutil.pid_exists(pid) and time.monotonic() < until:
                time.sleep(0.02)  # on a busy machine the child is reaped a little later
            assert not psutil.pid_exists(pid)


def test_its_task_is_collected_as_garbage_amid_the_start_of_a_thread(beside: Beside) -> None:
    left = asyncio.new_event_loop()
    left.run_until_complete(ready(beside))
    task = beside._task
    assert task is not None

    async def collect() -> None:
        with thread._global_shutdown_lock:  # as `submit` of any pool has it, and no lock twice
            task.get_coro().close()

    collecting = threading.Thread(target=asyncio.run, args=(collect(),), daemon=True)
    collecting.start()
    collecting.join(20)
    assert not collecting.is_alive()


def test_trio_does_without(beside: Beside, server: FakeLensServer) -> None:
    async def one() -> None:
        await ready(beside)

    asyncio.run(one())

    async def other() -> None:
        beside.prepare()
        assert beside.send(b"{") is None

    anyio.run(other, backend="trio")


def test_it_is_not_started_where_nothing_is_captured_or_nobody_wants_it(
    beside: Beside, server: FakeLensServer, run_eval: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = Beside()
    monkeypatch.setattr(_response, "BESIDE", mine)
    assert run_eval(server).status == "success"
    monkeypatch.setenv("INSPECT_LENS_INTAKE_PROCESS", "false")
    config = GenerateConfig(extra_body={"extra_args": {"output_residual_stream": [1]}})
    assert run_eval(server, config=config).status == "success"
    assert mine._task is None


def test_an_eval_and_its_log(beside: Beside, run_eval: Any, tmp_path: Path) -> None:
    @solver
    def captured() -> Any:
        async def solve(state: TaskState, generate: Generate) -> TaskState:
            await ready(beside)
            return await generate(state, extra_body=lens_config(capture=[1]).extra_body)

        return solve

    with FakeLensServer() as server:
        log = run_eval(server, n=20, solver=captured())
    assert log.status == "success", log.error
    MEMORY.clear()
    calls = read_activations(read_eval_log(log.location))
    assert len(calls) == 20
    for call in calls:
        check(call.activations)
        assert call.activations.origin["sample_id"] is not None
    assert not list(tmp_path.rglob("*.tmp"))


SCRIPT = """
import asyncio, os, sys, time
from inspect_lens._intake import BESIDE, _process
_process.STARTS_AFTER = 0

async def main():
    BESIDE.prepare()
    while not BESIDE.is_ready:
        await asyncio.sleep(0.01)
    if os.fork() == 0:
        time.sleep(60)  # a child holds what it inherited
        os._exit(0)
    print(BESIDE.pid, flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_it_ends_with_its_parent_however_that_ends(number: int) -> None:
    command = [sys.executable, "-W", "error::ResourceWarning", "-c", SCRIPT]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    children = psutil.Process(parent.pid).children(recursive=True)
    assert pid in {child.pid for child in children}
    parent.send_signal(number)
    parent.wait(timeout=30)
    parent.stdout.close()
    (helper,) = [child for child in children if child.pid == pid]
    others = [child for child in children if child.pid != pid]
    try:
        psutil.wait_procs([helper], timeout=20)
        assert not helper.is_running()
    finally:
        for child in [*others, helper]:
            if child.is_running():
                child.kill()


def test_files_are_whole_or_not_there(tmp_path: Path) -> None:
    """Killed at any time, it leaves no file that a reader would take for one."""
    script = """
import sys
from inspect_lens._intake import write_file
from itertools import count
parts = [bytes([i]) * (1 << 20) for i in range(16)]
print("go", flush=True)
for i in count():
    write_file(f"{sys.argv[1]}/{i}.safetensors", parts)
"""
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    process.stdout.readline()
    while len(list(tmp_path.glob("*.safetensors"))) < 2:
        time.sleep(0.01)
    process.kill()
    process.wait()
    process.stdout.close()
    written = [read_file(str(path)) for path in tmp_path.glob("*.safetensors")]
    assert {len(data or b"") for data in written} == {16 << 20}
