"""A threshold's false positive rate never stands without what it misses."""

from __future__ import annotations

from inspect_lens.probe import found_above, load_probe
from inspect_lens.reading import ProbeReader
from inspect_lens.reading._thresholds import promise, rates
from tests.kit.repository import ROOT

PROBE = str(ROOT / "probes/organism/deception-lr")


def test_the_recall_is_the_lowest_that_the_card_measured() -> None:
    reader = ProbeReader.of(PROBE)
    assert reader.threshold is not None
    measured = [e.recall for e in reader.probe.card.evaluations if e.recall is not None]
    said = rates(reader, reader.threshold.value)
    assert said == {"fpr": reader.threshold.fpr, "recall": round(min(measured), 4)}
    words = promise(reader, reader.threshold.value)
    assert f"{min(measured):.0%} to {max(measured):.0%} of the positives" in words


def test_an_operating_point_has_the_recall_that_was_measured_there() -> None:
    card = load_probe(PROBE).card
    points = [p for e in card.evaluations for p in e.recalls if p.fpr == 0.05]
    found = found_above(card, points[0].threshold)
    assert found is not None
    assert (found.lowest, found.highest) == (
        min(p.recall for p in points), max(p.recall for p in points)
    )  # fmt: skip
    assert found_above(card, points[0].threshold + 1.0) is None


def test_no_rate_is_promised_for_another_threshold_or_another_model() -> None:
    reader = ProbeReader.of(PROBE, check_model=False)
    assert reader.threshold is not None
    own = reader.threshold.value
    assert rates(reader, own + 0.5) == {}
    assert "not the card's" in promise(reader, own + 0.5)
    reader._others["org/other"] = "no rate of it holds for 'org/other'."
    assert rates(reader, own, "org/other") == {} == rates(reader, own)
    assert "no rate of it holds for 'org/other'" in promise(reader, own, "org/other")
    assert rates(reader, own, "organism/checkpoint")["fpr"] == reader.threshold.fpr
