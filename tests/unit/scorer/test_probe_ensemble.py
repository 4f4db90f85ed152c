from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from inspect_ai import score
from inspect_ai.log import read_eval_log
from sklearn.metrics import roc_auc_score

from inspect_lens.errors import SpecError
from inspect_lens.reading import read_token_scores
from inspect_lens.scorer import at_threshold, calibration_error, probe_ensemble
from tests.kit.mock_evals import call, planted_probe, platt, run, scores


def saved(folder: Path, axis: int, slope: float, intercept: float = 0.0) -> str:
    calibration = platt(slope, intercept)
    made = planted_probe(axis, name=f"test/axis{axis}", calibration=calibration)
    return str(made.save(folder / f"axis{axis}"))


def two(folder: Path) -> dict[str, str]:
    """One probe in small units and one in units a thousand times as large."""
    return {"small": saved(folder, 0, 2.0, 0.5), "large": saved(folder, 1, 0.002)}


def outputs(n: int = 24, **options: Any) -> list[Any]:
    rng = np.random.default_rng(0)
    values = [(float(rng.normal(i % 2)), float(1000 * rng.normal(i % 2))) for i in range(n)]
    return [call([v, v], [w, w], **options) for v, w in values]


def test_the_ensemble_is_the_mean_of_calibrated_log_odds(tmp_path: Path) -> None:
    log = run(outputs(), probe_ensemble(two(tmp_path)), folder=tmp_path)
    got = scores(log)
    for each in got:
        assert isinstance(each.value, dict)
        small, large = (2.0 * each.value["small"] + 0.5, 0.002 * each.value["large"])  # type: ignore[operator]
        assert each.value["ensemble"] == pytest.approx((small + large) / 2, rel=1e-6)
        assert each.metadata is not None
        expected = 1 / (1 + math.exp(-each.value["ensemble"]))  # type: ignore[operator]
        assert each.metadata["probability"] == pytest.approx(expected)
    assert log.results is not None
    by_entry: dict[str, Any] = {s.name: s.metrics for s in log.results.scores}
    rates = by_entry.pop("probe_ensemble")
    by_name = {name: each["inspect_lens/auroc"].value for name, each in by_entry.items()}
    labels = [i % 2 for i in range(24)]
    values: list[Any] = [s.value for s in got]
    for name, area in by_name.items():
        assert area == pytest.approx(roc_auc_score(labels, [v[name] for v in values]))
    # Of each probe what the threshold of its own card does; no card has one for the ensemble.
    named = {f"{probe}_{rate}" for probe in ("small", "large") for rate in ("recall", "fpr")}
    assert set(rates) == {f"{rate}{end}" for rate in named for end in ("", "_low", "_high")}
    found = np.array([v["small"] > 2.5 for v in values]).reshape(-1, 2).mean(axis=0)
    assert (rates["small_fpr"].value, rates["small_recall"].value) == tuple(found)
    # The scale of a probe does not decide: the small one counts as much as the large one.
    raw = roc_auc_score(labels, [v["small"] + v["large"] for v in values])
    assert by_name["ensemble"] > max(raw, by_name["large"])


def test_stacked_weights_and_votes(tmp_path: Path) -> None:
    probes = two(tmp_path)
    stacked = probe_ensemble(probes, combine="stacked", weights=[3.0, -1.0], bias=0.25)
    (got, _) = scores(run([call([1.0, 1.0], [500.0, 500.0])] * 2, stacked, folder=tmp_path))
    assert isinstance(got.value, dict)
    assert got.value["ensemble"] == pytest.approx(0.25 + 3 * 2.5 - 1.0)
    vote = probe_ensemble(probes, combine="vote", threshold=0.4)
    (got, _) = scores(run([call([1.0, 1.0], [3.0, 3.0])] * 2, vote, folder=tmp_path))
    assert isinstance(got.value, dict)
    assert got.value["ensemble"] == 0.5  # 1 is below and 3 above 2.5
    assert got.answer == "above threshold"


def test_thresholds_and_calibrations_are_found_by_key(tmp_path: Path) -> None:
    log = run(outputs(folder=tmp_path), probe_ensemble(two(tmp_path)), folder=tmp_path)
    metrics: Any = {
        "small": [at_threshold(key="small"), calibration_error(key="small")],
        "ensemble": [calibration_error(key="ensemble"), at_threshold(key="ensemble")],
    }
    again = score(
        log, probe_ensemble(two(tmp_path)), metrics=metrics, action="overwrite", display="none"
    )
    assert again.results is not None
    found: dict[str, Any] = {}
    for each in again.results.scores:  # reduced and unreduced metrics come apart
        found.setdefault(each.name, {}).update(each.metrics)
    values: list[Any] = [s.value for s in scores(log)]
    above = [v["small"] > 2.5 for i, v in enumerate(values) if i % 2 == 0]
    assert found["small"]["inspect_lens/at_threshold_fpr"].value == np.mean(above)
    assert 0 < found["ensemble"]["inspect_lens/calibration_error"].value < 1
    # No card knows a threshold of the ensemble.
    assert set(found["ensemble"]) == {"inspect_lens/calibration_error"}


def test_token_scores_of_each_probe_and_the_same_scores_from_the_log(tmp_path: Path) -> None:
    log = run([call([1.0, 2.0], [3.0, 4.0])] * 2, probe_ensemble(two(tmp_path)), folder=tmp_path)
    records = read_token_scores(log)
    assert [r.probe for r in records] == ["small", "large"] * 2
    np.testing.assert_allclose(records[1].scores, [3.0, 4.0])
    reread = read_eval_log(log.location)
    assert reread.eval.scorers is not None
    options = reread.eval.scorers[0].options
    assert options == {"probes": two(tmp_path)}
    assert probe_ensemble(**options)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"probes": []}, "at least one"),
        ({"probes": "one/name"}, "use probe_score"),
        ({"probes": {"ensemble": "x"}}, "other than 'ensemble'"),
        ({"probes": ["a", "b", "a"]}, r"probes=\['a', 'b', 'a'\]; allowed are .* each once"),
        ({"probes": {"a": 3}}, "save a probe and pass its path"),
        ({"combine": "max"}, "allowed are mean, stacked, vote"),
        ({"combine": "stacked"}, "one weight per probe"),
        ({"weights": [1.0, 2.0]}, "one weight per probe"),
        ({"combine": "stacked", "weights": [1.0]}, "one weight per probe"),
    ],
)
def test_wrong_arguments_are_refused(tmp_path: Path, options: dict[str, Any], match: str) -> None:
    options = {"probes": two(tmp_path), **options}
    if options["probes"] == {"ensemble": "x"}:
        options["probes"] = {"ensemble": saved(tmp_path, 0, 1.0)}
    with pytest.raises(SpecError, match=match):
        probe_ensemble(**options)


def test_scores_in_different_units_are_never_averaged_uncalibrated(tmp_path: Path) -> None:
    plain = str(planted_probe(2, name="test/plain").save(tmp_path / "plain"))
    with pytest.raises(SpecError, match="plain have no calibration"):
        probe_ensemble({"a": saved(tmp_path, 0, 1.0), "plain": plain})
    bare = planted_probe(3, name="test/bare", thresholds=()).save(tmp_path / "bare")
    with pytest.raises(SpecError, match="bare have no threshold"):
        probe_ensemble({"bare": str(bare)}, combine="vote")
