"""A run that leaves a process behind fails, and says which."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.kit.repository import ROOT

CONFTEST = """
import tests.kit.leftovers
tests.kit.leftovers.GRACE_S = 0.2
pytest_plugins = ["tests.kit.leftovers"]
"""
LEAVES = """
import pathlib, subprocess

def test_leaves_a_process():
    child = subprocess.Popen(["sleep", "300"], start_new_session=True)
    pathlib.Path("pid").write_text(str(child.pid))
"""

FORKS = """
import multiprocessing, pathlib, time

def test_leaves_what_a_server_has_forked():
    child = multiprocessing.get_context("forkserver").Process(target=time.sleep, args=(300,))
    child.start()
    pathlib.Path("pid").write_text(str(child.pid))
"""


PRESSES = """
import pytest, signal, subprocess, sys

def test_ctrl_c():
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    code = "import signal; signal.raise_signal(signal.SIGINT)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == -signal.SIGINT
"""


def run_pytest(folder: Path, test: str, *inside: str) -> subprocess.CompletedProcess[str]:
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "test_it.py").write_text(test)
    command = [
        *inside,
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-W",
        "ignore",
        "-c",
        "/dev/null",
        "--rootdir",
        ".",
        ".",
    ]
    return subprocess.run(
        command, cwd=folder, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip


@pytest.mark.parametrize(("test", "said"), [(LEAVES, "sleep 300"), (FORKS, "forkserver")])
def test_a_process_left_behind_fails_the_run(tmp_path: Path, test: str, said: str) -> None:
    run = run_pytest(tmp_path, test)
    assert run.returncode == 1, run.stdout + run.stderr
    assert said in run.stdout
    assert "1 passed, 1 error" in run.stdout.splitlines()[-1]
    pid = int((tmp_path / "pid").read_text())
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_a_clean_run_passes(tmp_path: Path) -> None:
    run = run_pytest(tmp_path, "def test_nothing():\n    pass\n")
    assert run.returncode == 0, run.stdout + run.stderr


def test_ctrl_c_reaches_a_run_that_a_script_has_started_in_the_background(tmp_path: Path) -> None:
    run = run_pytest(tmp_path, PRESSES, "env", "--ignore-signal=INT")
    assert run.returncode == 0, run.stdout + run.stderr
