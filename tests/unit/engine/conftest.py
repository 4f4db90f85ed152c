"""A worker and a front-end that talk over a real socket."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from inspect_lens._engine.collect.collector import Collector
from tests.kit.cases import DTYPES, rows_of
from tests.kit.collectors import close_collectors
from tests.kit.steps import Worker, exporter

__all__ = ["close_collectors"]


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


@pytest.fixture(scope="module")
def noisy() -> Iterator[dict[str, Worker]]:
    """A worker per dtype of the stream."""

    def make(dtype: torch.dtype) -> Any:
        return lambda *where: rows_of(*where).to(dtype)

    # Two requests find room for what grows of their sampled tokens; a third one does not.
    made = {
        name: Worker(exporter(), dtype, make(dtype), sum_rows=7) for name, dtype in DTYPES.items()
    }
    yield made
    for worker in made.values():
        worker.stepper.close()
