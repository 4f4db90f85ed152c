"""A disk that takes no more: the call fails by name, no half of a file stays, and room helps."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from inspect_lens._intake import Beside, _process
from inspect_lens.errors import CaptureError
from inspect_lens.model import _response, lens_config
from inspect_lens.model._handle import MEMORY
from tests.kit.fake_server import FakeLensServer

from .conftest import GetModel, RunEval

ROOM = 64 << 10
"""Bytes that a file may have; what is captured below takes more."""
PROMPT = "word " * 2000
NO_ROOM = rf"could not write captured activations \(\[Errno {errno.EFBIG}\].*free space"


@contextmanager
def full(pid: int = 0) -> Iterator[None]:
    """The system takes so many bytes of a file, and refuses the rest, as a full disk does.

    Args:
        pid: of the process; 0 for this one.
    """
    soft, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (ROOM, hard))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (soft, hard))


def files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.parametrize("is_beside", [False, True], ids=["thread", "process"])
async def test_a_call_fails_and_the_next_one_with_room_does_not(
    server: FakeLensServer,
    model_of: GetModel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    is_beside: bool,
) -> None:
    MEMORY.clear()
    pid = 0
    beside = Beside()
    monkeypatch.setattr(_response, "BESIDE", beside)
    if is_beside:
        monkeypatch.setattr(_process, "STARTS_AFTER", 0)
        beside.prepare()
        with anyio.fail_after(60):
            while not beside.is_ready:
                await anyio.sleep(0.01)
        assert beside.pid is not None
        pid = beside.pid
    folder = tmp_path / "acts"
    model = model_of(server, activations_dir=str(folder))
    config = lens_config(capture="all")
    with full(pid):
        with pytest.raises(CaptureError, match=NO_ROOM):
            await model.generate(PROMPT, config=config)
        assert not files(folder)
    output = await model.generate(PROMPT, config=config)
    (kept,) = [path for path in files(folder) if path.suffix == ".safetensors"]
    assert kept.stat().st_size > ROOM
    assert output.metadata["activations"].numpy().shape[0] == server.n_layers


def test_an_eval_says_so_in_its_log(
    server: FakeLensServer, model_of: GetModel, run_eval: RunEval, tmp_path: Path
) -> None:
    folder = tmp_path / "acts"
    model = model_of(server, activations_dir=str(folder))
    options: dict[str, Any] = {"model": model, "log_format": "json", "n": 1}

    write = os.writev

    def no_room(file: int, parts: Sequence[memoryview]) -> int:
        # The log lies on a disk, too: it has one of its own here.
        if Path(os.readlink(f"/proc/self/fd/{file}")).is_relative_to(folder):
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(file, parts)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "writev", no_room)
        # Captures of tests before may have started the process beside, which writes with its own.
        patch.setattr(_response, "BESIDE", Beside())
        log = run_eval(server, config=lens_config(capture="all"), **options)
    assert log.status == "error"
    assert log.error is not None
    assert "could not write captured activations" in log.error.message
    assert not files(folder)
    assert run_eval(server, config=lens_config(capture="all"), **options).status == "success"
