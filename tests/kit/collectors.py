"""Collectors that a test makes end with it: each holds a thread, and addresses for results."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

from inspect_lens._engine.collect.collector import Collector
from inspect_lens._engine.collect.result_memory import ResultMemory

__all__ = ["close_collectors"]

_AT_ONCE = 3
"""Memories of which a process has the addresses; more are looked for in garbage."""
_memories: weakref.WeakSet[ResultMemory] = weakref.WeakSet()


@pytest.fixture(autouse=True)
def close_collectors(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Close what a test leaves open."""
    made: list[Collector] = []
    init, reserve = Collector.__init__, ResultMemory.__init__

    def remember(self: Collector, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        made.append(self)

    def count(self: ResultMemory, *args: Any, **kwargs: Any) -> None:
        if len(_memories) >= _AT_ONCE:
            gc.collect()
        reserve(self, *args, **kwargs)
        _memories.add(self)

    monkeypatch.setattr(Collector, "__init__", remember)
    monkeypatch.setattr(ResultMemory, "__init__", count)
    yield
    for collector in made:
        collector.close()
