"""Several files of one benchmark as a table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.pool import main, pooled


def result(**ratios: float | None) -> dict[str, Any]:
    return {
        "runs": [
            {"model": "m", "load": "8x256", "arm": arm.replace("_", "-"), "ratio_to_default": ratio}
            for arm, ratio in ratios.items()
        ]
    }


FILES = [
    result(default=1.0, idle=1.01, capture_1=1.02),
    result(default=1.0, idle=0.99, hf=None),
    result(default=1.0, idle=1.03),
]


def test_ratios_of_all_files_that_have_the_arm() -> None:
    assert pooled(FILES) == {("m", "8x256"): {"idle": [1.01, 0.99, 1.03], "capture-1": [1.02]}}


def test_the_table_has_the_median_and_how_far_files_lie_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = []
    for i, content in enumerate(FILES):
        names.append(str(tmp_path / f"{i}.json"))
        Path(names[-1]).write_text(json.dumps(content))
    assert main(names) == 0
    assert capsys.readouterr().out.splitlines() == [
        "| model, load | idle | capture-1 |",
        "|---|---|---|",
        "| m, 8x256 | 1.010 (0.990 to 1.030) | 1.020 |",
    ]
