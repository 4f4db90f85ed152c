"""A worker and a front-end that talk over a real socket."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from inspect_lens._engine._collector import Collector
from tests.kit.steps import Worker, exporter


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    made = Collector()
    yield made
    made.close()


@pytest.fixture
def worker() -> Iterator[Worker]:
    made = Worker(exporter())
    yield made
    made.stepper.close()
