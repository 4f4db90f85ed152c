"""Evals on the session's server."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from inspect_lens._intake import _process

OWN_PROCESS = (
    "test_evals", "test_finished_logs", "test_hook", "test_lives_of_logs", "test_organism",
)  # fmt: skip
"""Files whose captures a process of its own takes in, as for a user."""


@pytest.fixture(autouse=True, scope="module")
def _taken_in(request: pytest.FixtureRequest) -> Iterator[None]:
    """Elsewhere threads do it: each eval would start a process, which takes a second."""
    with pytest.MonkeyPatch.context() as patch:
        if request.module.__name__.rpartition(".")[2] not in OWN_PROCESS:
            patch.setattr(_process, "STARTS_AFTER", 1 << 30)
        yield
