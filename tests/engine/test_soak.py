"""Steered, captured, aborted and plain requests at once: nothing mixes, nothing stays."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.soak import soak

pytestmark = pytest.mark.engine


def test_a_long_mix_of_requests(tmp_path: Path, soak_requests: int) -> None:
    result = soak(tmp_path, requests=soak_requests)
    assert result["passed"], (result["problems"], result["mix"], result["floor"])
    assert sum(result["mix"]["requests"].values()) == soak_requests
    assert result["solo_answers_that_differ_from_an_engine_without_the_lens"] == 0
