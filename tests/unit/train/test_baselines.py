from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest

from inspect_lens.data import planted_activations
from inspect_lens.errors import SpecError
from inspect_lens.probe import (
    Baseline,
    Evaluation,
    Interval,
    Probe,
    ProbeCard,
    Threshold,
    auroc,
    clopper_pearson,
)
from inspect_lens.train import (
    FAMILIES,
    ActivationSet,
    LogisticProbe,
    MeanDifferenceProbe,
    cascade_frontier,
    evaluate_probe,
    fit_layers,
    fit_on,
    make_estimator,
    measure_baselines,
    select_layer,
    style_shift,
    transfer_statement,
)

H = 24


def made(name: str, *, n: int = 200, seed: int = 0, shift: float = 0.0) -> ActivationSet:
    planted = planted_activations(n=n, hidden=H, seed=seed, dprime=2.0)
    return ActivationSet(
        name=name, model="m", layers=(0, 1, 2), acts=[a + shift for a in planted.acts],
        labels=planted.labels, groups=[f"{name}-{g}" for g in planted.groups],
        ids=[f"{seed}-{i}" for i in range(n)],
    )  # fmt: skip


@pytest.fixture(scope="module")
def probe() -> Probe:
    card = ProbeCard(
        name="t/p", layers=(1,), hidden=H,
        thresholds=(Threshold(value=0.0, fpr=0.5, control="c", n_control=9, n_above=4,
                              interval=Interval(low=0, high=1, method="x")),),
    )  # fmt: skip
    return fit_on(MeanDifferenceProbe(), made("train"), 1).to_probe(card)  # type: ignore[return-value]


def test_baselines_stand_beside_the_probe_with_a_test(probe: Probe) -> None:
    train, test = made("train"), made("test", seed=1)
    texts = {
        "prompt": {d.name: ["lie now" if y else "be honest" for y in d.labels]
                   for d in (train, test)},
        "answer": {d.name: ["it is red"] * len(d) for d in (train, test)},
    }  # fmt: skip
    records = measure_baselines(
        probe, train, [test], texts=texts, judges={"judge": lambda t: float("lie" in t)}
    )
    by_name = {b.name: b for b in records}
    assert set(by_name) == {
        "bag of words (prompt)", "bag of words (answer)", "length", "length (prompt)",
        "length (answer)", "random direction", "judge",
    }  # fmt: skip
    assert by_name["bag of words (prompt)"].auroc == 1.0
    assert by_name["judge"].auroc == 1.0
    assert by_name["bag of words (answer)"].auroc == 0.5
    assert by_name["length"].auroc == 0.5
    random = by_name["random direction"]
    assert random.auroc is not None
    assert abs(random.auroc - 0.5) < 0.25
    assert random.p_value is not None
    assert random.test.startswith("obuchowski")
    assert random.p_value < 1e-3
    assert random.beaten
    assert not by_name["judge"].beaten
    assert random.auroc_interval is not None
    assert random.auroc_interval.method.startswith("obuchowski")
    perfect = by_name["judge"].p_value
    assert perfect is None or perfect > 0.5
    with pytest.raises(SpecError, match="0 texts for 200"):
        measure_baselines(probe, train, [test], texts={"prompt": {}})
    with pytest.raises(SpecError, match="0 texts for 200"):
        evaluate_probe(probe, test, texts={"prompt": {}})


def test_a_judge_has_to_say_numbers_and_words_have_to_be_there(probe: Probe) -> None:
    train, test = made("train"), made("test", seed=1)
    texts = {"answer": {d.name: ["word"] * len(d) for d in (train, test)}}
    with pytest.raises(SpecError, match="no finite number"):
        measure_baselines(probe, train, [test], texts=texts, judges={"judge": lambda _: math.nan})
    none = {"answer": {d.name: ["."] * len(d) for d in (train, test)}}
    with pytest.raises(SpecError, match="allowed are texts with words"):
        measure_baselines(probe, train, [test], texts=none)


def test_random_directions_differ_and_are_repeatable(probe: Probe) -> None:
    train, test = made("train"), made("test", seed=1)
    a, b = (measure_baselines(probe, train, [test], n_random=1, seed=s)[-1].auroc for s in (0, 1))
    assert a != b
    assert a == measure_baselines(probe, train, [test], n_random=1, seed=0)[-1].auroc


def test_neural_probes_have_a_random_direction_beside_them_too() -> None:
    train, test = made("train"), made("test", seed=1)
    card = ProbeCard(name="t/p", layers=(1,), hidden=H)
    for name in ("attention-lite", "mlp"):
        fitted = fit_on(make_estimator(name, steps=3), train, 1).to_probe(card)
        records = {b.name: b for b in measure_baselines(fitted, train, [test])}
        assert set(records) == {"length", "random direction"}
        area = records["random direction"].auroc
        assert area is not None
        assert abs(area - 0.5) < 0.25
    with pytest.raises(SpecError, match="no texts to read"):
        measure_baselines(fitted, train, [test], judges={"judge": len})


def test_style_shift_sees_what_moves_scores(probe: Probe) -> None:
    data = made("a", seed=3)
    same = style_shift(probe, data, data)
    assert (same.robust, same.shift, same.comparison.p_value) == (True, 0.0, 1.0)
    direction = probe.direction()[0]
    moved = ActivationSet(
        name="loud", model="m", layers=data.layers, labels=data.labels, groups=data.groups,
        ids=data.ids, acts=[a + 2 * direction for a in data.acts],
    )  # fmt: skip
    shifted = style_shift(probe, data, moved)
    assert not shifted.robust
    assert shifted.shift > 1
    assert shifted.fpr is not None
    assert shifted.fpr[1] > shifted.fpr[0] + 0.2
    with pytest.raises(SpecError, match="same sample in each place"):
        style_shift(probe, data, made("b", seed=4))


def test_transfer_is_said_either_way() -> None:
    def evaluation(low: float, better_by: float = 0.2) -> Evaluation:
        paired = Interval(low=better_by, high=0.5, method="delong")
        return Evaluation(
            name="hidden", sha256="0", n_positive=9, n_negative=9, disjoint_by="group", auroc=0.9,
            auroc_interval=Interval(low=low, high=0.95, method="delong"),
            baselines=(
                Baseline(name="length", set="hidden", auroc=0.5, difference=paired),
                Baseline(name="random", set="hidden", auroc=0.5),
            ),
        )  # fmt: skip

    yes, no = (transfer_statement("instructions", evaluation(low)) for low in (0.8, 0.6))
    assert yes.transfers
    assert "transfers to hidden: AUROC 0.900 [0.800, 0.950]" in yes.statement
    assert not no.transfers
    assert "does not transfer to hidden" in no.statement
    # A length that may be as good explains all that the probe shows.
    explained = transfer_statement("x", evaluation(0.8, better_by=-0.01))
    assert explained.transfers is False
    assert "above the bar of 0.7, but a baseline does as well: length has 0.500" in (
        explained.statement
    )
    alone = evaluation(0.8).model_copy(update={"baselines": ()})
    assert transfer_statement("x", alone).transfers is None
    with pytest.raises(SpecError, match="one class"):
        transfer_statement("x", evaluation(0.8).model_copy(update={"auroc": None}))


def test_a_cascade_goes_from_the_probe_to_the_judge() -> None:
    rng = np.random.default_rng(0)
    y = np.arange(2000) % 2
    probe, judge = rng.normal(size=2000) + 1.5 * y, rng.normal(size=2000) + 5 * y
    points = cascade_frontier(
        y, probe * 100, judge, probe_threshold=75.0, judge_threshold=2.5, probe_cost=0.01
    )
    assert [p.share for p in points] == sorted(p.share for p in points)
    alone, last = points[0], points[-1]
    assert alone.cost == 0.01
    assert alone.recall == pytest.approx((probe[y == 1] > 0.75).mean())
    assert last.recall == pytest.approx((judge[y == 1] > 2.5).mean())
    assert last.cost == pytest.approx(1.01)
    accuracy = [p.balanced_accuracy for p in points]
    assert all(b > a - 0.01 for a, b in itertools.pairwise(accuracy))
    half = next(p for p in points if p.share == 0.5)
    gained = (half.balanced_accuracy - accuracy[0]) / (accuracy[-1] - accuracy[0])
    assert gained > 0.7, "the unsure half holds most of the errors"


def test_a_cascade_has_intervals_by_group_and_costs_by_sample() -> None:
    rng = np.random.default_rng(1)
    y, names = np.arange(400) % 2, [i // 20 for i in range(400)]
    own = rng.normal(size=20)[np.array(names)]
    probe, judge = rng.normal(size=400) + y + own, rng.normal(size=400) + 3 * y
    tokens = rng.integers(50, 500, size=400)
    sure: dict[str, Any] = {
        "probe_threshold": 0.5,
        "judge_threshold": 1.5,
        "shares": (0.0, 0.25, 1.0),
    }
    alone, some, last = cascade_frontier(y, probe, judge, groups=names, judge_cost=tokens, **sure)
    assert last.cost == pytest.approx(tokens.mean())
    nearest = np.argsort(np.abs(np.searchsorted(np.sort(probe), probe) + 0.5
                                - (probe <= 0.5).sum()), kind="stable")[:100]  # fmt: skip
    assert some.cost == pytest.approx(tokens[nearest].sum() / 400)
    for point in (alone, some, last):
        assert point.recall_interval.low < point.recall < point.recall_interval.high
        assert point.fpr_interval.low < point.fpr < point.fpr_interval.high
    # The probe knows the groups, so that 200 positives are worth fewer.
    single = cascade_frontier(y, probe, judge, **sure)[0]
    assert "groups" in alone.recall_interval.method
    assert single.recall_interval == clopper_pearson(int((probe[y == 1] > 0.5).sum()), 200)
    width = [i.high - i.low for i in (alone.recall_interval, single.recall_interval)]
    assert width[0] > 1.5 * width[1]
    wrongs: list[dict[str, Any]] = [
        {"judge_cost": [1.0]}, {"judge_cost": -1.0}, {"probe_cost": math.nan}
    ]  # fmt: skip
    for wrong in wrongs:
        with pytest.raises(SpecError, match="cost"):
            cascade_frontier(y, probe, judge, **sure, **wrong)
    with pytest.raises(SpecError, match="groups: 1 for 400"):
        cascade_frontier(y, probe, judge, groups=["a"], **sure)


@pytest.mark.parametrize("rows", ["tokens", "mean", "last"])
def test_an_ensemble_by_name_reads_several_layers(rows: str) -> None:
    train, selection = made("train", n=80), made("sel", n=60, seed=5)
    card = ProbeCard(name="t/p", layers=(0,), hidden=H)
    options: dict[str, Any] = {"card": card, "rows": rows}
    choice = select_layer(make_estimator("ensemble"), train, selection, **options)
    assert choice.probe.layers == (0, 1, 2)
    assert [s.layer for s in choice.sweep] == [0, 1, 2]
    best = max(s.auroc for s in choice.sweep)
    assert auroc(selection.labels, selection.scores(choice.probe)) > best - 0.1
    two = select_layer(make_estimator("ensemble"), train, selection, layers=[0, 1], **options)
    assert two.probe.layers == (0, 1)
    with pytest.raises(SpecError, match="reads one layer"):
        fit_on(make_estimator("attention-lite"), train, (0, 1))


def test_every_family_by_name_trains_on_a_set() -> None:
    train, selection = made("train", n=80), made("sel", n=60, seed=5)
    quick = {
        "attention": {"steps": 5}, "attention-gdm": {"steps": 5}, "multimax": {"steps": 5},
        "rolling-attention": {"steps": 5}, "mlp": {"steps": 5}, "attention-lite": {"steps": 5},
        "gated-bipolar": {"steps": 5}, "bilinear": {"steps": 5}, "segment-coherence": {"steps": 5},
        "lr-got": {"epochs": 20},
    }  # fmt: skip
    card = ProbeCard(name="t/p", layers=(0,), hidden=H)
    for name in FAMILIES:
        choice = select_layer(
            make_estimator(name, **quick.get(name, {})), train, selection, card=card, layers=[1]
        )
        assert selection.scores(choice.probe).shape == (60,)
        assert choice.probe.card.method
        assert choice.probe.card.source
    mean = select_layer(LogisticProbe(), train, selection, card=card, rows="mean")
    assert mean.probe.layers == (1,)
    with pytest.raises(SpecError, match="allowed are lr, "):
        make_estimator("svm")
    with pytest.raises(SpecError, match="has no setting"):
        make_estimator("lr", depth=3)
    with pytest.raises(SpecError, match="rows='first'"):
        fit_on(LogisticProbe(), train, 1, rows="first")  # type: ignore[arg-type]
    assert (
        fit_on(make_estimator("attention-lite", steps=2), train, 1, rows="mean").n_features_in_ == H
    )
    with pytest.raises(SpecError, match=r"layer=\(\): name one of the layers of the set, \["):
        fit_on(LogisticProbe(), train, ())
    with pytest.raises(SpecError, match=r"layers=\[\]; allowed is a list that names"):
        fit_layers(LogisticProbe(), train, [])
    with pytest.raises(SpecError, match=r"layers=\[1, 99\]: name one"):
        fit_layers(LogisticProbe(), train, [1, 99])
    for wrong in (True, [True], 1.0):
        with pytest.raises(SpecError, match="allowed is a list of integers"):
            fit_layers(LogisticProbe(), train, wrong)  # type: ignore[arg-type]
    with pytest.raises(SpecError, match="rows='foo'"):
        fit_layers(LogisticProbe(), train, [1], rows="foo")  # type: ignore[arg-type]
