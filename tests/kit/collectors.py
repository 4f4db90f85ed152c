"""Collectors that a test makes end with it: each holds a thread, and addresses for results."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

from inspect_lens._engine.collect import result_memory
from inspect_lens._engine.collect.collector import Collector
from inspect_lens._engine.collect.result_memory import ResultMemory

__all__ = ["close_collectors"]

_EACH, _MOST = 1 << 36, 3 << 43
"""Bytes of addresses, for a memory and for all of them; beyond, garbage is collected, which takes
half a second. Of the usual eight TiB a process would have too few for hundreds of front-ends."""
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
        if sum(len(memory.mapped) for memory in _memories) >= _MOST:
            gc.collect()
        reserve(self, *args, **kwargs)
        _memories.add(self)

    monkeypatch.setattr(result_memory, "_RESERVE", _EACH)
    monkeypatch.setattr(Collector, "__init__", remember)
    monkeypatch.setattr(ResultMemory, "__init__", count)
    yield
    for collector in made:
        collector.close()
