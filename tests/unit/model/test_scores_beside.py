"""Token scores are written by the process that takes captures in: a busy loop stops threads."""

from __future__ import annotations

import hashlib
import os
import signal
from pathlib import Path

import anyio
import numpy as np
import pytest

from inspect_lens._intake import Beside
from inspect_lens.errors import CaptureError
from inspect_lens.model import ProbeScores, _response, probe_scores
from inspect_lens.probe import Probe, ProbeCard
from tests.kit.fake_server import FakeLensServer

from .conftest import GetModel, ready

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def test_token_scores_are_written_there_too(
    beside: Beside,
    model_of: GetModel,
    server: FakeLensServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    await ready(beside)
    monkeypatch.setattr(_response, "write_file", None)  # what a thread would call
    facts = ProbeCard(name="org/sum", layers=(2,), hidden=8)
    probe = Probe.from_direction(np.arange(1.0, 9.0), card=facts)
    model = model_of(server, activations_dir=str(tmp_path / "a"), probes=[probe])
    output = await model.generate("a b c")
    found = probe_scores(output)
    assert found is not None
    (path,) = (tmp_path / "a").rglob("*.scores.safetensors")
    assert hashlib.sha256(path.read_bytes()).hexdigest().startswith(found.sha256)
    again = ProbeScores.from_reference(found.model_dump())
    np.testing.assert_array_equal(again.of("org/sum").scores, found.of("org/sum").scores)
    (tmp_path / "file").touch()
    lost = model_of(server, activations_dir=str(tmp_path / "file"), probes=[probe])
    with pytest.raises(CaptureError, match="could not write"):
        await lost.generate("a b c")


async def test_token_scores_start_it_and_are_not_lost_with_it(
    beside: Beside, model_of: GetModel, server: FakeLensServer, tmp_path: Path
) -> None:
    facts = ProbeCard(name="org/sum", layers=(2,), hidden=8)
    probe = Probe.from_direction(np.arange(1.0, 9.0), card=facts)
    model = model_of(server, activations_dir=str(tmp_path), probes=[probe])
    calls = 0
    with anyio.fail_after(60):
        while not beside.is_ready:
            await model.generate("a b c")
            calls += 1
    assert beside.pid is not None
    os.kill(beside.pid, signal.SIGSTOP)
    async with anyio.create_task_group() as group:
        for i in range(4):
            group.start_soon(model.generate, f"word {i}")
        await anyio.sleep(0.3)
        os.kill(beside.pid, signal.SIGKILL)
    assert len(list(tmp_path.rglob("*.scores.safetensors"))) == calls + 4
