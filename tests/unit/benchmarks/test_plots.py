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


@pytest.mark.parametrize("name", sorted(figure_files()))
def test_committed_pictures_are_current(name: str) -> None:
    committed = (ROOT / "docs/assets" / name).read_text(encoding="utf-8")
    assert committed == figure_files()[name], "run: python -m benchmarks.plots"


@pytest.mark.parametrize("palette", ["light", "dark"])
def test_numbers_in_the_picture_are_those_of_the_files(palette: str) -> None:
    svg = (ROOT / f"docs/assets/benchmarks-{palette}.svg").read_text(encoding="utf-8")
    # From seconds, not from the ratios in the files, and without the functions that draw.
    ratios = []
    for number in ("1", "2", "5-sites"):
        runs = result(f"cost-h200-{number}")["runs"]
        median = {
            run["arm"]: statistics.median(run["seconds"])
            for run in runs
            if run["load"] == "512x128"
        }
        ratios.append(median["capture-all"] / median["default"])
    wanted = [statistics.median(ratios), min(ratios), max(ratios)]
    assert shown(svg, "512 requests: capture, all layers") == pytest.approx(wanted, abs=6e-4)
    runs = result("eval")["runs"]
    agents = [run for run in runs if run["load"] == "agent of 20 turns"]
    plain = {run["round"]: run["seconds"] for run in agents if run["arm"] == "plain"}
    paired = [
        run["seconds"] / plain[run["round"]] for run in agents if run["arm"] == "capture-scored"
    ]
    said = shown(svg, "agents, 20 turns: capture and score")
    assert said == pytest.approx([statistics.median(paired), min(paired), max(paired)], abs=6e-4)


TECHNIQUES = {
    "ablate, clamp and add": "program",
    "the same three, in 256 different programs": "programs-256",
    "ablate a direction at all 32 layers": "ablate-all",
    "add a vector where a probe fires": "gate",
    "swap two directions": "swap",
    "rotate a plane": "rotate",
    "set a latent of a sparse autoencoder": "latent",
    "a low-rank edit of 8 directions": "low-rank",
    "mix in a stored row": "replace",
    "add a vector and give the norm back": "renormalise",
    "queries and keys": "qk-1",
    "logit lens of 4 layers, top 5": "logit-lens",
}


@pytest.mark.parametrize("said", TECHNIQUES)
def test_the_page_tells_what_each_technique_took(said: str) -> None:
    page = (ROOT / "docs/benchmarks.md").read_text(encoding="utf-8")
    (row,) = re.findall(rf"^\| {said} \| (.+) \|$", page, re.MULTILINE)
    told = dict(zip(("8x256", "256x128", "512x128"), map(float, row.split(" | ")), strict=True))
    runs = result("cost-h200-6-families")["runs"]
    median = {
        (run["load"], run["arm"]): statistics.median(run["seconds"])
        for run in runs
        if run["model"] == "llama-8b"
    }
    for load, ratio in told.items():
        took = median[load, TECHNIQUES[said]] / median[load, "default"]
        assert ratio == pytest.approx(took, abs=6e-3)


def test_dark_is_dark_and_light_is_light() -> None:
    for name, content in figure_files().items():
        back = re.search(r'<rect [^>]*fill="#(\w{2})(\w{2})(\w{2})"', content)
        assert back is not None
        luminance = statistics.fmean(int(part, 16) for part in back.groups())
        assert (luminance < 60) if "dark" in name else (luminance > 200)


def test_a_dot_lies_at_its_ratio_on_the_axis() -> None:
    rows = (Row("one", (1.0,)), Row("ten", (10.0,)), Row("between", (math.sqrt(10.0),)))
    root = ElementTree.fromstring(draw((Section("made up", rows),), "light"))
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
    page = (ROOT / "docs/benchmarks.md").read_text(encoding="utf-8")
    cited = set(re.findall(r"(?:results/|`)([\w-]+\.json)", page))
    assert {name for name in cited if not (RESULTS / name).exists()} <= {"result.json"}
