"""Steered, captured, aborted and plain requests at once: nothing mixes, nothing stays."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.soak import soak

pytestmark = pytest.mark.engine


@pytest.mark.nightly(
    held_by=(
        "tests/engine/test_edits.py::"
        "test_different_programs_and_plain_requests_in_one_batch_keep_their_solo_answers",
        "tests/engine/test_server_clients.py::test_a_killed_client_leaves_nothing",
    ),
    why="two engines, and hundreds of requests",
)
def test_a_long_mix_of_requests(tmp_path: Path, soak_requests: int) -> None:
    # Two engines that do not compile; the long mixes in `benchmarks/results` do.
    result = soak(tmp_path, requests=soak_requests, enforce_eager=True)
    assert result["passed"], (result["problems"], result["mix"], result["floor"])
    assert sum(result["mix"]["requests"].values()) == soak_requests
    assert result["solo_answers_that_differ_from_an_engine_without_the_lens"] == 0
