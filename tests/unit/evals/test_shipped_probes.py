"""The cards of the probes that are shipped say what this release would say of them."""

from __future__ import annotations

import re

import pytest

from inspect_lens.probe import fingerprint_model, load_probe
from inspect_lens.probe._render import render_card
from tests.kit.repository import ROOT

NAMES = ["deception-lr", "deception-md", "truth-mm"]


@pytest.mark.parametrize("name", NAMES)
def test_a_shipped_card_has_the_statistics_of_groups(name: str) -> None:
    probe = load_probe(ROOT / "probes" / "organism" / name)
    card = probe.card
    assert card.model is not None
    assert card.model.sha256 == fingerprint_model(str(ROOT / "organism" / "checkpoint"))
    (threshold,) = card.thresholds
    assert threshold.n_groups is not None
    assert threshold.n_above <= threshold.fpr * (threshold.n_control + 1)
    for found in card.evaluations:
        assert found.n_groups is not None
        assert found.n_seen == 0
        for taken in (found.auroc_interval, found.recall_interval, found.fpr_interval):
            # Groups hold several samples, and each interval says that it counts them.
            assert taken is None or "groups" in taken.method, taken
    # What has both classes has baselines, and each says what its test was.
    both = {e.name for e in card.evaluations if e.auroc is not None}
    assert {b.set for b in card.baselines} >= both
    for other in card.baselines:
        assert other.auroc is None or (other.test and other.auroc_interval is not None)
        taken = other.auroc_interval
        assert taken is None or taken.low < taken.high, "a point is no interval"
    page = (ROOT / "probes" / "organism" / name / "card.md").read_text(encoding="utf-8")
    assert page.strip() == render_card(card, sha256=probe.sha256).strip()


def test_documentation_names_the_threshold_of_the_card() -> None:
    threshold = load_probe(ROOT / "probes/organism/deception-lr").threshold
    assert threshold is not None
    for path in ("docs/how-to/agents.md", "src/inspect_lens/sentinel/_probe.py"):
        quoted = re.findall(r"(?:terminate|reject)_at=(0[.][0-9]+)", (ROOT / path).read_text())
        assert quoted
        assert {float(q) for q in quoted} == {round(threshold.value, 3)}, path
