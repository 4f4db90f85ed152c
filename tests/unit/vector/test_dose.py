"""Dose and response against scipy and planted curves."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import spearmanr

from inspect_lens.errors import SpecError
from inspect_lens.probe import clopper_pearson
from inspect_lens.vector import Response, dose_response


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(-3, 3), min_size=2, max_size=30))
def test_the_rank_correlation_is_that_of_scipy(means: list[int]) -> None:
    steered = [Response("a", float(i), float(mean)) for i, mean in enumerate(means)]
    found = dose_response(steered, n_resamples=1).spearman
    if np.ptp(means) == 0:
        assert math.isnan(found)
    else:
        assert found == pytest.approx(spearmanr(range(len(means)), means).statistic, abs=1e-12)


def answers(
    slope: float, *, prompts: int = 200, seed: int = 0
) -> tuple[list[Response], dict[str, float]]:
    """Binary answers whose log odds grow with the scale."""
    rng = np.random.default_rng(seed)
    scales = np.linspace(-2, 2, 8)

    def draw(scale: float) -> float:
        return float(rng.random() < 1 / (1 + np.exp(-slope * scale)))

    steered = [Response(str(p), float(s), draw(s)) for p in range(prompts) for s in scales]
    return steered, {str(p): draw(0.0) for p in range(prompts)}


def test_a_planted_dose_is_found_and_its_interval_holds_it() -> None:
    curve = dose_response(*answers(2.0))
    assert [p.scale for p in curve.points] == sorted([*np.linspace(-2, 2, 8), 0.0])
    assert curve.spearman > 0.95
    assert curve.spearman_interval.low > 0.9
    true_effect = 2 / (1 + np.exp(-4.0)) - 1
    assert curve.effect_interval.low < true_effect < curve.effect_interval.high
    assert curve.n_prompts == 200


def test_no_dose_gives_an_interval_that_holds_zero() -> None:
    inside = 0
    for seed in range(10):
        curve = dose_response(*answers(0.0, prompts=60, seed=seed), n_resamples=300)
        inside += curve.effect_interval.low <= 0.0 <= curve.effect_interval.high
    assert inside >= 8


def test_the_mean_interval_is_that_of_the_binomial_for_large_samples() -> None:
    steered, base = answers(0.0, prompts=400)
    point = dose_response(steered, base).points[0]
    half = 1.96 * math.sqrt(point.mean * (1 - point.mean) / 400)
    assert point.interval.low == pytest.approx(point.mean - half, abs=0.01)
    assert point.interval.high == pytest.approx(point.mean + half, abs=0.01)


def test_flips_are_counted_from_the_unsteered_answer() -> None:
    steered = [Response(p, s, v) for p in "ab" for s, v in ((-1.0, 0.0), (1.0, 1.0))]
    curve = dose_response(steered, {"a": 1.0, "b": 0.0})
    assert curve.flip_rate == 0.5
    assert [p.mean for p in curve.points] == [0.0, 0.5, 1.0]
    assert curve.spearman == 1.0
    alone = dose_response(steered)
    assert math.isnan(alone.flip_rate)
    assert [p.scale for p in alone.points] == [-1.0, 1.0]


def test_several_draws_of_a_prompt_are_averaged_not_counted_as_prompts() -> None:
    once = [Response(p, s, v) for p, v in (("a", 1.0), ("b", 0.0)) for s in (1.0, 2.0)]
    curve, twice = dose_response(once, seed=3), dose_response(once * 2, seed=3)
    assert twice.n_prompts == 2
    assert twice.points == curve.points


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(SpecError, match="no steered answers"):
        dose_response([])
    with pytest.raises(SpecError, match="same for all"):
        dose_response([Response("a", 1.0, 0.0), Response("b", 2.0, 0.0)])
    with pytest.raises(SpecError, match="has no value for prompt"):
        dose_response([Response("a", 1.0, 0.0)], {})


def test_answers_of_one_question_are_one_prompt() -> None:
    """Copies of an answer make no interval narrower; the numbers stay what they are."""
    steered, base = answers(1.0, prompts=20)
    whole = dose_response(steered, base, seed=1)
    names = {f"{p}#{i}": p for i in range(4) for p in base}
    copies = [Response(f"{p}#{i}", s, v) for i in range(4) for p, s, v in steered]
    alone = {name: base[p] for name, p in names.items()}
    grouped = dose_response(copies, alone, groups=names, seed=1)
    assert grouped.n_prompts == 20
    for name in ("effect", "spearman", "flip_rate"):
        one, other = (getattr(c, f"{name}_interval") for c in (grouped, whole))
        assert (one.low, one.high) == pytest.approx((other.low, other.high))
        assert getattr(grouped, name) == pytest.approx(getattr(whole, name))
    free = dose_response(copies, alone, seed=1)
    assert free.n_prompts == 80
    width, wide = (c.effect_interval.high - c.effect_interval.low for c in (free, grouped))
    assert width < 0.7 * wide


def test_one_prompt_has_no_interval() -> None:
    curve = dose_response([Response("a", s, -s) for s in (0.0, 1.0)], {"a": 0.0}, n_resamples=50)
    assert curve.effect == -1.0
    intervals = [curve.effect_interval, curve.flip_rate_interval, curve.points[0].interval]
    for interval in intervals:
        assert np.isnan([interval.low, interval.high]).all()
        assert "1 are too few" in interval.method
    epochs = [Response(p, s, -s) for p in "ab" for s in (0.0, 1.0)]
    same = dose_response(epochs, groups={"a": "q", "b": "q"}, n_resamples=50)
    assert math.isnan(same.effect_interval.low), "epochs of one prompt are no other prompts"


def test_few_prompts_have_no_interval() -> None:
    """Of five prompts it held the truth in 67 of 100 sweeps."""
    for n in (7, 8):
        steered = [Response(str(i), 1.0, float(i)) for i in range(n)]
        curve = dose_response(steered, {str(i): 0.0 for i in range(n)}, n_resamples=200)
        for interval in (curve.effect_interval, curve.points[1].interval):
            assert math.isnan(interval.low) == math.isnan(interval.high) == (n < 8)
            assert ("7 are too few" in interval.method) == (n < 8)


def test_prompts_that_are_all_alike_are_no_certainty() -> None:
    """A control that changed none of forty answers had [0, 0], and a full effect [1, 1]."""
    exact = clopper_pearson(40, 40).low
    for effect in (0.0, 1.0):
        steered = [Response(str(i), s, effect * (s > 0)) for i in range(40) for s in (-1.0, 1.0)]
        steered += [Response("odd", s, 1.0) for s in (-1.0, 1.0)] * (not effect)
        base = {str(i): 0.0 for i in range(40)} | {"odd": 1.0}
        curve = dose_response(steered, base, groups={"odd": "0"}, n_resamples=200)
        found = curve.effect_interval
        assert (found.low, found.high) == pytest.approx(
            (effect * exact - (1 - exact), effect * exact + 1 - exact)
        )
        assert found.method == "clopper-pearson, n = 40"
    assert curve.flip_rate_interval.high < 1.0


def test_of_one_value_everywhere_no_interval_is_known() -> None:
    same = [Response(str(i), s, 1.0) for i in range(40) for s in (0.0, 1.0)]
    curve = dose_response(same, n_resamples=200)
    for interval in (curve.effect_interval, curve.points[0].interval):
        assert math.isnan(interval.low)
        assert interval.method.startswith("none: all draws are alike")
    assert curve.flip_rate_interval.method == "none: no draw has a value"
