"""Which files of the package a request goes through, from `-M probes=` to a metric in the log.

`python -m tests.kit.walk` starts the organism on a server of its own, runs a first eval, and then
prints each file of which a function is called in a second one, in whatever process.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path

_PROFILE = """
import os, sys, threading, time
seen = set()
def called(frame, event, argument):
    file, _, name = frame.f_code.co_filename.partition("src/inspect_lens/")
    if event == "call" and name and frame.f_code.co_name != "<module>":
        seen.add(f"{name} {int(time.time())}")
def write():
    while True:
        time.sleep(1)
        with open(os.path.join(os.environ["WALK"], f"{os.getpid()}.txt"), "w") as file:
            file.write("\\n".join(list(seen)))
def begin():
    sys.setprofile(called), threading.setprofile(called)
    threading.Thread(target=write, daemon=True).start()
os.register_at_fork(after_in_child=begin)
begin()
"""
"""Runs at the start of each process of Python that finds it."""


def _evals() -> tuple[float, float]:
    """Run both; when the second one began and ended."""
    from inspect_ai import eval

    from evals.organism_deception import organism_deception

    began = 0.0
    for _ in range(2):
        began = time.time()
        (log,) = eval(
            organism_deception(), model="vllm-lens/organism", limit=2, display="none",
            model_args={"probes": "organism/deception-lr", "enforce_eager": True},
        )  # fmt: skip
        assert log.status == "success", log.error
    return began, time.time()


def main() -> None:
    """Start anew with the profile, or run and print."""
    if "WALK" not in os.environ:
        folder = tempfile.mkdtemp()
        Path(folder, "sitecustomize.py").write_text(_PROFILE)
        os.environ["PYTHONPATH"] = f"{folder}:{os.environ.get('PYTHONPATH', '')}"
        os.environ |= {"WALK": folder, "INSPECT_LOG_DIR": folder}
        os.execv(sys.executable, [sys.executable, "-m", "tests.kit.walk"])
    began, ended = _evals()
    time.sleep(3)
    calls = [line for file in Path(os.environ["WALK"]).glob("*.txt")
             for line in file.read_text().splitlines()]  # fmt: skip
    within = {call.split()[0] for call in calls if began < int(call.split()[1]) <= ended}
    sys.stdout.write("\n".join([*sorted(within), f"{len(within)} files", ""]))


if __name__ == "__main__":
    main()
