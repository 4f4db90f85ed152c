"""An operating point of a card is chosen by name, and acts with the rate and recall of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from inspect_lens.agents import probe_approver
from inspect_lens.errors import SpecError
from inspect_lens.probe import Threshold, card_points, choose_point, load_probe
from inspect_lens.probe.statistics._metrics import conformal_threshold
from inspect_lens.reading import ProbeReader, Suspicion
from inspect_lens.reading._thresholds import acting_value, promise
from inspect_lens.scorer import deception_probe, monitor_alarm, probe_score
from inspect_lens.solver import probe_gate
from tests.kit.repository import ROOT

PROBE = str(ROOT / "probes/organism/deception-lr")
CARD = load_probe(PROBE).card


def recalls(fpr: float) -> list[float]:
    """As the card's evaluations say."""
    return [at.recall for e in CARD.evaluations for at in e.recalls if at.fpr == fpr]


@pytest.mark.parametrize("fpr", [0.01, 0.05])
def test_a_point_acts_at_its_own_value_with_its_own_rate_and_recall(fpr: float) -> None:
    values = {at.threshold for e in CARD.evaluations for at in e.recalls if at.fpr == fpr}
    name = f"fpr={fpr:g}"
    reader = ProbeReader.of(PROBE, threshold=name)
    cut = acting_value(reader, name)
    assert {cut} == values
    assert promise(reader, cut).rates == {"fpr": fpr, "recall": round(min(recalls(fpr)), 4)}
    words = promise(reader, cut).text
    assert f"{fpr:.2%} of control samples" in words
    assert f"{min(recalls(fpr)):.0%} to {max(recalls(fpr)):.0%}" in words
    assert Suspicion.of(reader, unit="threshold", threshold=name)(cut) == 0.5
    # The number alone is as good as the name.
    assert promise(ProbeReader.of(PROBE, threshold=cut), cut).rates == promise(reader, cut).rates


def test_a_reader_of_another_probe_says_what_that_ones_card_says() -> None:
    reader = ProbeReader.of(PROBE)
    assert reader.threshold is not None
    asked = reader.threshold.value, reader.threshold.statistic
    assert reader.found_above(*asked) is not None
    bare = replace(load_probe(PROBE), card=CARD.model_copy(update={"evaluations": ()}))
    assert replace(reader, probe=bare).found_above(*asked) is None


def test_the_stricter_point_finds_less() -> None:
    strict, lax = card_points(CARD)
    assert strict.value > lax.value
    assert min(recalls(strict.fpr)) < min(recalls(lax.fpr))


@pytest.mark.parametrize(
    "make",
    [probe_score, deception_probe, monitor_alarm, probe_gate, probe_approver],
    ids=lambda make: make.__name__,
)
def test_an_unknown_point_is_refused_with_those_that_there_are(make: Callable[..., Any]) -> None:
    for name in ("fpr=0.02", "strict", "fpr=e", ""):
        with pytest.raises(SpecError, match=r"'fpr=0\.01' \(recall 91% or more\), 'fpr=0\.05'"):
            make(PROBE, threshold=name)
    make(PROBE, threshold="fpr=0.05")


def test_a_point_is_refused_where_its_rate_does_not_hold() -> None:
    for other in ({"positions": "all"}, {"selection": "last:3"}):
        with pytest.raises(SpecError, match="card's own layer, positions and selection"):
            ProbeReader.of(PROBE, threshold="fpr=0.05", **other)  # type: ignore[arg-type]
    with pytest.raises(SpecError, match="no threshold for the last of an answer"):
        ProbeReader.of(PROBE, threshold="fpr=0.05", pool="last")
    with pytest.raises(SpecError, match="no threshold for the maximum of the running mean"):
        monitor_alarm(PROBE, threshold="fpr=0.05", level="token", watch="mean")
    with pytest.raises(SpecError, match="pass a number to the metrics"):
        probe_score(PROBE, threshold=1.5)  # type: ignore[arg-type]
    with pytest.raises(SpecError, match="the server knows the numbers"):
        probe_gate("engine:lie", threshold="fpr=0.05")


def test_what_is_stored_goes_before_what_was_measured_and_doubt_leaves_a_point_out() -> None:
    scores = [float(i) for i in range(200)]
    stored = CARD.thresholds[0].model_copy(
        update={"value": conformal_threshold(scores, 0.05), "fpr": 0.05, "control": "new"}
    )
    assert isinstance(stored, Threshold)
    both = CARD.model_copy(update={"thresholds": (*CARD.thresholds, stored)})
    assert choose_point(both, "fpr=0.05")[:3] == (stored.value, 0.05, "new")
    first, *rest = CARD.evaluations
    moved = tuple(at.model_copy(update={"threshold": at.threshold + 1}) for at in first.recalls)
    doubtful = CARD.model_copy(
        update={"evaluations": (first.model_copy(update={"recalls": moved}), *rest)}
    )
    assert [point.fpr for point in card_points(doubtful)] == [0.01]
    bare = CARD.model_copy(update={"thresholds": (), "evaluations": ()})
    with pytest.raises(SpecError, match="has no threshold"):
        choose_point(bare, "fpr=0.01")


def test_no_rate_is_promised_for_another_threshold_or_another_model() -> None:
    reader = ProbeReader.of(PROBE, check_model=False)
    assert reader.threshold is not None
    own = reader.threshold.value
    assert promise(reader, own + 0.5).rates == {}
    assert "not the card's" in promise(reader, own + 0.5).text
    reader._others["org/other"] = "no rate of it holds for 'org/other'."
    assert promise(reader, own, "org/other").rates == {} == promise(reader, own).rates
    assert "no rate of it holds for 'org/other'" in promise(reader, own, "org/other").text
    assert promise(reader, own, "organism/checkpoint").rates["fpr"] == reader.threshold.fpr
