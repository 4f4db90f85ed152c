"""Collectors that a test makes end with it: each holds a thread, and addresses for results."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from inspect_lens._engine.collect.collector import Collector


@pytest.fixture(autouse=True)
def _close_collectors(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    made: list[Collector] = []
    init = Collector.__init__

    def remember(self: Collector, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        made.append(self)

    monkeypatch.setattr(Collector, "__init__", remember)
    yield
    for collector in made:
        collector.close()
