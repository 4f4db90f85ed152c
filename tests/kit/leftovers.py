"""A pytest plug-in: a run that leaves a process behind fails.

Engines and servers are process trees, and a child that outlives its parent belongs to nobody.
So every process that the run starts inherits a mark in its environment, and the marks are
looked for when the last fixture has been torn down.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
import uuid

import psutil
import pytest

MARK = "TEST_RUN_OF_INSPECT_LENS"
GRACE_S = 60.0
"""Where several runs share two cores, an interpreter takes its time to end."""
# Helpers of Python's multiprocessing, of PyTorch's compiler, and our own, that end with this
# process and not before.
HELPERS = (
    "multiprocessing.resource_tracker",
    "multiprocessing.forkserver",
    "torch._inductor.compile_worker",
    "inspect_lens._intake",
    "tests.kit.forks",
)


def pytest_configure(config: pytest.Config) -> None:
    # A run that is told to end tears its fixtures down first, as after Ctrl-C. That is ignored by
    # what a script starts in the background, and by all below it, unless somebody sets it again.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    # xdist's workers inherit the mark of their controller and leave the check to it.
    if not hasattr(config, "workerinput"):
        os.environ[MARK] = uuid.uuid4().hex


@pytest.hookimpl(trylast=True)  # after the teardown of session fixtures, before the summary
def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workerinput"):
        return
    deadline = time.monotonic() + GRACE_S
    while (left := _marked()) and time.monotonic() < deadline:
        time.sleep(0.2)
    if not left:
        return
    text = "killed at the end of the run:\n" + "\n".join(_describe(process) for process in left)
    for process in left:
        with contextlib.suppress(psutil.Error):
            process.kill()
    # On a busy machine a killed process takes its time to end.
    psutil.wait_procs(left, timeout=GRACE_S + 10)
    if session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
    reporter = session.config.pluginmanager.getplugin("terminalreporter")
    if reporter is not None:
        # As an error of the run, so that the closing line counts it.
        reporter.stats.setdefault("error", []).append(
            pytest.TestReport(
                nodeid="processes left behind", location=("", None, "processes left behind"),
                keywords={}, outcome="failed", longrepr=text, when="teardown",
            )
        )  # fmt: skip


def _marked() -> list[psutil.Process]:
    mark = os.environ[MARK]
    found = []
    for process in psutil.process_iter():
        try:
            environment = process.environ()
            is_child = os.getpid() in {parent.pid for parent in process.parents()}
            # On a busy machine a process may be between two programs, and has no environment then.
            ours = environment.get(MARK) == mark or (is_child and not environment)
            if not ours or process.pid == os.getpid() or process.status() == psutil.STATUS_ZOMBIE:
                continue
            # What a helper has forked looks as it does, and is none.
            if not (is_child and _is_helper(process) and not _is_helper(process.parent())):
                found.append(process)
        except psutil.Error:  # it ended meanwhile, or belongs to somebody else
            continue
    return found


def _is_helper(process: psutil.Process | None) -> bool:
    said = "" if process is None else " ".join(process.cmdline())
    return any(name in said for name in HELPERS)


def _describe(process: psutil.Process) -> str:
    try:
        return f"{process.pid} {' '.join(process.cmdline())[:200]}"
    except psutil.Error:
        return f"{process.pid} (ended)"
