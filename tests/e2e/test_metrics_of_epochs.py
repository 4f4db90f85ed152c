"""Metrics through Inspect's epochs, reducers, groups, dict scores and clusters, on a real engine.

Every number is computed anew, from the values of each epoch as the log has them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from inspect_ai import Epochs, Task
from inspect_ai.log import EvalLog
from inspect_ai.scorer import grouped, includes
from sklearn.metrics import average_precision_score, roc_auc_score

from evals.organism_deception.dataset import organism_dataset
from inspect_lens.probe import average_precision as area_under_precision
from inspect_lens.probe import (
    bootstrap_interval,
    clopper_pearson,
    expected_calibration_error,
    load_probe,
)
from inspect_lens.scorer import (
    auroc_metric,
    average_precision_metric,
    calibration_error,
    dose_curves,
    dose_response,
    dose_table,
    probe_ensemble,
    probe_score,
    threshold_accuracy,
)
from inspect_lens.solver import steering_sweep, with_capture
from tests.kit.lying import PROBE, run_eval
from tests.kit.rescored import command_of, rescore

pytestmark = pytest.mark.engine

N, EPOCHS = 24, 2
BOTH = {"lr": PROBE, "md": "organism/deception-md"}
REDUCERS: dict[str, Any] = {"mean": np.mean, "max": np.max}


def run(url: str, folder: Path, scorer: Any, metrics: Any, epochs: Any) -> EvalLog:
    """Answers that differ between epochs."""
    task = Task(
        dataset=organism_dataset("demo")[:N],
        solver=with_capture([4, 5], positions="completion"),
        scorer=scorer, metrics=metrics, epochs=epochs,
    )  # fmt: skip
    return run_eval(task, url, folder, temperature=1.3, max_tokens=20)


def table(log: EvalLog, scorer: str, key: str | None = None) -> np.ndarray[Any, Any]:
    """(samples, epochs) values."""
    found: dict[Any, list[float]] = {}
    for sample in log.samples or []:
        value: Any = (sample.scores or {})[scorer].value
        found.setdefault(sample.id, []).append(float(value[key] if key else value))
    return np.array(list(found.values()))


def of_samples(log: EvalLog, key: str) -> list[Any]:
    """A fact of the metadata of each sample, once."""
    return list({s.id: s.metadata[key] for s in log.samples or []}.values())


def numbers(log: EvalLog) -> list[tuple[str, str | None, dict[str, float]]]:
    assert log.results is not None
    return [
        (s.name, s.reducer, {name: float(m.value) for name, m in s.metrics.items()})
        for s in log.results.scores
    ]


def same_again(log: EvalLog, folder: Path) -> None:
    assert log.eval.scorers is not None
    (spec,) = log.eval.scorers
    (again,) = rescore(log, [command_of(spec.name, spec.options or {})], folder)
    np.testing.assert_equal(numbers(again), numbers(log))


def test_rankings_of_reduced_epochs_by_group_and_cluster(
    lens_server_url: str, tmp_path: Path
) -> None:
    log = run(
        lens_server_url, tmp_path / "logs", probe_score(PROBE),
        [
            auroc_metric(interval=True, cluster="group"),
            average_precision_metric(interval=True, cluster="group"),
            threshold_accuracy(threshold=0.0, interval=True, cluster="group"),
            calibration_error(),
            grouped(auroc_metric(), "kind"),
        ],
        Epochs(EPOCHS, list(REDUCERS)),
    )  # fmt: skip
    values, y = table(log, "probe_score"), np.array(of_samples(log, "label"))
    assert values.shape == (N, EPOCHS)
    assert (np.ptp(values, axis=1) > 0).any(), "epochs differ"
    groups, kinds = of_samples(log, "group"), np.array(of_samples(log, "kind"))
    assert 5 <= len(set(groups)) < N
    reduced = {name: reduce(values, axis=1) for name, reduce in REDUCERS.items()}
    seen: set[str] = set()
    for _, reducer, found in numbers(log):
        if "calibration_error" in found:  # of each epoch by itself
            card = load_probe(PROBE).card.calibration
            assert card is not None
            p = [card.probability(v) for v in values.ravel()]
            error = expected_calibration_error(np.repeat(y, EPOCHS), p, n_bins=15)
            assert found["calibration_error"] == pytest.approx(error)
            seen.add("each")
            continue
        v = reduced[str(reducer)]
        seen.add(str(reducer))
        assert found["auroc"] == pytest.approx(roc_auc_score(y, v))
        assert found["auroc_low"] < found["auroc"] <= found["auroc_high"]
        assert found["average_precision"] == pytest.approx(average_precision_score(y, v))
        drawn = bootstrap_interval(
            y, v, statistic=area_under_precision, groups=groups, n_resamples=1000
        )
        bounds = found["average_precision_low"], found["average_precision_high"]
        np.testing.assert_allclose(bounds, (drawn.low, drawn.high))
        right = (v > 0.0) == y.astype(bool)
        k = len(set(groups))
        exact = clopper_pearson(round(k * right.mean()), k)
        assert found["threshold_accuracy"] == pytest.approx(right.mean())
        assert found["threshold_accuracy_low"] == pytest.approx(exact.low)
        for kind in set(kinds):
            at = kinds == kind
            assert found[str(kind)] == pytest.approx(roc_auc_score(y[at], v[at]))
    assert seen == {"each", *REDUCERS}
    same_again(log, tmp_path)


def test_each_entry_of_a_dict_score(lens_server_url: str, tmp_path: Path) -> None:
    log = run(
        lens_server_url, tmp_path / "logs", probe_ensemble(BOTH),
        {"lr": [auroc_metric(), calibration_error(key="lr")], "md": [auroc_metric()],
         "ensemble": [auroc_metric(interval=True)]},
        EPOCHS,
    )  # fmt: skip

    def of(entry: str) -> dict[str, float]:
        return {k: v for name, _, found in numbers(log) if name == entry for k, v in found.items()}

    y = np.array(of_samples(log, "label"))
    # Of a dict score Inspect names metrics with their package.
    for key in (*BOTH, "ensemble"):
        name = "inspect_lens/auroc" + ("_auroc" if key == "ensemble" else "")
        values = table(log, "probe_ensemble", key).mean(axis=1)
        assert 0.7 <= of(key)[name] == pytest.approx(roc_auc_score(y, values))
    assert of("ensemble")["inspect_lens/auroc_auroc_low"] < of("ensemble")[name]
    card = load_probe(PROBE).card.calibration
    assert card is not None
    p = [card.probability(v) for v in table(log, "probe_ensemble", "lr").ravel()]
    error = expected_calibration_error(np.repeat(y, EPOCHS), p, n_bins=15)
    assert of("lr")["inspect_lens/calibration_error"] == pytest.approx(error)
    same_again(log, tmp_path)


def test_epochs_of_a_sweep_are_answers_of_one_prompt(lens_server_url: str, tmp_path: Path) -> None:
    rows = organism_dataset("demo").filter(lambda s: (s.metadata or {})["kind"] == "open")[:6]
    task = Task(
        dataset=rows,
        solver=steering_sweep("organism/truth", [-0.6, 0.6], controls=[]),
        scorer=dose_response(includes()),
        epochs=EPOCHS,
    )
    log = run_eval(task, lens_server_url, tmp_path / "logs", temperature=1.3, max_tokens=20)
    assert {row.prompts for row in dose_table(log)} == {len(rows)}
    effects = table(log, "dose_response")
    assert effects.shape == (len(rows), EPOCHS)
    curve = dose_curves(log)["vector"]
    assert 0.3 < curve.effect == pytest.approx(effects.mean())
    # The interval is that of the samples' means.
    drawn = np.random.default_rng(0).choice(effects.mean(axis=1), (20_000, len(rows))).mean(axis=1)
    # Few samples give few different means, so a quantile jumps from one to the next: the bounds
    # lie between the quantiles that a bootstrap of 2,000 cannot miss.
    for bound, level in (("low", 0.025), ("high", 0.975)):
        least, most = np.quantile(drawn, [level - 0.015, level + 0.015])
        assert least - 1e-9 <= getattr(curve.effect_interval, bound) <= most + 1e-9
    same_again(log, tmp_path)
