from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer.main

from tests.kit.fake_server import FakeLensServer

# All commands are made anew each time that one of them is run.
typer.main.get_command = functools.cache(typer.main.get_command)


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Nothing is written into the repository; cache and server records are this test's own."""
    from inspect_ai.util._concurrency import init_concurrency

    from inspect_lens._intake import _process
    from inspect_lens.model import _server

    # A port may come back, and with it the record (and the lock, of another event loop).
    _server._servers.clear()
    init_concurrency()
    # A second to start, for each eval: tests of it start it.
    monkeypatch.setattr(_process, "STARTS_AFTER", 1 << 30)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("INSPECT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("VLLM_BASE_URL", raising=False)
    yield tmp_path
    init_concurrency()


@pytest.fixture
def server() -> Iterator[FakeLensServer]:
    with FakeLensServer() as running:
        yield running
