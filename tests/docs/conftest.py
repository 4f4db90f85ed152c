"""A working directory as the documentation assumes it: the root of the repository."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from filelock import FileLock

from tests.kit.example_files import (
    LOG,
    write_logs,
    write_nla,
    write_published,
    write_sets,
    write_store,
)
from tests.kit.repository import ROOT


@pytest.fixture
def workdir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A scratch directory that holds what pages name by relative path; the current one."""
    for name in ("benchmarks", "evals", "lenses", "oracles", "organism", "probes", "vectors"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/data").symlink_to(ROOT / "tests/data")
    # Scores are written beside a log.
    shutil.copytree(ROOT / "docs/live", tmp_path / "docs/live")
    write_published(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("INSPECT_DISPLAY", "none")
    monkeypatch.setenv("INSPECT_LOG_DIR", str(tmp_path / "logs"))
    return tmp_path


@pytest.fixture(scope="session")
def example_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`logs`, `acts` and `nla`, as the reference says that examples find them."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return _written(tmp_path_factory.mktemp("example_files"))
    # The processes of one run have this folder in common, and the first of them writes.
    shared = tmp_path_factory.getbasetemp().parent
    with FileLock(shared / "example_files.lock"):
        if not (done := shared / "example_files.done").exists():
            _written(shared / "example_files")
            done.touch()
    return shared / "example_files"


def _written(folder: Path) -> Path:
    write_logs(folder / "logs")
    write_sets(folder / "acts")
    write_store(folder / "acts", folder / LOG)
    write_nla(folder / "nla")
    return folder
