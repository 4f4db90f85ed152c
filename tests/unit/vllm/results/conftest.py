from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.unit.vllm.results.test_ahead import Engine


@pytest.fixture
def engine() -> Iterator[Engine]:
    """Of which nothing is open, and nobody waits, when a test has ended."""
    made = Engine()
    yield made
    assert made.results.n_open == made.collector.n_open == 0
    assert not made.collector._pending
    assert made.collector.notifier.n_waiting == 0
    made.worker.stepper.close()
    made.collector.close()
