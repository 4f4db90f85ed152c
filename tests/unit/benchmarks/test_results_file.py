"""A file of results, and runs of another command that are added to it."""

from __future__ import annotations

from benchmarks.results_file import Results


def test_the_runs_of_another_command_are_added_to_a_file() -> None:
    run = {"seconds": 2.0, "tokens": 100, "preemptions": 1, "add_ms": 3.0}
    one = Results({"command": "a", "arms": {"default": "x"}, "gpu": "H"})
    one.add(("m", "8x256", "default"), run)
    one.add(("m", "8x256", "default"), run | {"seconds": 4.0})
    one.skipped["m", "8x256", "idle"] = "why"
    one.engines["m/plain"] = {"options": {}}
    same = Results.kept(one.to_json(), {"command": "b", "arms": {"idle": "y"}})
    assert same.environment == {
        "command": "a && b", "arms": {"default": "x", "idle": "y"}, "gpu": "H",
    }  # fmt: skip
    assert same.to_json() | {"environment": 0} == one.to_json() | {"environment": 0}
    same.add(("n", "8x256", "default"), run)
    assert [r["model"] for r in same.to_json()["runs"]] == ["m", "n"]
