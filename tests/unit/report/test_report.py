from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from inspect_lens._cli._output import Made
from inspect_lens.errors import SpecError
from inspect_lens.probe import (
    Baseline,
    Calibration,
    Evaluation,
    Interval,
    LayerScore,
    Probe,
    ProbeCard,
    Threshold,
    Transfer,
)
from inspect_lens.probe.card._files import render_card
from inspect_lens.view import ReportSet, cases, write_report

I = Interval(low=0.81, high=0.97, method="x")  # noqa: E741
LOW = Interval(low=0.1, high=0.3, method="x")


def scored(name: str, n: int = 80, *, tokens: bool = False, seed: int = 0) -> ReportSet:
    rng = np.random.default_rng(seed)
    labels = np.arange(n) % 2
    per_token = [rng.normal(size=4) + 2 * y for y in labels]
    return ReportSet(
        name=name, labels=labels, scores=np.array([t.mean() for t in per_token]),
        groups=[str(i // 4) for i in range(n)], ids=[f"{name}-{i}" for i in range(n)],
        tokens=[["It", " is", " <b>", "\n"]] * n if tokens else (),
        token_scores=per_token if tokens else (),
    )  # fmt: skip


def probe() -> Probe:
    card = ProbeCard(
        name="m/<script>", description="finds & flags", layers=(2,), hidden=3, method="LR",
        sweep=tuple(
            LayerScore(layer=i, auroc=0.5 + i / 8, separation=i, recall=i / 8, recall_interval=I)
            for i in range(4)
        ),
        thresholds=(Threshold(value=1.1, fpr=0.01, control="c", n_control=400, n_above=3,
                              interval=I),),
        evaluations=(Evaluation(name="test", sha256="ab", n_positive=40, n_negative=40,
                                disjoint_by="group", auroc=0.912, auroc_interval=I,
                                recall=0.2, recall_interval=LOW, fpr=0.0125, fpr_interval=LOW,
                                baselines=(Baseline(name="length", set="test", auroc=0.55,
                                                    auroc_interval=I, difference=I,
                                                    p_value=0.0004),)),),
        transfers=(Transfer(set="far", transfers=False, bar=0.7, statement="It does not."),),
        calibration=Calibration(method="platt", set="dev", n=99, slope=1.5, intercept=-1.0),
        command="inspect-lens probe train",
    )  # fmt: skip
    return Probe.from_direction([1.0, 0.0, 0.0], card=card)


class Reader(HTMLParser):
    """Checks that tags nest, and gathers what a reader sees."""

    def __init__(self) -> None:
        super().__init__()
        self.stack: list[str] = []
        self.text: list[str] = []
        self.images = 0
        self.outside: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in ("meta", "img"):
            self.stack.append(tag)
        for name, value in attrs:
            if name in ("src", "href") and not (value or "").startswith("data:"):
                self.outside.append(value or "")
        self.images += tag == "img"

    def handle_endtag(self, tag: str) -> None:
        assert self.stack.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def test_one_file_says_it_all(tmp_path: Path) -> None:
    sets = [scored("test", tokens=True), scored("far", seed=1)]
    path = write_report(probe(), tmp_path / "r", sets, n_resamples=30)
    html = path.read_text(encoding="utf-8")
    reader = Reader()
    reader.feed(html)
    assert reader.stack == []
    assert reader.outside == [], "nothing is loaded from elsewhere"
    assert reader.images == 5
    text = " ".join(reader.text)
    for wanted in (
        "m/<script>", "finds & flags", "0.912 [0.810, 0.970]", "length", "0.0004", "It does not.",
        "misses 80% of the positives of test", "below the floor of 0.5", "positive, best",
        "negative, worst", probe().sha256, " <b>", "inspect-lens probe train", "1.1",
    ):  # fmt: skip
        assert wanted in text, wanted
    assert "<script>" not in html
    assert not re.search(r"https?://", html)


def test_the_box_on_top_says_what_decides(tmp_path: Path) -> None:
    reader = Reader()
    html = write_report(probe(), tmp_path, [scored("test")], n_resamples=0).read_text("utf-8")
    reader.feed(html)
    text = " ".join(reader.text)
    box = text[text.index("Warning") : text.index("Held-out sets")]
    assert "This probe reads the activations of" in text[: text.index("Warning")]
    for wanted in (
        "misses 80%", "AUROC", "0.912 [0.810, 0.970]", "recall at the threshold",
        "0.200 [0.100, 0.300]", "honest answers above the threshold", "0.013 [0.100, 0.300]",
        "best baseline", "length 0.550", "labels from",
    ):  # fmt: skip
        assert wanted in box, wanted
    fine = probe().card.evaluations[0].model_copy(update={"recall": 0.9, "recall_interval": I})
    good = replace(probe(), card=probe().card.model_copy(update={"evaluations": (fine,)}))
    made = write_report(good, tmp_path / "b", [], n_resamples=0)
    assert "Warning" not in made.read_text("utf-8")


def test_no_p_is_smaller_than_samples_can_show(tmp_path: Path) -> None:
    card = probe().card
    tiny = [b.model_copy(update={"p_value": p}) for b in card.baselines for p in (0.0, 1.7e-273)]
    shown = card.evaluations[0].model_copy(update={"baselines": tuple(tiny)})
    sure = replace(probe(), card=card.model_copy(update={"evaluations": (shown,)}))
    html = write_report(sure, tmp_path, [], n_resamples=0).read_text(encoding="utf-8")
    assert html.count("&lt; 1e-4") == 2
    assert "e-273" not in html
    assert render_card(sure.card, sha256="0").count("| < 1e-4 |") == 2
    said = Made(probe=sure, folder="p", evaluations=sure.card.evaluations).lines()
    lines = [x for x in said if "baseline length" in x]
    assert len(lines) == 2
    assert all(x.endswith("p < 1e-4 that the probe is no better") for x in lines)


def test_too_few_groups_are_said_wherever_numbers_are(tmp_path: Path) -> None:
    few = "too few groups (2; 1 with positives, 1 with negatives)"
    card = probe().card
    update = {
        "evaluations": (
            card.evaluations[0].model_copy(
                update={
                    "n_groups": 2,
                    "too_few": few,
                    "baselines": (
                        card.baselines[0].model_copy(update={"p_value": None, "test": few}),
                    ),
                }
            ),
        ),
        "thresholds": (card.thresholds[0].model_copy(update={"n_groups": 50}),),
    }
    unsure = replace(probe(), card=card.model_copy(update=update))
    html = write_report(unsure, tmp_path, [], n_resamples=0).read_text(encoding="utf-8")
    said = "\n".join(
        Made(probe=unsure, folder="p", evaluations=unsure.card.evaluations).lines()
    )  # fmt: skip
    for text in (html, render_card(unsure.card, sha256="0"), said):
        assert f"{few}; no verdict" in text or f"{few}: no verdict" in text
        assert text.count(few) == 2
        assert "only 50 independent groups, and it takes 300 to show a rate of 0.01" in text


def test_what_the_probe_has_seen_is_marked(tmp_path: Path) -> None:
    seen, new = replace(scored("train"), n_seen=60), replace(scored("far", seed=1), n_seen=0)
    assert (seen.title, new.title, scored("old").title) == ("train (60 of 80 seen)", "far", "old")
    marked = write_report(probe(), tmp_path / "a", [seen, new], n_resamples=0)
    plain = write_report(probe(), tmp_path / "b", [scored("train"), new], n_resamples=0)
    html = marked.read_text(encoding="utf-8")
    assert "train: 60 of 80 samples took part in making the probe" in html
    assert "Held-out sets" not in html
    assert "<h2>Held-out sets</h2>" in plain.read_text(encoding="utf-8")
    # The legend says it, too.
    drawn = [(p.parent / "figures/roc.png").read_bytes() for p in (marked, plain)]
    assert drawn[0] != drawn[1]


def test_a_set_of_one_group_has_a_curve_without_a_band(tmp_path: Path) -> None:
    whole, one = scored("test"), replace(scored("far", seed=1), groups=["only"] * 80)
    path = write_report(probe(), tmp_path / "a", [whole, one], n_resamples=20)
    html = path.read_text(encoding="utf-8")
    assert "bootstrap bands. far has no band: too few groups (1; 1 with positives, 1 with" in html
    assert "test has no band" not in html
    # The curve alone: what is drawn is what a report without draws shows of it.
    made = [
        write_report(probe(), tmp_path / n, [one], n_resamples=k) for n, k in (("b", 20), ("c", 0))
    ]
    drawn, plain = ((p.parent / "figures/roc.png").read_bytes() for p in made)
    assert drawn == plain
    assert "bands" not in made[1].read_text(encoding="utf-8")


def test_the_figures_are_pngs_and_repeatable(tmp_path: Path) -> None:
    sets = [scored("test", tokens=True)]
    for folder in ("a", "b"):
        write_report(probe(), tmp_path / folder, sets, n_resamples=20)
    names = {p.name for p in (tmp_path / "a/figures").iterdir()}
    assert names == {
        "roc.png", "scores.png", "layers.png", "calibration.png", "tokens.png", "baselines.png",
    }  # fmt: skip
    for name in names:
        content = (tmp_path / "a/figures" / name).read_bytes()
        assert content.startswith(b"\x89PNG")
        assert content == (tmp_path / "b/figures" / name).read_bytes()


def test_a_bare_probe_of_one_class_still_has_a_report(tmp_path: Path) -> None:
    bare = Probe.from_direction([1.0], card=ProbeCard(name="t/p", layers=(0,), hidden=1))
    control = ReportSet(name="control", labels=np.zeros(5), scores=np.arange(5.0))
    write_report(bare, tmp_path, [control], n_resamples=0)
    assert [p.name for p in (tmp_path / "figures").iterdir()] == ["scores.png"]


def test_cases_are_the_clearest_and_the_worst() -> None:
    data = ReportSet(
        name="t", labels=[0, 0, 0, 1, 1, 1], scores=[0, 1, 5, -3, 2, 9], ids=list("abcdef"),
        tokens=[["x"]] * 6, token_scores=[np.ones(1)] * 6,
    )  # fmt: skip
    made = {(c.verdict, c.id) for c in cases(data, each=1)}
    assert made == {
        ("positive, best", "f"), ("positive, worst", "d"), ("negative, worst", "c"),
        ("negative, best", "a"),
    }  # fmt: skip
    assert len(cases(data, each=9)) == 6
    with pytest.raises(SpecError, match="one each"):
        ReportSet(name="t", labels=[0, 1], scores=[0.0])
