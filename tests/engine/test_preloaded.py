"""Processes that the tests fork from one with vLLM: what they find is what `spawn` gives them."""

from __future__ import annotations

import atexit
import json
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.kit.preloaded import run_forked
from tests.kit.repository import ROOT

pytestmark = pytest.mark.engine


def describe(starter: int) -> dict[str, Any]:
    return {
        "environment": dict(os.environ),
        "arguments": sys.argv[1:],
        "folder": os.getcwd(),
        "below": starter in [parent.pid for parent in psutil.Process().parents()],
    }


def below(queue: Any, starter: int) -> None:
    queue.put(describe(starter))
    queue.close()
    queue.join_thread()
    sys.exit(5)


def main() -> None:
    atexit.register(print, "the end", flush=True)
    os.environ["CHANGED"] = "after the start"
    os.chdir("docs")
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    child = context.Process(target=below, args=(queue, os.getpid()), daemon=True)
    child.start()
    found = [describe(os.getppid()), queue.get()]
    child.join()
    sys.stdout.write(json.dumps([*found, child.exitcode]) + "\n")
    sys.stdout.flush()


def test_a_process_and_what_it_starts_find_what_spawned_ones_do(tmp_path: Path) -> None:
    name = "tests.engine.test_preloaded"
    environment = {k: v for k, v in os.environ.items() if k != "HOME"} | {"ONLY": "there"}
    log = tmp_path / "forked.log"
    run_forked(name, ["a", "--b"], environment=environment, log=log).wait(timeout=100)
    spawned = subprocess.run(
        [sys.executable, "-m", name, "a", "--b"],
        cwd=ROOT, env=environment, check=True, capture_output=True, text=True,
    )  # fmt: skip
    found, end = log.read_text().splitlines()
    expected, expected_end = spawned.stdout.splitlines()
    assert end == expected_end == "the end"
    assert json.loads(found) == json.loads(expected)
    assert json.loads(found)[1]["environment"]["CHANGED"] == "after the start"
    assert json.loads(found)[1]["below"] is True
    assert json.loads(found)[2] == 5


if __name__ == "__main__":
    main()
