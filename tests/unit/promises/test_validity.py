"""Beside each AUROC stand the same five facts, on every surface that shows one."""

from __future__ import annotations

import html
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from inspect_ai.scorer import SampleScore, Score

from inspect_lens._cli._output import Made
from inspect_lens.data import load_dataset
from inspect_lens.errors import SpecError
from inspect_lens.probe import (
    BESIDE_AUROC,
    AnyProbe,
    LabelSource,
    Validity,
    find_label_source,
    load_probe,
)
from inspect_lens.probe.card._files import render_card
from inspect_lens.scorer import _baselines, length_auroc, validity, words_auroc
from inspect_lens.scorer._baselines import words_of
from inspect_lens.train import ActivationSet, LDAProbe, evaluate_probe, train_probe
from inspect_lens.view import write_report, write_view
from tests.kit.page import read_page
from tests.kit.planted_log import plant_log, planted_probe
from tests.kit.promises import Promise

PROMISE = Promise(
    "beside an AUROC stand the rate on honest answers, two baselines and the labels",
    surfaces=("card", "report", "token page", "command", "eval metrics"),
)


def instructed(name: str, n: int, *, seed: int) -> ActivationSet:
    """Half told to lie, of whom some do not; those who lie are longer."""
    rng = np.random.default_rng(seed)
    labels = np.arange(n) % 2 == 1
    lengths = [8 if lie else 4 for lie in labels]
    acts = [rng.normal(size=(2, k, 8)) + 2.0 * lie for k, lie in zip(lengths, labels, strict=True)]
    said = ["no" if lie and i % 5 else "Paris" for i, lie in enumerate(labels)]
    return ActivationSet(
        name=name, model="m", layers=(0, 1), acts=tuple(acts), labels=labels,
        groups=tuple(f"{name}{i}" for i in range(n)), ids=tuple(f"{name}{i}" for i in range(n)),
        columns={
            "condition": tuple("lie" if lie else "honest" for lie in labels),
            "truth": ("Paris",) * n, "completion": tuple(said),
            "prompt_text": tuple(f"question {i}" for i in range(n)),
        },
    )  # fmt: skip


@pytest.fixture(scope="module")
def probe() -> AnyProbe:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that a length tells these apart
        return train_probe(
            LDAProbe(), instructed("train", 80, seed=0), name="t/p", fpr=0.1,
            control=instructed("control", 120, seed=1), held_out=[instructed("test", 80, seed=2)],
        )  # fmt: skip


def shown(probe: AnyProbe) -> list[str]:
    """What each surface has to say."""
    (measured,) = probe.card.evaluations
    found = Validity.of(measured)
    assert measured.label_source == "instruction"
    assert measured.behaviour == pytest.approx(0.8)
    assert found.behaviour == "80%"
    assert found.length_baseline == "1.000", "those who lie are longer"
    assert found.honest_rate.startswith(f"{measured.fpr:.3f} [")
    assert "not measured" not in str(found)
    return list(found)


@PROMISE.on("card")
def _(surface: str, request: pytest.FixtureRequest) -> None:
    probe = request.getfixturevalue("probe")
    page = render_card(probe.card, sha256="0")
    assert all(name in page for name in BESIDE_AUROC)
    assert " | ".join(shown(probe)) in page


@PROMISE.on("report")
def _(surface: str, request: pytest.FixtureRequest) -> None:
    probe, folder = request.getfixturevalue("probe"), request.getfixturevalue("tmp_path")
    page = html.unescape(write_report(probe, folder, [], n_resamples=0).read_text())
    assert all(name in page for name in BESIDE_AUROC)
    assert all(f">{text}</td>" in page for text in shown(probe))


@PROMISE.on("token page")
def _(surface: str, request: pytest.FixtureRequest) -> None:
    probe, folder = request.getfixturevalue("probe"), Path(request.getfixturevalue("tmp_path"))
    planted = load_probe(planted_probe(folder))
    card = planted.card.model_copy(update={"evaluations": probe.card.evaluations})
    own = str(replace(planted, card=card, path=None).save(folder / "measured"))
    log = plant_log(folder / "logs", own, n=2).log.location
    page = read_page(write_view(log, folder / "page.html", probes=[own]).path)
    shown(probe)
    assert str(Validity.of(probe.card.evaluations[0])) in page.facts["series"][0]["beside"][0]


@PROMISE.on("command")
def _(surface: str, request: pytest.FixtureRequest) -> None:
    probe = request.getfixturevalue("probe")
    rate, *_ = shown(probe)
    lines = list(Made(probe=probe, folder="p", evaluations=probe.card.evaluations).lines())
    assert [line.split(":")[0] for line in lines if rate in line] == ["    beside it"]
    (measured,) = probe.card.evaluations
    (best,) = [line for line in lines if line.startswith("    best baseline ")]
    assert measured.best_baseline is not None
    assert f"baseline {measured.best_baseline.name}: " in best
    assert any(": 1.000" in line for line in lines if "baseline length" in line)
    listed = [line for line in lines if line.startswith(("    baseline ", "    best baseline "))]
    assert len(listed) == len(measured.baselines)
    unmeasured = measured.model_copy(update={"baselines": ()})
    beside = str(Validity.of(unmeasured))
    assert "best baseline not measured" in beside
    assert f"    beside it: {beside}" in list(
        Made(probe=probe, folder="p", evaluations=(unmeasured,)).lines()
    )


@PROMISE.on("eval metrics")
def _(surface: str, request: pytest.FixtureRequest) -> None:
    folder = Path(request.getfixturevalue("tmp_path"))
    log = plant_log(folder / "logs", planted_probe(folder), n=2).log
    found = {name for scores in log.results.scores for name in scores.metrics}
    assert found >= {"auroc", "length_auroc", "words_auroc", "recall", "fpr"}
    assert any(name.startswith("labels_from_") for name in found)
    scores = [
        SampleScore(
            score=Score(value=float(i), metadata={"n_tokens": 9 - (i % 3)}),
            sample_metadata={"label": int(i < 3)},
        )
        for i in range(6)
    ]
    assert length_auroc()(scores) == 0.5, "the tokens, and not the score"
    assert measured_of([])["length_auroc"] == 0.5
    told = measured_of(["honest", "lie"])
    assert told["words_auroc"] == 1.0, "honest answers name Paris"
    assert told["labels_from_instruction"] == 1.0
    assert told["behaviour"] == pytest.approx(0.8), "every fifth of the liars names it, too"


def measured_of(told: list[str], **facts: str) -> dict[str, float]:
    """What `validity` has of forty answers, of which a fifth of the lies tells the truth."""
    scores = []
    for i in range(40):
        lie = i % 2
        said = "it is no" if lie and (i // 2) % 5 else f"it is {'in truth ' if lie else ''}Paris"
        known = {"label": lie, "truth": "Paris"} | ({"condition": told[lie]} if told else {})
        score = Score(value=float(lie), metadata={"n_tokens": 9 - i % 4 // 2} | words_of(said))
        scores.append(SampleScore(score=score, sample_id=i, sample_metadata=known | facts))
    return measured(scores)


test_promise = PROMISE.test()


def test_an_eval_says_where_its_labels_come_from() -> None:
    """By a word of its own, else by conditions that all agree with the labels; else nowhere."""
    judged = measured_of(["honest", "lie"], label_source="judge")
    assert judged["labels_from_judge"] == 1.0
    assert "behaviour" not in judged, "an answer cannot fail to do what a judge says of it"
    for told, said in (([], ""), (["lie", "honest"], ""), (["honest", "lie"], "me")):
        assert measured_of(told, label_source=said)["labels_from_unknown"] == 1.0
    assert find_label_source("", [], []) == find_label_source("", ["lie", None], [1, 0]) == ""


def test_scores_without_words_are_told_and_do_not_fail_an_eval(
    caplog: pytest.LogCaptureFixture,
) -> None:
    score = Score(value=1.0, metadata={"n_tokens": 3})
    found: Any = validity()([SampleScore(score=score, sample_id=i, sample_metadata={"label": i})
                             for i in (0, 1)])  # fmt: skip
    assert np.isnan(found["words_auroc"])
    assert "2 of 2 scores hold no words" in caplog.text


def test_the_source_of_labels_is_kept_on_the_way(tmp_path: Path, probe: AnyProbe) -> None:
    assert load_dataset("instructed_pairs", limit=4).label_source == "instruction"
    judged = load_dataset("instructed_pairs", limit=4, label_source="judge")
    assert judged.facts()["label_source"] == "judge"
    with pytest.raises(SpecError, match=", ".join(get_args(LabelSource))):
        load_dataset("instructed_pairs", label_source="me")
    data = instructed("other", 40, seed=3)
    file = replace(data, label_source="judge", columns={}).save(tmp_path / "a.safetensors")
    kept = ActivationSet.load(file)
    assert kept.label_source == "judge"
    found = Validity.of(evaluate_probe(probe, kept))
    assert (found.labels_from, found.behaviour) == ("judge", "no instruction labels them")
    assert kept.sha256 == replace(kept, label_source="").sha256


def test_an_answer_that_differs_is_not_said_to_be_a_lie(probe: AnyProbe) -> None:
    data = instructed("pairs", 40, seed=3)
    columns = {key: value for key, value in data.columns.items() if key != "truth"}
    pairs = replace(data, columns=columns, groups=tuple(f"q{i // 2}" for i in range(40)))
    found = Validity.of(evaluate_probe(probe, pairs))
    assert (found.labels_from, found.behaviour) == ("instruction", "not measured")


def answers(n: int, said: dict[str, Any] | None = None) -> list[SampleScore]:
    """Scores of n answers, every second one of which lies and says so."""
    return [
        SampleScore(
            score=Score(
                value=float(i),
                metadata={"n_tokens": 3} | (said or words_of("lie" if i % 2 else "truth")),
            ),
            sample_id=i,
            sample_metadata={"label": i % 2, "group": None},
        )
        for i in range(n)
    ]


def measured(scores: list[SampleScore], **arguments: Any) -> dict[str, float]:
    found: Any = validity(**arguments)(scores)
    return dict(found)


def test_a_group_that_is_named_is_there_and_one_by_default_has_a_value() -> None:
    assert measured(answers(20))["words_auroc"] == 1.0, "None is no group"
    for metric in (validity, words_auroc):
        with pytest.raises(SpecError, match="group='scenaro': sample 0 has no such metadata"):
            metric(group="scenaro")(answers(20))


@pytest.mark.parametrize("said", [{"words": None}, {"words": "!!!x"}, {"words": "AAAA"}])
def test_words_that_are_none_are_told_and_do_not_fail_an_eval(said: dict[str, Any]) -> None:
    assert np.isnan(measured(answers(8, said))["words_auroc"])
    with pytest.raises(SpecError, match="scored by neither"):
        words_auroc()(answers(8, said))


def test_many_answers_are_judged_by_some_of_them_which_order_does_not_change(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(_baselines, "_MOST", 30)
    assert "words_n" not in measured(answers(30))
    found: Any = words_auroc(interval=True)(answers(90))
    assert (found["words_n"], found["words_auroc"]) == (30, measured(answers(90))["words_auroc"])
    assert not caplog.text
    assert words_auroc()(answers(90)) == found["words_auroc"]
    assert "words_auroc is of 30 of 90 texts" in caplog.text
    taken = []
    monkeypatch.setattr(_baselines, "_words", lambda one: taken.append(one.sample_id) or [1])
    assert measured(answers(90))["words_n"] == 30
    measured(answers(90)[::-1])
    assert taken[:30] == taken[30:] == sorted(taken[:30])
    assert len(set(taken)) == 30
    assert 5 < sum(i % 2 for i in taken[:30]) < 25, "of both classes"


def test_behaviour_is_unknown_where_the_truth_has_no_word() -> None:
    for truth, share in (("?", None), ("truth", 1.0)):
        scores = answers(8)
        for one in scores:
            one.sample_metadata = {"label": one.sample_id % 2, "truth": truth,
                                   "label_source": "instruction"}  # type: ignore[operator]  # fmt: skip
        assert measured(scores).get("behaviour") == share
