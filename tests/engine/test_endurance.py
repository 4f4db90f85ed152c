"""Servers under mixed load that are replaced and killed: nothing breaks that should not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.endurance import main

pytestmark = pytest.mark.engine


@pytest.mark.nightly(
    held_by=(
        "tests/engine/test_server_clients.py::test_a_killed_client_leaves_nothing",
        "tests/unit/benchmarks/test_endurance.py::test_what_is_wrong_is_said",
    ),
    why="four servers, and minutes of load",
)
def test_a_server_is_replaced_and_its_engine_killed_under_load(tmp_path: Path) -> None:
    out = tmp_path / "endurance.json"
    words = ["--minutes", "3.5", "--event-minutes", "0.7", "--server", "enforce_eager=true"]
    assert main([*words, "--out", str(out)]) == 0
    (found,) = json.loads(out.read_text("utf-8"))["parts"]
    assert [event["kind"] for event in found["events"]] == ["rolled", "killed"]
    assert found["lens"]["outcomes"]["capture-1"]["done"] > 10
