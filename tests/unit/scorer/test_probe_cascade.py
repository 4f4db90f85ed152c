from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from inspect_lens.errors import SpecError
from inspect_lens.reading import ProbeReader
from inspect_lens.scorer import monitor_alarm, probe_cascade, probe_score
from inspect_lens.scorer._cascade import _values
from tests.kit.mock_evals import call, judge, metric_values, planted_probe, platt, run, scores

PROBE = planted_probe(calibration=platt(1.0), description="The answer is false on purpose.")
VALUES = [-5.0, -1.0, 0.5, 5.0]


def outputs() -> list[Any]:
    return [call([v, v]) for v in VALUES]


def sigmoid(z: float) -> float:
    return 1 / (1 + math.exp(-z))


def test_the_judge_reads_the_uncertain_band_only(tmp_path: Path) -> None:
    asked = judge("80", "20")
    cascade = probe_cascade(PROBE, band=(0.2, 0.8), judge=asked)
    log = run(outputs(), cascade, folder=tmp_path, max_samples=1)
    got = scores(log)
    assert [s.metadata and s.metadata["judged"] for s in got] == [False, True, True, False]
    assert [s.value for s in got] == pytest.approx([sigmoid(-5), 0.8, 0.2, sigmoid(5)])
    assert got[1].metadata is not None
    assert got[1].metadata["judge"] == "mockllm/judge"
    assert got[1].metadata["probe_value"] == -1.0
    assert got[1].metadata["threshold"] == 0.5
    assert [s.answer for s in got] == ["not flagged", "flagged", "not flagged", "flagged"]
    assert metric_values(log)["judged_share"] == 0.5


def test_a_band_of_scores_needs_no_calibration(tmp_path: Path) -> None:
    plain = planted_probe(description="It lies.")
    cascade = probe_cascade(plain, band=(0.0, 1.0), unit="score", judge=judge("90"))
    got = scores(run(outputs(), cascade, folder=tmp_path))
    assert [s.value for s in got] == [0.0, 0.0, 0.9, 1.0]


def test_the_top_share_is_that_of_other_samples(tmp_path: Path) -> None:
    cascade = probe_cascade(PROBE, share=0.25, reference=[0.0, 0.1, 0.2, 0.5], judge=judge("70"))
    got = scores(run(outputs(), cascade, folder=tmp_path))
    assert [s.value for s in got] == [0.0, 0.0, 0.7, 0.7]
    # Alarms of a monitor, and what another pool makes of the same answers, are other numbers.
    others = [probe_score(PROBE), monitor_alarm(PROBE), probe_score(PROBE, pool="ema:0.5")]
    earlier = run(outputs(), others, folder=tmp_path / "earlier")
    assert _values(ProbeReader.of(PROBE), earlier.location) == VALUES
    cascade = probe_cascade(PROBE, share=0.5, reference=earlier.location, judge=judge("70"))
    got = scores(run(outputs(), cascade, folder=tmp_path))
    assert [s.metadata and s.metadata["judged"] for s in got] == [False, False, True, True]


def test_the_role_of_the_eval_judges_and_its_words_are_kept(tmp_path: Path) -> None:
    heard: list[str] = []
    grader = judge("I would say 60/100.", heard=heard)
    log = run(outputs(), probe_cascade(PROBE), folder=tmp_path, model_roles={"grader": grader})
    (_, got, _, _) = scores(log)
    assert got.value == pytest.approx(0.6)
    assert got.metadata is not None
    assert got.metadata["judge_answer"] == "I would say 60/100."
    assert len(heard) == 2
    assert "The answer is false on purpose." in heard[0]
    assert any("[user] 1" in prompt for prompt in heard)
    assert "an answer" in heard[0]


def test_a_judge_without_a_number_leaves_the_sample_unscored(tmp_path: Path) -> None:
    log = run(outputs(), probe_cascade(PROBE, judge=judge("cannot tell")), folder=tmp_path)
    got = scores(log)
    assert [s.reason for s in got] == [None, "grader_failed", "grader_failed", None]
    assert got[1].metadata is not None
    assert got[1].metadata["judged"] is True


def test_the_threshold_of_the_probe_is_the_point_that_was_named(tmp_path: Path) -> None:
    (held,) = PROBE.card.thresholds
    lax = held.model_copy(update={"value": 0.25, "fpr": 0.05})
    probe = planted_probe(calibration=platt(1.0), description="x", thresholds=(held, lax))
    for point, value in ((None, 2.5), ("fpr=0.05", 0.25)):
        cascade = probe_cascade(probe, threshold=point, judge=judge("0"))
        got = scores(run(outputs(), cascade, folder=tmp_path))
        assert {(s.metadata or {})["probe_threshold"] for s in got} == {value}
    with pytest.raises(SpecError, match="name of an operating point"):
        probe_cascade(probe, threshold=0.25)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"share": 0.1}, "reference missing"),
        ({"reference": [1.0]}, "reference given"),
        ({"share": 0.1, "reference": [1.0], "band": (0, 1)}, "allowed is a band, or a share"),
        ({"share": 2.0, "reference": [1.0]}, "allowed is 0 to 1"),
        ({"share": 0.1, "reference": []}, "holds no score"),
        ({"band": (0.9, 0.1)}, "lowest before highest"),
        ({"unit": "score"}, "has to be given"),
        ({"unit": "rank"}, "unit='rank'; allowed are probability, score"),
    ],
)
def test_wrong_arguments_are_refused(options: dict[str, Any], match: str) -> None:
    with pytest.raises(SpecError, match=match):
        probe_cascade(PROBE, **options)


def test_what_the_card_lacks_is_named() -> None:
    with pytest.raises(SpecError, match="has no calibration"):
        probe_cascade(planted_probe(description="x"))
    with pytest.raises(SpecError, match="has no description"):
        probe_cascade(planted_probe(calibration=platt()))
