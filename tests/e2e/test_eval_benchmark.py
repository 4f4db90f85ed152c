"""The benchmark of whole evals on the organism, with two servers and few samples."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.eval import ARMS, LIMITS, limits_missed, main

pytestmark = pytest.mark.engine


@pytest.mark.nightly(
    held_by="tests/unit/benchmarks/test_eval.py::test_every_arm_runs_and_gets_what_it_asks_for",
    why="two servers, and 21 evals",
)
def test_one_command_runs_every_arm_of_every_load(tmp_path: Path) -> None:
    out = tmp_path / "eval.json"
    size = ["--samples", "4", "--fewer-samples", "3", "--connections", "4", "2", "--turns", "3"]
    small = ["--agents", "2", "--agent-samples", "2", "--runs", "1", "--warm", "1"]
    small += ["--kv-gib", "0.125", "--one-by-one"]
    server = ["--server", "max_model_len=1024", "enforce_eager=true"]
    code = main(["--shape", "organism", "--out", str(out), *size, *small, *server])
    result = json.loads(out.read_text(encoding="utf-8"))
    summary = result["summary"]
    assert set(summary) == {"4 connections", "2 connections", "agent of 3 turns"}
    for arms in summary.values():
        assert set(arms) == set(ARMS)
        assert all(facts["n"] == 1 and facts["ratio"] > 0 for facts in arms.values())
    # On two shared cores seconds say nothing; that the exit code follows them does.
    assert result["missed"] == limits_missed(summary)
    assert code == (1 if result["missed"] else 0)
    assert result["limits"] == LIMITS
    assert str(tmp_path) not in out.read_text(encoding="utf-8")
