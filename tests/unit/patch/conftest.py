"""A toy in the place of an engine."""

from __future__ import annotations

import pytest

from tests.kit.toy_runs import ToyRuns


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> ToyRuns:
    """What a sweep and a trace run on, whatever model they are given."""
    made = ToyRuns()
    for module in ("_sweep", "_trace"):
        monkeypatch.setattr(f"inspect_lens.patch.{module}.open_runs", lambda _: made)
    return made
