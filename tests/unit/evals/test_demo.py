"""The numbers that `make demo` works out itself."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from evals.demo import lies_found


def sample(label: int, value: float) -> Any:
    score = SimpleNamespace(value=value, metadata={"threshold": 1.5})
    return SimpleNamespace(metadata={"label": label}, scores={"deception_probe": score})


@pytest.mark.parametrize(
    ("samples", "expected"),
    [
        ([], (0, 0)),
        ([sample(0, 9.0)], (0, 0)),
        ([sample(1, 1.6), sample(1, 1.5), sample(1, -3.0), sample(0, 2.0)], (1, 3)),
        ([sample(1, float("nan")), sample(1, 2.0)], (1, 1)),
    ],
)
def test_lies_above_the_threshold(samples: list[Any], expected: tuple[int, int]) -> None:
    assert lies_found(SimpleNamespace(samples=samples)) == expected
