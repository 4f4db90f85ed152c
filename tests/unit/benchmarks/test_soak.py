"""The soak draws the same mix each time, and its judge sees each thing that may go wrong."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.soak import allowed_differences, judge

FLOOR: dict[str, Any] = {"requests": 200, "different": 0, "unsteady_prompts": []}
KINDS = ("plain", "steered", "captured", "steered-captured", "aborted")


def found(**changes: Any) -> dict[str, Any]:
    right: dict[str, Any] = {
        "requests": dict.fromkeys(KINDS, 100),
        "different": dict.fromkeys(KINDS, 0),
        "floor": FLOOR,
        "left_early": 90,
        "rows": 1000,
        "largest_row_error": 3e-6,
        "errors": [],
        "n_errors": 0,
        "left": {"requests": 0, "steering_rows": 0},
        "descriptors": 0,
        "shared_bytes": 0,
        "processes": 0,
        "lives": True,
    }
    return right | changes


def test_a_clean_mix_has_no_problem() -> None:
    assert judge(FLOOR, found(), "torch.float32") == []


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"different": dict.fromkeys(KINDS, 0) | {"plain": 1}}, "1 of 100 plain"),
        ({"different": dict.fromkeys(KINDS, 0) | {"steered": 1}}, "1 of 100 steered"),
        ({"n_errors": 2, "errors": ["x"]}, "2 requests failed"),
        ({"rows": 0}, "no row"),
        ({"largest_row_error": 1e-3}, "error of a row"),
        ({"largest_row_error": float("nan")}, "error of a row"),
        ({"left": {"requests": 1}}, "1 requests left"),
        ({"descriptors": 1}, "descriptors grew"),
        ({"shared_bytes": 4096}, "shared_bytes grew"),
        ({"processes": 1}, "processes grew"),
        ({"lives": False}, "plain request differs"),
        ({"left_early": 0}, "no client"),
    ],
)
def test_each_fault_is_a_problem(changes: dict[str, Any], word: str) -> None:
    problems = judge(FLOOR, found(**changes), "torch.float32")
    assert len(problems) == 1
    assert word in problems[0]


def test_what_batching_alone_does_is_allowed_for() -> None:
    assert allowed_differences(1000, 0, 48) == 0
    # Exact interval of 2 of 48 at 95%: 0.5% to 14.3%.
    assert allowed_differences(1000, 2, 48) == 142
    assert allowed_differences(1000, 48, 48) == 1000
    noisy = FLOOR | {"different": 9, "unsteady_prompts": [3, 40]}
    few = found(different=dict.fromkeys(KINDS, 0) | {"plain": 14})
    many = found(different=dict.fromkeys(KINDS, 0) | {"plain": 15})
    for floor, own in ((noisy, FLOOR), (FLOOR, noisy)):
        assert judge(floor, few | {"floor": own}, "torch.float32") == []
        assert len(judge(floor, many | {"floor": own}, "torch.float32")) == 1
