"""Average precision, calibration error and intervals, through Inspect's reducers."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from inspect_ai import Epochs, Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.log import EvalLog
from inspect_ai.scorer import SampleScore, Score, Scorer, Target, grouped, scorer
from inspect_ai.solver import TaskState
from sklearn.metrics import average_precision_score

from inspect_lens.errors import SpecError
from inspect_lens.probe import expected_calibration_error
from inspect_lens.scorer import (
    average_precision_metric,
    calibration_error,
    recall_at_fpr_metric,
    threshold_accuracy,
)
from tests.kit.mock_evals import judge, planted_probe, platt

N, EPOCHS = 24, 3
LABELS = [int(i % 3 == 0) for i in range(N)]
CALIBRATION = {"method": "platt", "slope": 2.0, "intercept": -0.5, "set": "made up"}


def value(i: int, epoch: int) -> float:
    return float(np.random.default_rng([i, epoch]).normal(LABELS[i]))


def run(folder: Path, metrics: Any, *, epochs: Any = None, kind: str = "score") -> EvalLog:
    """A real eval whose scorer returns `value`, as a number, a probability or a dict."""

    @scorer(metrics=metrics, name="hand_made")
    def hand_made() -> Scorer:
        async def score(state: TaskState, target: Target) -> Score:
            v = value(int(state.sample_id), state.epoch)
            facts: dict[str, Any] = {"calibration": CALIBRATION}
            if kind == "dict":
                facts = {"calibrations": {"a": CALIBRATION}, "thresholds": {"a": 0.5, "b": -0.5}}
                return Score(value={"a": v, "b": -v}, metadata=facts)
            return Score(value=sigmoid(v) if kind == "probability" else v, metadata=facts)

        return score

    task = Task(
        dataset=[
            Sample(input="x", id=i, metadata={"label": LABELS[i], "split": "ab"[i % 2]})
            for i in range(N)
        ],
        scorer=hand_made(),
        epochs=epochs,
    )
    (log,) = eval(task, model=judge("no"), display="none", log_dir=str(folder))
    assert log.status == "success", log.error
    return log


def sigmoid(z: float) -> float:
    return 1 / (1 + math.exp(-z))


def ece(pairs: list[tuple[int, float]]) -> float:
    return expected_calibration_error([y for y, _ in pairs], [p for _, p in pairs])


def by_view(log: EvalLog) -> dict[tuple[str | None, str], float]:
    assert log.results is not None
    return {
        (each.reducer, name): m.value
        for each in log.results.scores
        for name, m in each.metrics.items()
    }


def test_probabilities_are_judged_epoch_by_epoch_and_rankings_after_the_reducer(
    tmp_path: Path,
) -> None:
    metrics = [average_precision_metric(), calibration_error()]
    log = run(tmp_path, metrics, epochs=Epochs(EPOCHS, ["mean", "max"]))
    got = by_view(log)
    every = [
        (LABELS[i], sigmoid(2 * value(i, e) - 0.5)) for i in range(N) for e in range(1, EPOCHS + 1)
    ]
    assert got[None, "calibration_error"] == pytest.approx(ece(every))
    for name, reduce in (("mean", np.mean), ("max", np.max)):
        reduced = [float(reduce([value(i, e) for e in (1, 2, 3)])) for i in range(N)]
        expected = average_precision_score(LABELS, reduced)
        assert got[name, "average_precision"] == pytest.approx(expected)


def test_grouped_judges_the_probability_of_the_reduced_score_not_of_the_first_epoch(
    tmp_path: Path,
) -> None:
    metrics = [grouped(calibration_error(), "split"), grouped(average_precision_metric(), "split")]
    log = run(tmp_path, metrics, epochs=Epochs(EPOCHS, "mean"))
    assert log.results is not None
    groups = [m for m in log.results.scores[0].metrics.items() if m[0].startswith("a")]
    means = [float(np.mean([value(i, e) for e in (1, 2, 3)])) for i in range(N)]
    mine = [i for i in range(N) if i % 2 == 0]
    expected = ece([(LABELS[i], sigmoid(2 * means[i] - 0.5)) for i in mine])
    assert groups[0][1].value == pytest.approx(expected)
    assert log.results.scores[0].metrics["all"].value == pytest.approx(
        ece([(LABELS[i], sigmoid(2 * means[i] - 0.5)) for i in range(N)])
    )


def test_dict_scores_find_their_facts_by_key(tmp_path: Path) -> None:
    metrics = {
        "a": [average_precision_metric(), calibration_error(key="a"), threshold_accuracy(key="a")],
        "b": [average_precision_metric(), calibration_error(key="b"), threshold_accuracy(key="b")],
    }
    log = run(tmp_path, metrics, kind="dict")
    assert log.results is not None
    found: dict[str, dict[str, float]] = {}
    for each in log.results.scores:
        more = {k.rpartition("/")[2]: m.value for k, m in each.metrics.items()}
        found.setdefault(each.name, {}).update(more)
    values = [value(i, 1) for i in range(N)]
    pairs = [(y, sigmoid(2 * v - 0.5)) for y, v in zip(LABELS, values, strict=True)]
    assert found["a"]["calibration_error"] == pytest.approx(ece(pairs))
    assert math.isnan(found["b"]["calibration_error"])  # none is carried for b
    right = np.mean([(v > 0.5) == y for y, v in zip(LABELS, values, strict=True)])
    assert found["a"]["threshold_accuracy"] == pytest.approx(right)
    right = np.mean([(-v > -0.5) == y for y, v in zip(LABELS, values, strict=True)])
    assert found["b"]["threshold_accuracy"] == pytest.approx(right)


def test_intervals_through_an_eval(tmp_path: Path) -> None:
    metrics = [
        average_precision_metric(interval=True),
        recall_at_fpr_metric(0.2, allow_few=True, interval=True),
        threshold_accuracy(0.5, interval=True),
        calibration_error(value="probability", interval=True),
    ]
    got = {name: v for (_, name), v in by_view(run(tmp_path, metrics, kind="probability")).items()}
    for name in ("average_precision", "recall_at_fpr", "threshold_accuracy"):
        assert got[f"{name}_low"] <= got[name] <= got[f"{name}_high"], name
        assert got[f"{name}_low"] < got[f"{name}_high"]
    pairs = [(LABELS[i], sigmoid(value(i, 1))) for i in range(N)]
    assert got["calibration_error"] == pytest.approx(ece(pairs))
    assert 0 < got["calibration_error_low"] < got["calibration_error_high"] < 1


def sample(v: Any, label: Any = 1, **metadata: Any) -> SampleScore:
    facts = metadata or {"calibration": CALIBRATION}
    return SampleScore(
        score=Score(value=v, metadata=facts), sample_id="s", sample_metadata={"label": label}
    )


def test_the_interval_of_the_calibration_error_draws_whole_samples() -> None:
    rng = np.random.default_rng(0)
    rows = [(i, int(rng.random() < 0.5)) for i in range(30)]
    single = [
        SampleScore(score=Score(value=0.9), sample_id=str(i), sample_metadata={"label": y})
        for i, y in rows
    ]
    metric: Any = calibration_error(value="probability", interval=True)
    one, four = metric(single), metric([s for s in single for _ in range(4)])
    # The same texts four times over are no more evidence than once.
    assert four["calibration_error_high"] == pytest.approx(one["calibration_error_high"])


def test_nan_rules(caplog: pytest.LogCaptureFixture) -> None:
    assert math.isnan(calibration_error()([]))  # type: ignore[arg-type]
    assert math.isnan(average_precision_metric()([sample(1.0, 0)]))  # type: ignore[arg-type]
    got: Any = calibration_error(interval=True)([sample(1.0, threshold=1)])
    assert all(math.isnan(v) for v in got.values())
    assert "carry no calibration" in caplog.text
    isotonic = sample(1.0, calibration={"method": "isotonic", "set": "x"})
    assert math.isnan(calibration_error()([isotonic]))  # type: ignore[arg-type]
    # A value that is missing or NaN is left out, and never read as zero.
    given = [sample(math.nan, 0), sample(0.2, 0), sample(0.9, 1)]
    assert average_precision_metric()(given) == 1.0  # type: ignore[arg-type]
    assert "have no number and are left out" in caplog.text


def test_what_is_no_number_is_refused_by_name() -> None:
    with pytest.raises(SpecError, match="is a dict"):
        average_precision_metric()([sample({"a": 1.0})])
    with pytest.raises(SpecError, match="is a list"):
        average_precision_metric()([sample([1.0, 2.0])])
    with pytest.raises(SpecError, match="value='yes'"):
        average_precision_metric()([sample("yes")])
    with pytest.raises(SpecError, match="carry 2 different ones"):
        calibration_error()([sample(1.0), sample(1.0, calibration={"method": "platt", "set": ""})])
    with pytest.raises(SpecError, match="allowed are score, probability"):
        calibration_error(value="odds")([sample(1.0)])  # type: ignore[arg-type]


def test_a_probe_can_lend_its_calibration(tmp_path: Path) -> None:
    made = planted_probe(calibration=platt(2.0, -0.5)).save(tmp_path / "p")
    given = [sample(0.3, 0), sample(0.6, 1)]
    lent: Any = calibration_error(probe=str(made))(given)
    assert lent == calibration_error()(given)
    plain = planted_probe().save(tmp_path / "plain")
    assert math.isnan(calibration_error(probe=str(plain))(given))  # type: ignore[arg-type]
