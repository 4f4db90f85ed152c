"""What tests of the glue share."""

from __future__ import annotations

import pytest

from inspect_lens._engine.collect import result_memory
from tests.kit.collectors import close_collectors

__all__ = ["close_collectors"]


@pytest.fixture(autouse=True)
def _few_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process of tests has hundreds of front-ends, and vLLM freezes some of their garbage."""
    monkeypatch.setattr(result_memory, "_RESERVE", 1 << 36)
