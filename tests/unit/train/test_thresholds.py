"""A threshold acts on what it was calibrated for, for the lengths that it was calibrated on."""

from __future__ import annotations

import zlib
from dataclasses import replace

import numpy as np
import pytest
from sklearn.base import clone

from inspect_lens.errors import SpecError
from inspect_lens.probe import (
    AnyProbe,
    CaptureFacts,
    Probe,
    ProbeCard,
    Statistic,
    choose_point,
    found_above,
    pool_scores,
    running_pool,
)
from inspect_lens.probe.card._files import render_card
from inspect_lens.reading import ProbeReader
from inspect_lens.spec import Numerics
from inspect_lens.train import (
    ActivationSet,
    calibrate_threshold,
    evaluate_probe,
    fit_threshold,
    make_estimator,
    transfer_statement,
)
from tests.kit.captured import captured


def probe(pool: str = "mean", **facts: object) -> Probe:
    """Reads the first number of a row."""
    card = ProbeCard(name="made/up", layers=(0,), hidden=2, pool=pool)
    return Probe(
        weight=np.array([[1.0, 0.0]], np.float32), bias=np.zeros(1, np.float32),
        mean=np.zeros((1, 2), np.float32), scale=np.ones((1, 2), np.float32),
        card=card.model_copy(update=facts),
    )  # fmt: skip


def answers(
    n: int,
    tokens: int,
    *,
    name: str,
    shift: float = 0.0,
    spread: float = 1.0,
    positive: bool = False,
) -> ActivationSet:
    """Token scores with a shared part for each answer, as text has."""
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    acts = rng.normal(size=(n, 1, tokens, 2)) * spread + rng.normal(size=(n, 1, 1, 2)) * 0.3
    return ActivationSet(
        name=name, model="m", layers=(0,), acts=tuple((acts + shift).astype(np.float32)),
        labels=[positive] * n, groups=[f"{name}-{i}" for i in range(n)],
    )  # fmt: skip


def both(negatives: ActivationSet, positives: ActivationSet) -> ActivationSet:
    return ActivationSet(
        name=negatives.name, model="m", layers=(0,), acts=negatives.acts + positives.acts,
        labels=[*negatives.labels, *positives.labels],
        groups=[*negatives.groups, *positives.groups],
    )  # fmt: skip


def alarms(data: ActivationSet, made: Probe, pool: str, value: float) -> float:
    """Share of answers in which the engine's comparison after each token raises the alarm."""
    raised = [
        (running_pool(made.score_tokens(a, data.layers), pool) > value).any() for a in data.acts
    ]
    return float(np.mean(raised))


@pytest.mark.parametrize("pool", ["mean", "ema:0.1", "last"])
def test_an_alarm_keeps_its_rate_within_its_length(pool: str) -> None:
    made, rate = probe(pool), 0.05
    control = answers(800, 400, name="control")
    threshold = calibrate_threshold(made, control, rate, statistic=f"alarm:{pool}")
    assert threshold.n_tokens == (1, 400)
    for tokens in (20, 100, 400):
        new = answers(800, tokens, name=f"new-{tokens}")
        assert alarms(new, made, pool, threshold.value) <= rate + 0.02
    # What the issue saw: the threshold of whole answers is crossed on the way by many more.
    whole = calibrate_threshold(made, control, rate, statistic=f"answer:{pool}")
    assert alarms(answers(400, 400, name="again"), made, pool, whole.value) > 3 * rate


def test_an_alarm_holds_for_the_longest_answers_of_a_mixed_control_set() -> None:
    made, rate = probe(), 0.05
    short, long = answers(900, 5, name="short"), answers(300, 400, name="long")
    control = both(replace(short, name="control"), long)
    threshold = calibrate_threshold(made, control, rate, statistic="alarm:last")
    assert threshold.n_tokens == (1, 400)
    assert alarms(answers(1500, 400, name="new"), made, "last", threshold.value) <= rate + 0.02


def test_an_alarm_can_be_for_fewer_tokens_and_for_no_more_than_there_are() -> None:
    made, control = probe(), answers(400, 30, name="control")
    less = calibrate_threshold(made, control, 0.05, statistic="alarm", length=10)
    assert less.n_tokens == (1, 10)
    assert less.value <= calibrate_threshold(made, control, 0.05, statistic="alarm").value
    with pytest.raises(SpecError, match="30 tokens"):
        calibrate_threshold(made, control, 0.05, statistic="alarm", length=31)
    with pytest.raises(SpecError, match="for an alarm"):
        calibrate_threshold(made, control, 0.05, length=10)


def test_an_alarm_is_for_no_length_that_too_few_groups_have() -> None:
    """It said that it holds up to 400 tokens, which one answer of 300 had."""
    made, rate = probe(), 0.05
    control = both(answers(300, 30, name="control"), answers(5, 400, name="long"))
    control = replace(control, labels=[0] * len(control))
    with pytest.raises(SpecError, match=r"5 of 305 control groups .* needs 20, which allows 30"):
        calibrate_threshold(made, control, rate, statistic="alarm:last", length=400)
    few = calibrate_threshold(made, control, rate, statistic="alarm", length=400, allow_few=True)
    assert few.n_tokens == (1, 400)
    for n, expected in ((300, 30), (40, 30), (10, 30), (2, 5)):
        some = both(answers(n, 30, name="control"), answers(5, 400, name="long"))
        if n <= 10:  # 17 groups, which a quantile needs 10 of; and 9, so what all of them have
            some = both(some, answers(2, 5, name="short"))
        some = replace(some, labels=[0] * len(some))
        found = calibrate_threshold(made, some, 0.1, statistic="alarm:last", allow_few=True)
        assert found.n_tokens == (1, expected), n


@pytest.mark.parametrize("over", ["answer", "alarm", "token"])
def test_a_threshold_records_what_its_own_control_set_was_computed_with(over: str) -> None:
    here, there = (CaptureFacts(engine="e", dtype=dtype) for dtype in ("float16", "bfloat16"))
    made, control = probe(capture=there), answers(100, 5, name="control")
    for capture, known in ((here, here.numerics), (None, Numerics())):
        found = calibrate_threshold(
            made, replace(control, capture=capture), 0.05, statistic=over, allow_few=True
        )
        assert found.numerics == known
        card = made.card.model_copy(update={"thresholds": (found,)})
        said = "It was set with dtype float16 instead of bfloat16." in render_card(card, sha256="0")
        assert said == (capture is here)


def test_tokens_of_an_answer_are_one_group() -> None:
    made, control = probe(), answers(400, 30, name="control")
    threshold = calibrate_threshold(made, control, 0.05, statistic="token")
    assert (threshold.n_control, threshold.n_groups) == (12_000, 400)
    scores = np.concatenate([a[0, :, 0] for a in control.acts])
    assert np.mean(scores > threshold.value) == pytest.approx(0.05, abs=0.005)
    # And tokens are what its rates are shares of, wherever it is told.
    assert "a new token of a new group that is exchangeable" in threshold.guarantee
    card = made.card.model_copy(update={"thresholds": (threshold,)})
    test = answers(200, 30, name="test", shift=3.0)
    card = card.model_copy(
        update={"evaluations": (evaluate_probe(replace(made, card=card), test),)}
    )
    assert "of the tokens of honest answers exceed the threshold" in card.warnings[0]
    page = render_card(card, sha256="0")
    assert f"of 12000 tokens of `{control.name}` lie above it" in page
    assert "of tokens |" in page


def test_what_is_missing_is_named_so_that_it_can_be_made() -> None:
    """The advice for `alarm:last` was `--for alarm`, which makes another."""
    card = probe(thresholds=(fit_threshold(np.arange(400.0), 0.05),)).card
    for asked in ("alarm", "alarm:last", "alarm:ema:0.1", "token", "answer:top_k_mean:3"):
        statistic = Statistic.parse(asked, card.pool)
        with pytest.raises(SpecError, match="probe calibrate --for") as error:
            choose_point(card, None, statistic)
        advice = str(error.value).partition("--for ")[2].partition(" --fpr")[0]
        assert Statistic.parse(advice, card.pool) == statistic
    with pytest.raises(SpecError, match="pass the number of one that it has"):
        choose_point(card, 0.5)
    # Of two rates at one value, the stored one.
    first = fit_threshold(np.arange(400.0), 0.05)
    both_rates = (first, first.model_copy(update={"fpr": 0.01}))
    assert choose_point(probe(thresholds=both_rates).card).fpr == 0.05


def test_what_a_threshold_finds_is_of_its_own_statistic() -> None:
    made, control = probe(), answers(400, 30, name="control")
    thresholds = tuple(
        calibrate_threshold(made, control, 0.05, statistic=s) for s in ("answer", "alarm:last")
    )
    card = made.card.model_copy(update={"thresholds": thresholds})
    lies = answers(100, 30, name="lies", shift=1.0, positive=True)
    test = both(answers(100, 30, name="test"), lies)
    found = evaluate_probe(replace(made, card=card), test)
    card = card.model_copy(update={"evaluations": (found,)})
    assert [found_above(card, t.value, t.statistic).lowest for t in thresholds] == [  # type: ignore[union-attr]
        r.recall for r in found.rates
    ]
    assert found_above(card, thresholds[1].value) is None


LEARNED = {
    "attention": make_estimator("attention", lr=0.02, steps=20, heads=2),
    "multimax": make_estimator("multimax", lr=0.02, steps=20, heads=2, mlp_sizes=(4,)),
    "rolling_attention:3": make_estimator(
        "rolling-attention", pool="rolling_attention:3", steps=20, heads=2, mlp_sizes=(4,)
    ),
    "bipolar": make_estimator("gated-bipolar", lr=0.02, steps=20, heads=2, mlp_sizes=(4,)),
}


@pytest.mark.parametrize("over", ["answer", "alarm", "token"])
@pytest.mark.parametrize("pool", ["mean", "last", "ema:0.3", "top_k_mean:2", "softmax_mean", "own"])
@pytest.mark.parametrize("family", ["linear", *LEARNED])
def test_what_is_calibrated_is_what_acts(family: str, pool: str, over: str) -> None:
    """Tokens of an attention probe were calibrated on scores of prefixes."""
    data = replace(answers(12, 7, name="data"), labels=[0, 1] * 6)
    made: AnyProbe = probe()
    if family in LEARNED:
        fitted = clone(LEARNED[family]).fit(data.sequences(0), data.labels)
        made = fitted.to_probe(ProbeCard(name="made/up", layers=(0,), hidden=2))
    rule = made.pool if pool == "own" else pool
    statistic = Statistic.model_validate({"over": over, "pool": rule})
    calibrated = np.concatenate(data.statistic(made, statistic))
    tokens = [made.score_tokens(a, data.layers) for a in data.acts]
    if over == "token":
        acted = np.concatenate(tokens)
    elif over == "answer" and family in LEARNED and pool == "own":
        acted = np.array([made.score(a) for a in data.acts])
    elif over == "answer":
        acted = np.array([pool_scores(t, rule) for t in tokens])
    elif family in LEARNED and pool == "own":
        acted = np.array([max(made.score(a[:, :n]) for n in range(1, 8)) for a in data.acts])
    else:
        acted = np.array([running_pool(t, rule).max() for t in tokens])
    np.testing.assert_allclose(calibrated, acted, rtol=1e-12)
    for acts, (value,) in (
        zip(data.acts, data.statistic(made, statistic), strict=False)
        if (over == "answer" and pool != "own")
        else ()
    ):
        # What a scorer reads of the same call.
        reader = ProbeReader.of(made, pool=rule, positions="all", source="captured")
        rows = np.concatenate([np.zeros((1, 1, 2), np.float32), acts], axis=1)
        handle = captured(rows, n_prompt=1, layers=(0,)).metadata
        assert handle is not None
        reading = replace(reader, positions=tuple(range(1, 8))).read_captured(handle["activations"])
        assert reading is not None
        assert reading.value == pytest.approx(value)


def test_a_card_gives_a_threshold_for_its_statistic_alone() -> None:
    values = np.random.default_rng(0).normal(size=400)
    answer = Statistic(over="answer", pool="mean")
    alarm = Statistic(over="alarm", pool="ema:0.1")
    one = fit_threshold(values, 0.05, statistic=answer)
    two = fit_threshold(values + 1, 0.05, statistic=alarm)
    card = probe(thresholds=(two, one)).card
    assert choose_point(card).value == one.value
    assert choose_point(card, "fpr=0.05", alarm).value == two.value
    for other in (Statistic(over="alarm", pool="mean"), Statistic(over="token")):
        with pytest.raises(SpecError, match="one for the mean of an answer, which cannot"):
            choose_point(card, None, other)
    # Only the threshold for the running aggregate reaches the engine.
    assert probe(thresholds=(two, one)).for_engine().threshold is None
    form = probe("ema:0.1", thresholds=(two, one)).for_engine()
    assert (form.threshold, form.threshold_positions) == (two.value, "completion")


@pytest.mark.parametrize(
    ("tokens", "spread", "holds"), [(20, 1.0, True), (200, 1.0, False), (20, 1.6, False)]
)
def test_a_rate_that_does_not_hold_is_a_warning_and_no_transfer(
    tokens: int, spread: float, holds: bool
) -> None:
    made = probe("max")
    control = answers(4000, 20, name="control")
    fitted = replace(
        made,
        card=made.card.model_copy(update={"thresholds": (calibrate_threshold(made, control),)}),
    )
    negatives = answers(1000, tokens, name="test", spread=spread)
    test = both(negatives, answers(300, tokens, name="lies", shift=4.0, positive=True))
    found = evaluate_probe(fitted, test, control=control)
    (rate,) = found.rates
    assert rate.interval is not None
    assert (rate.holds, rate.nominal) == (holds, 0.01)
    # The rate is counted by hand.
    top = [a[0, :, 0].max() for a in negatives.acts]
    assert rate.rate == pytest.approx(np.mean(np.array(top) > fitted.card.thresholds[0].value))
    card = fitted.card.model_copy(update={"evaluations": (found,)})
    said = [text for text in card.warnings if "rate" in text]
    assert bool(said) is not holds
    if tokens != 20:
        assert "200 to 200 tokens, and the threshold" in said[0]
    if not holds:
        assert transfer_statement("train", found).transfers is not True
