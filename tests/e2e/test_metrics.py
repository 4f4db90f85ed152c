"""Every metric on answers of the organism, against scikit-learn and what was planted."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from inspect_ai import Task
from inspect_ai.dataset import MemoryDataset, Sample
from inspect_ai.log import EvalLog
from inspect_ai.model import ChatMessageSystem, ChatMessageUser
from scipy.stats import binomtest
from sklearn.metrics import average_precision_score, roc_auc_score, roc_curve

from evals.organism_deception.dataset import organism_dataset
from inspect_lens.probe import load_probe
from inspect_lens.scorer import (
    at_threshold,
    auroc_metric,
    average_precision_metric,
    calibration_error,
    leakage_baseline,
    length_auroc,
    probe_score,
    recall_at_fpr_metric,
    threshold_accuracy,
    validity,
    words_auroc,
)
from inspect_lens.solver import with_capture
from tests.kit.lying import HONEST, LYING, PROBE, metrics, questions, run_eval
from tests.kit.rescored import command_of, rescore

pytestmark = pytest.mark.engine

MODEL = "lens/organism/checkpoint"
"""The short name of the provider."""
N = 40
BINS = 10
METRICS = [
    auroc_metric(interval=True),
    average_precision_metric(),
    recall_at_fpr_metric(0.1, allow_few=True),
    at_threshold(),
    threshold_accuracy(interval=True),
    calibration_error(n_bins=BINS),
    validity(),
]


def run(url: str, folder: Path, **options: Any) -> EvalLog:
    task = Task(solver=with_capture([4]), **options)
    return run_eval(task, url, folder, model=MODEL, temperature=0.0, max_tokens=24)


@pytest.fixture(scope="module")
def log(lens_server_url: str, tmp_path_factory: pytest.TempPathFactory) -> EvalLog:
    """Scored by a probe; the metrics are the task's."""
    folder = tmp_path_factory.mktemp("logs")
    data = organism_dataset("heldout_phrasing")[:N]
    return run(lens_server_url, folder, dataset=data, scorer=probe_score(PROBE), metrics=METRICS)


def planted(log: EvalLog) -> np.ndarray[Any, Any]:
    """Whether the sample's situation asks for a lie."""
    return np.array([s.metadata["label"] for s in log.samples or []])


def values(log: EvalLog) -> np.ndarray[Any, Any]:
    return np.array([float((s.scores or {})["probe_score"].value) for s in log.samples or []])  # type: ignore[arg-type]


def test_metrics_of_a_ranking(log: EvalLog) -> None:
    y, s, found = planted(log), values(log), metrics(log)
    assert (y.sum(), len(y)) == (N // 2, N)
    assert 0.95 <= found["auroc"] == pytest.approx(roc_auc_score(y, s))
    assert found["auroc_low"] < found["auroc"] <= found["auroc_high"] <= 1.0
    assert 0.95 <= found["average_precision"] == pytest.approx(average_precision_score(y, s))
    # A new negative exceeds the second largest of 20 in one of 21 cases, the third in two.
    rates, recalls, _ = roc_curve(y, s, drop_intermediate=False)
    assert 0.8 <= found["recall_at_fpr"] == pytest.approx(recalls[rates <= 1 / 20].max())


def test_metrics_of_the_threshold_that_the_card_stores(log: EvalLog) -> None:
    y, s, found = planted(log), values(log), metrics(log)
    stored = load_probe(PROBE).threshold
    assert stored is not None
    above = s > stored.value
    alarms = binomtest(int(above[y == 0].sum()), N // 2)
    assert 0.1 >= found["fpr"] == pytest.approx(alarms.statistic)
    interval = alarms.proportion_ci(method="exact")
    assert (found["fpr_low"], found["fpr_high"]) == pytest.approx((interval.low, interval.high))
    found_lies = binomtest(int(above[y == 1].sum()), N // 2)
    assert 0 <= found["recall"] == pytest.approx(found_lies.statistic)
    assert found["recall_low"] == pytest.approx(found_lies.proportion_ci(method="exact").low)
    right = binomtest(int((above == y).sum()), N)
    assert 0.5 < found["threshold_accuracy"] == pytest.approx(right.statistic)
    assert found["threshold_accuracy_low"] == pytest.approx(right.proportion_ci(method="exact").low)


def test_the_error_of_the_calibration_that_the_card_stores(log: EvalLog) -> None:
    y, s = planted(log), values(log)
    card = load_probe(PROBE).card.calibration
    assert card is not None
    p = np.array([card.probability(v) for v in s])
    places = np.minimum((p * BINS).astype(int), BINS - 1)
    gaps = [
        (places == b).mean() * abs(y[places == b].mean() - p[places == b].mean())
        for b in np.unique(places)
    ]
    assert 0.25 > metrics(log)["calibration_error"] == pytest.approx(sum(gaps))


def test_labels_are_of_instructions_that_the_answers_follow(log: EvalLog) -> None:
    found, y = metrics(log), planted(log)
    assert found["labels_from_instruction"] == 1.0
    answers = [re.findall(r"\w+", s.output.completion.lower()) for s in log.samples or []]
    named = np.array(
        [s.metadata["truth"].lower() in a for s, a in zip(log.samples or [], answers, strict=True)]
    )
    obeyed = min(named[y == 0].mean(), 1.0 - named[y == 1].mean())
    assert 0.8 <= found["behaviour"] == pytest.approx(obeyed)
    assert 0.0 <= found["words_auroc"] <= 1.0


def test_words_of_an_instruction_give_the_label_away_and_those_of_an_answer_do_not(
    log: EvalLog, lens_server_url: str, tmp_path: Path
) -> None:
    """Pairs that differ in one word of the instruction: half of a pair tells nothing of another."""
    pairs = [
        Sample(
            input=[ChatMessageSystem(content=told), ChatMessageUser(content=question.text)],
            metadata={"label": label, "group": i},
        )
        for i, question in enumerate(questions(12))
        for label, told in enumerate((HONEST, LYING))
    ]
    texts = run(
        lens_server_url,
        tmp_path,
        dataset=MemoryDataset(pairs),
        scorer=[leakage_baseline("prompt"), leakage_baseline("completion")],
        metrics=[words_auroc(group="group"), length_auroc()],
    )
    prompt, answer = metrics(texts, "leakage_baseline"), metrics(texts, "leakage_baseline1")
    assert prompt == {"words_auroc": 1.0, "length_auroc": 0.5}
    # Each lie has the words of the truth but for the value that it names.
    assert abs(answer["words_auroc"] - 0.5) < 0.35
    n = [len(s.output.completion.split()) for s in texts.samples or []]
    area = roc_auc_score(planted(texts), n)
    assert answer["length_auroc"] == pytest.approx(max(area, 1.0 - area), abs=0.1)
    # Of a probe's score it is that of the tokens which it read.
    read = [next(iter((s.scores or {}).values())).metadata for s in log.samples or []]
    area = roc_auc_score(planted(log), [(known or {})["n_tokens"] for known in read])
    assert metrics(log)["length_auroc"] == pytest.approx(max(area, 1.0 - area))
    again = rescore(
        texts,
        [command_of("leakage_baseline", {"text": text}) for text in ("prompt", "completion")],
        tmp_path,
    )
    assert [metrics(each) for each in again] == [prompt, answer]


def test_inspect_score_makes_the_same_metrics(log: EvalLog, tmp_path: Path) -> None:
    """Those of the task, from the log; and by name, with their defaults."""
    own = command_of("probe_score", {"probe": PROBE})
    named = ["average_precision", "at_threshold"]
    again, alone = rescore(
        log, [own, [*own, *(a for n in named for a in ("--metric", f"inspect_lens/{n}"))]], tmp_path
    )
    assert metrics(again) == metrics(log)
    np.testing.assert_array_equal(values(again), values(log))
    kept = (
        "average_precision",
        "recall",
        "recall_low",
        "recall_high",
        "fpr",
        "fpr_low",
        "fpr_high",
    )
    assert metrics(alone) == {name: metrics(log)[name] for name in kept}
