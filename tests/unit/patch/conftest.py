"""A toy in the place of an engine."""

from __future__ import annotations

import pytest

from tests.kit.toy_runs import ToyRuns


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> ToyRuns:
    """What a sweep and a trace run on, whatever model they are given."""
    made = ToyRuns()
    monkeypatch.setattr("inspect_lens.patch._sweep.open_runs", lambda _: made)
    return made
