"""Temporary folders go with the processes that use them, also with those that were killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from inspect_lens._base.temp_dirs import PREFIX, held, let_go, new_folder, sweep
from inspect_lens._engine.collect.collector import Collector


@pytest.fixture(autouse=True)
def _temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def test_the_last_one_to_let_go_removes_a_folder() -> None:
    folder, mine = new_folder()
    (folder / "rows").touch()
    _, theirs = held(lambda: folder)
    let_go(folder, mine)
    assert folder.exists()
    let_go(folder, theirs)
    assert not folder.exists()


def test_what_a_killed_process_leaves_is_removed_by_the_next_one(tmp_path: Path) -> None:
    make = "from inspect_lens._engine.collect.collector import Collector as C; print(C().address)"
    wait = "; import sys, time; sys.stdout.flush(); time.sleep(60)"
    with subprocess.Popen(
        [sys.executable, "-c", make + wait],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    ) as killed:
        assert killed.stdout is not None
        folder = Path(killed.stdout.readline().strip().removeprefix("ipc://")).parent
        assert folder.parent == tmp_path
        sweep()
        assert (folder / "rows").exists(), "it is used"
        killed.send_signal(signal.SIGKILL)
    assert (folder / "rows").exists()
    collector = Collector()
    assert not folder.exists()
    collector.close()
    assert list(tmp_path.iterdir()) == []


def test_what_is_not_ours_stays(tmp_path: Path) -> None:
    other, file = tmp_path / "somebody-elses", tmp_path / f"{PREFIX}a-file"
    other.mkdir()
    file.touch()
    sweep()
    assert other.exists()
    assert file.exists()


def test_a_folder_that_is_swept_before_it_is_held_is_made_again(tmp_path: Path) -> None:
    made: list[Path] = []

    def make() -> Path:
        made.append(tmp_path / f"{PREFIX}{len(made)}")
        made[-1].mkdir()
        if len(made) == 1:
            sweep()
        return made[-1]

    folder, lock = held(make)
    assert folder == made[1]
    sweep()
    assert folder.exists()
    let_go(folder, lock)
