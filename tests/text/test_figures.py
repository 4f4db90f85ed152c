"""Numbers in the figures of the documentation are those of the cards and results they show."""

from __future__ import annotations

import inspect
import json
import re
import statistics
from functools import cache
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from inspect_lens.spec import SITE_TABLE
from inspect_lens.train import train_probe
from tests.kit.figures import FIGURES, figure_files
from tests.kit.live_page import PAGE
from tests.kit.page import read_page
from tests.kit.repository import ROOT
from tests.kit.screenshot import SHOTS, box_numbers, numbers_of

SVG = "{http://www.w3.org/2000/svg}"
PROBE = ROOT / "probes/organism/deception-lr"


def read(path: str) -> Any:
    return json.loads((ROOT / path).read_text(encoding="utf-8"))


def card(name: str = "deception-lr") -> dict[str, Any]:
    found: dict[str, Any] = read(f"probes/organism/{name}/card.json")["card"]
    return found


@cache
def root(name: str, palette: str = "light") -> ElementTree.Element:
    return ElementTree.parse(ROOT / f"docs/assets/{name}-{palette}.svg").getroot()


def texts(name: str) -> list[str]:
    return [node.text or "" for node in root(name).iter(f"{SVG}text")]


def marks(name: str) -> list[str]:
    """What points say when the mouse is over them."""
    return [node.text or "" for dot in root(name).iter(f"{SVG}circle") for node in dot]


def marks_with_dots(name: str) -> list[tuple[str, str]]:
    """What points say, and their colours."""
    dots = root(name).iter(f"{SVG}circle")
    return [(node.text or "", dot.attrib["fill"]) for dot in dots for node in dot]


def scores() -> dict[str, tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]]:
    made = json.loads((PROBE / "scores.json").read_text(encoding="utf-8"))
    return {n: (np.array(list(s["labels"])) == "1", np.array(s["scores"])) for n, s in made.items()}


def test_the_scores_are_those_that_the_card_was_measured_on() -> None:
    limit = card()["thresholds"][0]
    labels, values = scores()["control"]
    assert len(values) == limit["n_control"]
    assert not labels.any()
    assert int((values > limit["value"]).sum()) == limit["n_above"]
    for e in card()["evaluations"]:
        labels, values = scores()[e["name"]]
        positive, negative = values[labels], values[~labels]
        assert (len(positive), len(negative)) == (e["n_positive"], e["n_negative"])
        assert float((negative > limit["value"]).mean()) == pytest.approx(e["fpr"])
        if len(positive):
            assert float((positive > limit["value"]).mean()) == pytest.approx(e["recall"])
            pairs = positive[:, None] - negative
            area = float((pairs > 0).mean() + 0.5 * (pairs == 0).mean())
            assert area == pytest.approx(e["auroc"], abs=2e-4)


def test_roc_and_histogram_say_what_the_card_says() -> None:
    for e in card()["evaluations"]:
        if e["auroc"] is not None:
            (said,) = (text for text in texts("roc") if text.startswith(e["name"]))
            low, high = e["auroc_interval"]["low"], e["auroc_interval"]["high"]
            assert f"AUROC {e['auroc']:.3f} [{low:.3f}, {high:.3f}]" in said
            assert f"recall {e['recall']:.3f}" in said
    limit = card()["thresholds"][0]
    e = card()["evaluations"][0]
    shown = " / ".join(texts("scores"))
    assert f"control answers: {limit['n_above']} of {limit['n_control']} above" in shown
    assert f"lies, held-out phrasings: {round(e['recall'] * e['n_positive'])} of 236" in shown
    assert f"threshold {limit['value']:.3f}" in shown


def test_a_point_of_the_roc_lies_at_its_rate_on_the_logarithmic_axis() -> None:
    ticks = [n for n in root("roc").iter(f"{SVG}text") if n.attrib["text-anchor"] == "middle"]
    at = {n.text: float(n.attrib["x"]) for n in ticks}
    assert at["0.01"] - at["0.001"] == pytest.approx(at["1"] - at["0.1"], abs=0.2)
    dots = [d for d in root("roc").iter(f"{SVG}circle") if d.attrib["r"] == "6"]
    assert [float(d.attrib["cx"]) for d in dots] == pytest.approx([at["0.001"]] * 3)  # no alarm


def test_layers_show_each_layer_of_the_sweep() -> None:
    for s in card()["sweep"]:
        if s["pool"] == card()["pool"]:
            said = [text for text in marks("layers") if text.startswith(f"layer {s['layer']}:")]
            for value, text in zip((s["auroc"], s["recall"]), said, strict=True):
                assert f"{value:.3f}" in text
    rings = [d for d in root("layers").iter(f"{SVG}circle") if d.attrib["fill"] == "none"]
    assert len(rings) == 2 * len(card()["layers"])


def test_baselines_and_transfer_have_the_numbers_of_the_cards() -> None:
    shown = texts("baselines")
    for e in card()["evaluations"]:
        for b in e["baselines"] if e["auroc"] is not None else ():
            after = shown[shown.index(e["name"]) :]
            said = after[after.index(b["name"]) + 1]
            low, high = b["auroc_interval"]["low"], b["auroc_interval"]["high"]
            assert said == f"{b['auroc']:.3f} [{low:.3f}, {high:.3f}]"
    cells = [text for text in texts("transfer") if re.search(r"\d\.\d{3}", text)]
    wanted = []
    for name in ("deception-lr", "deception-md", "truth-mm"):
        for e in card(name)["evaluations"]:
            if e["auroc"] is not None:
                wanted += [f"{e['auroc']:.3f}", f"recall {e['recall']:.3f}"]
                wanted += [f"false alarms {e['fpr']:.3f}"]
    assert cells == wanted


def test_reliability_covers_every_answer() -> None:
    found = [re.findall(r"[\d.]+", text) for text in marks("reliability")]
    assert sum(int(n) for n, _, _ in found) == len(scores()["heldout_phrasing"][1])
    lies = sum(int(n) * float(seen) for n, _, seen in found)
    assert lies == pytest.approx(card()["evaluations"][0]["n_positive"], abs=0.5)
    assert any(f"error {card()['calibration']['ece']:.3f}" in text for text in texts("reliability"))


def test_steering_and_oracle_have_the_numbers_of_their_files() -> None:
    found = read("vectors/organism/truth/sweep.json")
    shown = marks("steering")
    for kind, said in (("vector", "the vector"), ("random", "random, same length")):
        for curves in (found["curves"], found["coherent"]):
            for p in curves[kind]["points"]:
                assert f"{said}: {p['mean']:.3f} at {p['scale']:g}" in shown
        flips = found["prompts_flipped_at_any_scale"][kind]
        assert f"{said}: changed {flips['flipped']} of {flips['of']} answers" in texts("steering")
    rows = read("oracles/organism/card.json")["results"]
    for name in ("lying", "truth", "attribute"):
        words = texts("oracle")[texts("oracle").index(name) + 1].split()
        (row,) = (
            r for r in rows
            if (r["task"], r["split"], r["wording"]) == (name, "heldout_phrasing", "trained")
            and r["inputs"] == "completion" and r["layer"] == (4 if name == "lying" else 3)
        )  # fmt: skip
        best = max(row[c]["accuracy"] for c in ("text_only", "shuffled", "random", "other_sample"))
        assert (words[0], words[2]) == (f"{row['oracle']['accuracy']:.2f}", f"{best:.2f}")


def test_conformance_has_the_verdicts_of_the_results() -> None:
    verdicts = [text for text in texts("conformance") if text in ("pass", "fail")]
    ours, theirs = (
        ["pass" if r["passed"] else "fail" for r in read(f"conformance/results/{name}")["results"]]
        for name in ("inspect-lens-cpu-2026-11-22.json", "vllm-lens-cpu-2026-11-22.json")
    )
    assert (verdicts[::2], verdicts[1::2]) == (ours, theirs)


def test_positions_and_lens_draw_what_the_pages_say() -> None:
    green = [n for n in root("positions").iter(f"{SVG}rect") if n.attrib["fill"] == "#0b7a55"]
    rows = [n.attrib["y"] for n in green]
    assert sorted(rows.count(y) for y in set(rows)) == [1, 4, 6, 10]  # last_prompt, …, all
    shown = texts("lens")
    page = (ROOT / "docs/how-to/lenses.md").read_text(encoding="utf-8")
    for layer, honest, lie in re.findall(r"layer (\d)   honest: (\w+) +lie: (\w+)", page):
        at = shown.index(f"after layer {layer}")
        assert shown[at + 1 : at + 3] == [honest, lie]


def test_the_found_lie_has_the_scores_of_the_log() -> None:
    samples = {s["id"]: s for s in read_page(PAGE).facts["samples"]}
    lie, honest, limit = samples["demo-0007"], samples["demo-0006"], card()["thresholds"][0]
    assert (lie["label"], honest["label"]) == (1, 0)
    shown = texts("found")
    assert f"▲ {lie['values'][0]:.3f}, above the threshold" in shown
    assert f"▽ {honest['values'][0]:.3f}, below" in shown
    bars = [n.text or "" for box in root("found").iter(f"{SVG}rect") for n in box]
    values = [float(bar.rpartition(":")[2]) for bar in bars]
    half = len(values) // 2
    for k, sample in enumerate((lie, honest)):
        assert max(values[k * half :][:half]) == pytest.approx(sample["values"][0], abs=2e-3)
    assert [value > limit["value"] for value in values].count(True) == 1, "one token finds the lie"
    assert any(f"set on {limit['n_control']} other honest answers" in text for text in shown)
    assert f"of which {limit['n_above']} are above it." in shown


def test_the_block_has_every_site_in_the_order_of_the_table() -> None:
    shown = texts("sites")
    at = [
        next(
            i for i, text in enumerate(shown) if text.split(" ")[0] == name and shown[i + 1] == what
        )
        for name, (what, *_) in SITE_TABLE.items()
    ]
    assert at == sorted(at)
    blue = [m.partition(":")[0] for m, dot in marks_with_dots("sites") if dot == "#1f5fa8"]
    assert blue == [name for name, info in SITE_TABLE.items() if info.is_wide]


def test_the_four_sets_are_those_of_the_card() -> None:
    shown = texts("sets")
    n_train = card()["training"]["n_positive"] + card()["training"]["n_negative"]
    judged = sum(e["n_positive"] + e["n_negative"] for e in card()["evaluations"])
    wanted = (
        n_train,
        card()["training"]["selection_n"],
        card()["thresholds"][0]["n_control"],
        judged,
    )
    for name, n in zip(("train", "selection", "control", "held_out"), wanted, strict=True):
        assert name in inspect.signature(train_probe).parameters
        assert shown[shown.index(name) + 1] == f"{n} samples"


@pytest.mark.parametrize("name", sorted(FIGURES))
def test_a_figure_fits_and_can_be_read(name: str) -> None:
    """No text leaves the picture, none is tiny, and dark ones are dark."""
    for palette in ("light", "dark"):
        found = root(name, palette)
        width = float(found.attrib["viewBox"].split()[2])
        back = found.find(f"{SVG}rect")
        assert back is not None
        colour = [int(back.attrib["fill"][i : i + 2], 16) for i in (1, 3, 5)]
        assert (statistics.fmean(colour) < 60) == (palette == "dark")
        for node in found.iter(f"{SVG}text"):
            size = float(node.attrib.get("font-size", 13))
            assert size >= 10
            if "transform" not in node.attrib:
                length = 0.55 * size * len(node.text or "")
                share = {"start": 0.0, "middle": 0.5, "end": 1.0}[node.attrib["text-anchor"]]
                left = float(node.attrib["x"]) - share * length
                assert left >= -2, node.text
                assert left + length <= width + 2, node.text


def test_screenshots_show_the_numbers_that_are_there_now() -> None:
    for name, shot in SHOTS.items():
        noted = read(f"docs/assets/{Path(name).stem}.json")
        assert noted["source"] == str(shot.source.relative_to(ROOT))
        assert noted["shows"] == numbers_of(shot.source), "run: python -m tests.kit.screenshot"


def test_the_box_of_the_report_has_the_numbers_of_the_card() -> None:
    cells = box_numbers()
    for e in card()["evaluations"]:
        row = cells[cells.index(e["name"]) :][:5]
        rate = e["fpr_interval"]
        assert row[3] == f"{e['fpr']:.3f} [{rate['low']:.3f}, {rate['high']:.3f}]"
        if e["auroc"] is not None:
            best = max(b["auroc"] for b in e["baselines"])
            assert row[1].startswith(f"{e['auroc']:.3f} ")
            assert row[4].endswith(f"{best:.3f}")


def test_pictures_are_many_and_small() -> None:
    made = [p for p in (ROOT / "docs/assets").iterdir() if p.suffix in (".png", ".svg")]
    kinds = {re.sub(r"-(?:dark|light)$", "", p.stem) for p in made}
    assert len(kinds) >= 14
    assert sum(p.stat().st_size for p in made) < 1_000_000
    assert {Path(path).name for path in figure_files()} <= {p.name for p in made}
