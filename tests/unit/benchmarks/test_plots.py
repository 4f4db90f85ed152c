"""The figure of the benchmark page shows the numbers of the committed results."""

from __future__ import annotations

import json
import math
import re
import statistics
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from benchmarks.plots import RESULTS, TIMES, Row, Section, draw, figure_files, main, sections
from tests.kit.repository import ROOT

SVG = "{http://www.w3.org/2000/svg}"


def texts(svg: str) -> list[str]:
    return [node.text or "" for node in ElementTree.fromstring(svg).iter(f"{SVG}text")]


def shown(svg: str, label: str) -> list[float]:
    """Numbers that the picture has to the right of a label."""
    found = texts(svg)
    return [float(n) for n in re.findall(r"[\d.]+", found[found.index(label) + 1])]


def result(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("palette", ["light", "dark"])
def test_numbers_in_the_picture_are_those_of_the_files(palette: str) -> None:
    svg = (ROOT / f"docs/assets/measurements-{palette}.svg").read_text(encoding="utf-8")
    # Without the functions that draw.
    took = medians("engine-h200", "512x128")
    (seconds,) = [
        run["seconds"]
        for run in result("engine-h200")["runs"]
        if (run["load"], run["arm"]) == ("512x128", "capture-all")
    ]
    ratios = [value / took["default"] for value in seconds]
    wanted = [statistics.median(ratios), min(ratios), max(ratios)]
    assert shown(svg, "512 requests: capture, all layers") == pytest.approx(wanted, abs=6e-4)


def medians(name: str, load: str) -> dict[str, float]:
    """Median seconds by arm: from the runs, without the functions that draw."""
    seconds: dict[str, list[float]] = {}
    for run in result(name)["runs"]:
        if run["load"] == load and run.get("model", "llama-8b") == "llama-8b":
            value = run["seconds"]
            seconds.setdefault(run["arm"], []).extend(value if isinstance(value, list) else [value])
    return {arm: statistics.median(values) for arm, values in seconds.items()}


def rows_of(page: str, heading: str, n: int = 2) -> dict[str, list[str]]:
    """Rows of the table with this heading: the first words, then the last `n`."""
    text = (ROOT / page).read_text(encoding="utf-8")
    table = text[text.index(heading) :].partition("\n\n")[0]
    cells = [line.strip("| ").split(" | ") for line in table.splitlines()[2:]]
    return {" ".join(row[:-n]): row[-n:] for row in cells if len(row) > n}


def test_figure_and_table_of_an_eval_are_of_the_same_runs_over_both_denominators() -> None:
    table = rows_of("docs/measurements.md", "| eval |", 3)
    svg = figure_files()["measurements-light.svg"]
    inspect, idle = (s for s in sections() if s.what == "Whole Inspect eval")
    assert (inspect.over, idle.over) == (
        "Inspect's vllm provider without the lens", "our provider with the lens idle",
    )  # fmt: skip
    known = {
        "256 connections": "256 connections 5", "32 connections": "32 connections 4",
        "agent of 20 turns": "agents, 20 turns 5",
    }  # fmt: skip
    arms = {"capture": "capture", "capture-scored": "capture and score",
            "probe-scored": "probe in the engine"}  # fmt: skip
    for load in ("256 connections", "32 connections", "agent of 20 turns"):
        took = medians("eval", load)
        for arm, said in arms.items():
            *told, loop = table[f"{known[load]} {said}"]
            busy = result("eval")["summary"][load][arm]["loop_cpu_s"]
            assert float(loop) == pytest.approx(busy, abs=0.051)
            for section, over, number in zip((inspect, idle), ("plain", "idle"), told, strict=True):
                ratio = took[arm] / took[over]
                label = f"{load.replace('agent of', 'agents,')}: {said}"
                (row,) = (row for row in section.rows if row.label == label)
                assert row.text in texts(svg)
                assert float(number) == pytest.approx(ratio, abs=5.1e-3)
                assert float(row.text.split()[0]) == pytest.approx(ratio, abs=5.1e-4)


def test_the_page_tells_what_each_technique_took() -> None:
    text = (ROOT / "docs/measurements.md").read_text(encoding="utf-8")
    for said, arm, name in (
        ("swap two directions", "swap", "edits-h200"),
        ("logit lens of 4 layers, top 5", "logit-lens", "engine-h200"),
    ):
        (row,) = re.findall(rf"^\| {said} \| (.+) \|$", text, re.MULTILINE)
        for load, told in zip(("8x256", "256x128", "512x128"), row.split(" | "), strict=True):
            took = medians(name, load)
            assert float(told) == pytest.approx(took[arm] / took["default"], abs=5.1e-3)


def test_every_ratio_names_its_denominator() -> None:
    svg = texts(figure_files()["measurements-light.svg"])
    assert [section.title for section in sections() if section.title not in svg] == []
    overs = {section.over for section in sections()}
    for page in ("README.md", "docs/benchmarks.md"):
        costs = rows_of(page, "| what you do | divided by |")
        assert costs
        for use in costs:
            assert any(use.endswith(over) for over in overs), f"{page}: {use}"


def test_a_dot_lies_at_its_ratio_on_the_axis() -> None:
    rows = (Row("one", (1.0,)), Row("ten", (10.0,)), Row("between", (math.sqrt(10.0),)))
    root = ElementTree.fromstring(draw((Section("made", "up", rows),), "light"))
    one, ten, between = (float(dot.attrib["cx"]) for dot in root.iter(f"{SVG}circle"))
    assert between == pytest.approx((one + ten) / 2, abs=0.2)
    ticks = {node.text: float(node.attrib["x"]) for node in root.iter(f"{SVG}text")}
    assert (ticks[f"1{TIMES}"], ticks[f"10{TIMES}"]) == (one, ten)


def test_every_row_has_a_run_and_files_are_written(tmp_path: Path) -> None:
    assert all(row.ratios for section in sections() for row in section.rows)
    assert main(["--out", str(tmp_path)]) == 0
    assert {p.name: p.read_text() for p in tmp_path.iterdir()} == figure_files()


def test_each_committed_result_is_cited_by_a_page() -> None:
    pages = "".join(p.read_text(encoding="utf-8") for p in (ROOT / "docs").rglob("*.md"))
    names = [path.name for path in RESULTS.iterdir()]
    assert [name for name in names if name not in pages] == []
    assert len(names) <= 16
    page = (ROOT / "docs/measurements.md").read_text(encoding="utf-8")
    cited = set(re.findall(r"(?:results/|`)([\w-]+\.json)", page))
    assert {name for name in cited if not (RESULTS / name).exists()} <= {"result.json"}


def test_the_page_tells_what_scales_took_that_share_a_prompt_and_what_others_took() -> None:
    text = (ROOT / "docs/measurements.md").read_text(encoding="utf-8")
    runs = result("engine-h200")["sweep"]["runs"]
    took = {run["arm"]: statistics.median(run["seconds"]) for run in runs}
    told = text[text.index("20 requests with one prompt") :].partition("\n\n")[0]
    plain, shared, own, times = (
        float(found) for found in re.findall(r"([\d.]+\d) (?:s\b|times\s+as)", told)
    )
    assert (plain, shared, own) == pytest.approx(
        (took["default"], took["sweep-completion"], took["sweep-all"]), abs=5.1e-3
    )
    assert times == pytest.approx(took["sweep-all"] / took["sweep-completion"], abs=0.051)


def test_the_page_tells_how_much_longer_the_event_loop_is_busy() -> None:
    text = (ROOT / "docs/measurements.md").read_text(encoding="utf-8")
    told = text[text.index("The difference is work of Inspect's process") :].partition("\n\n")[0]
    found = [float(number) for number in re.findall(r"([\d.]+\d) s\b", told)]
    summary = result("eval")["summary"].values()
    wanted = [arms["probe-scored"]["loop_cpu_s"] - arms["idle"]["loop_cpu_s"] for arms in summary]
    assert found == pytest.approx(wanted, abs=5.1e-3)
