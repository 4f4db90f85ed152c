"""Figures are drawn from a result, and the same result gives the same file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.plots import main, ratio_rows, together

RUNS = [
    {"model": "m", "load": "8x256", "arm": arm, "seconds": seconds}
    for arm, seconds in {
        "steer": [2.2],
        "default": [2.0, 1.0, 3.0],
        "vllm-lens": [8.0, 12.0],
        "idle": [2.0],
    }.items()
]


def test_rows_follow_the_order_of_the_arms_and_the_default_median() -> None:
    rows = ratio_rows(RUNS, "8x256")
    assert [arm for arm, _ in rows] == ["default", "vllm-lens", "idle", "steer"]
    assert dict(rows)["vllm-lens"] == [4.0, 6.0]
    assert ratio_rows(RUNS[:1], "8x256") == []


def test_each_model_gets_its_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    steps = [
        {"model": "m", "load": "8x256", "arm": arm, "sequences": 8, "ms_median": ms}
        for arm, ms in (("default", 4.5), ("idle", 4.6))
    ]
    path = tmp_path / "r.json"
    path.write_text(json.dumps({"runs": RUNS, "steps": steps}))
    images = []
    for _ in range(2):
        assert main([str(path), "--out", str(tmp_path)]) == 0
        images.append([p.read_bytes() for p in sorted(tmp_path.glob("*.png"))])
    assert images[0] == images[1]
    assert len(images[0]) == 2
    assert capsys.readouterr().out.count("benchmark-") == 4


def test_several_runs_are_drawn_each_over_its_own_default(tmp_path: Path) -> None:
    slower = [run | {"seconds": [3 * s for s in run["seconds"]]} for run in RUNS[1:]]
    other = [{"model": "m", "load": "256x128", "arm": "idle", "seconds": [1.0]}]
    merged = together([{"runs": RUNS}, {"runs": slower}, {"runs": other}])
    assert dict(ratio_rows(merged["runs"], "8x256")) == {
        "default": 2 * [1.0, 0.5, 1.5],
        "vllm-lens": 2 * [4.0, 6.0],
        "idle": [1.0, 1.0],
        "steer": [1.1],
    }
    assert ratio_rows(merged["runs"], "256x128") == [], "a run without its default says nothing"
    paths = [tmp_path / f"{i}.json" for i in range(2)]
    for path, runs in zip(paths, (RUNS, slower), strict=True):
        path.write_text(json.dumps({"runs": runs}))
    assert main([*map(str, paths), "--out", str(tmp_path)]) == 0
    assert [p.name for p in tmp_path.glob("*.png")] == ["benchmark-ratios-m.png"]
