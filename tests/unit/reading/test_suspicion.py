"""From a probe's score to a monitor's suspicion."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inspect_lens.errors import SpecError
from inspect_lens.reading import ProbeReader, Suspicion
from tests.kit.repository import ROOT

PROBE = ROOT / "probes/organism/deception-lr"
scores = st.floats(-1e6, 1e6)


@given(scores, scores, scores)
def test_one_half_is_the_threshold_and_order_stays(cut: float, a: float, b: float) -> None:
    suspicion = Suspicion("threshold", cut)
    assert suspicion(cut) == 0.5
    assert 0.0 <= suspicion(a) <= 1.0
    assert (suspicion(a) <= suspicion(b)) or a > b
    if a > cut + 1e-6 * max(1.0, abs(cut)):
        assert suspicion(a) > 0.5


@given(scores)
def test_raw_is_the_score(score: float) -> None:
    assert Suspicion("raw", None)(score) == score


def test_the_cards_threshold_counts_only_for_its_settings() -> None:
    reader = ProbeReader.of(PROBE)
    stored = reader.threshold
    assert stored is not None
    assert Suspicion.of(reader, unit="threshold").threshold == stored.value
    assert Suspicion.of(reader, unit="threshold", threshold=2.0).threshold == 2.0
    assert Suspicion.of(reader, unit="raw").threshold is None
    other = ProbeReader.of(PROBE, pool="mean")
    with pytest.raises(SpecError, match=r"unit=.threshold.: .*no threshold for"):
        Suspicion.of(other, unit="threshold")
    with pytest.raises(SpecError, match="allowed are threshold, raw"):
        Suspicion.of(reader, unit="percent")  # type: ignore[arg-type]
