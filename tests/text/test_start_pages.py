"""Numbers of README and first pages that no generator writes are those of committed results."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import yaml

from tests.kit.repository import ROOT

CONFORMANCE = {"inspect_lens": "inspect-lens", "vllm-lens 1.3.0": "vllm-lens"}


def words_of(page: str) -> str:
    """The page with each run of spaces as one."""
    return " ".join((ROOT / page).read_text(encoding="utf-8").split())


def verdicts(backend: str) -> list[bool]:
    path = ROOT / f"conformance/results/{backend}-cpu-2026-11-22.json"
    return [row["passed"] for row in json.loads(path.read_text(encoding="utf-8"))["results"]]


def card() -> dict[str, Any]:
    path = ROOT / "probes/organism/deception-lr/card.json"
    made: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))["card"]
    return made


@pytest.mark.parametrize("page", ["README.md", "docs/compare.md"])
def test_conformance_counts_are_those_of_the_results(page: str) -> None:
    ours, theirs = (verdicts(backend) for backend in CONFORMANCE.values())
    said = words_of(page)
    assert len(ours) == len(theirs) == 10
    found = re.findall(r"(\d+) of 10", said)
    assert found == [str(sum(ours)), str(sum(theirs))]


def test_rows_of_the_conformance_table_are_those_of_the_results() -> None:
    ours, theirs = (verdicts(backend) for backend in CONFORMANCE.values())
    text = (ROOT / "docs/compare.md").read_text(encoding="utf-8")
    count = {"| pass | pass |": 0, "| pass | fail |": 0}
    for row in (line for line in text.splitlines() if " · " in line):
        tests, verdict = row.split(" | ", 1)
        count[f"| {verdict}"] += tests.count(" · ") + 1
    assert all(ours)
    assert list(count.values()) == [sum(theirs), len(theirs) - sum(theirs)]


def test_what_the_quickstart_says_of_its_figure_is_on_the_card() -> None:
    (judged,) = (e for e in card()["evaluations"] if e["name"] == "heldout_phrasing")
    missed = round((1 - judged["recall"]) * judged["n_positive"])
    assert f"{judged['auroc']:.3f}" == "1.000"
    said = f"to three digits, and still misses {missed} of {judged['n_positive']} lies"
    assert f"1.000 on new phrasings, {said}" in words_of("docs/quickstart.md")


def test_the_disk_that_the_sets_of_the_first_model_take() -> None:
    said = words_of("docs/first-model.md")
    commands = re.findall(r"probe collect .+? --out acts/(\w+)", said)
    assert commands == ["train", "control", "heldout", "control"]
    tokens = 400 * 64 + 500 * 128 + 400 * 64
    layers, width, bytes_of_bfloat16 = 3, 4096, 2
    assert f"take {tokens * layers * width * bytes_of_bfloat16 / 1e9:.1f} GB" in said


def test_the_site_has_a_page_in_the_navigation_once_and_not_many() -> None:
    nav = yaml.safe_load(re.split(r"^nav:", (ROOT / "mkdocs.yml").read_text(), flags=re.M)[1])
    found = [page for group in nav for pages in group.values() for page in pages]
    assert len(found) == len(set(found)) <= 48


def test_links_of_the_readme_reach_their_headings() -> None:
    links = re.findall(
        r"\]\(([\w/.-]+)(?:#([\w-]+))?\)", (ROOT / "README.md").read_text(encoding="utf-8")
    )
    assert any(anchor for _, anchor in links)
    for page, anchor in links:
        assert (ROOT / page).exists(), page
        headings = re.findall(r"^#+ (.+)$", (ROOT / page).read_text(encoding="utf-8"), re.MULTILINE)
        slugs = {re.sub(r"[^\w\s-]", "", one).lower().replace(" ", "-") for one in headings}
        assert not anchor or anchor in slugs, f"{page}#{anchor}"
