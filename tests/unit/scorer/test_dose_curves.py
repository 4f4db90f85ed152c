"""Curves of a sweep in which not every answer has a value."""

from __future__ import annotations

import math
from typing import Any

import pytest
from inspect_ai.scorer import SampleScore, Score

from inspect_lens.scorer import dose_curves, dose_table
from inspect_lens.scorer._dose import dose_metric
from inspect_lens.scorer._judges import is_broken

SCALES = (-1.0, 1.0, 2.0)


def sample(name: str, **lacking: set[float]) -> SampleScore:
    """The vector's answers follow the scale and the controls' do not; some have no value."""
    cells = [("baseline", 0.0), *((k, s) for k in ("vector", "random") for s in SCALES)]
    rows: list[list[object]] = []
    for kind, scale in cells:
        gone = scale in lacking.get(kind, set())
        value = None if gone else float(kind == "vector" and scale > 0)
        layer, vector = (None, None) if kind == "baseline" else (3, "v")
        rows.append([kind, layer, scale, value, vector, gone])
    return SampleScore(score=Score(value=0.0, metadata={"cells": rows}), sample_id=name)


def metrics(*samples: SampleScore) -> dict[str, float]:
    compute: Any = dose_metric(n_resamples=50)
    found = compute(list(samples))
    assert isinstance(found, dict)
    return found


def test_prompts_that_lack_different_scales_are_left_out() -> None:
    """As many values each, of other scales: nothing of them may be mixed."""
    samples = [sample("a", vector={1.0}), sample("b", vector={2.0}), sample("c"), sample("d")]
    curves = dose_curves(samples, n_resamples=50)
    assert curves["vector"].n_prompts == 2
    assert [(p.scale, p.mean) for p in curves["vector"].points] == [
        (-1.0, 0.0), (0.0, 0.0), (1.0, 1.0), (2.0, 1.0),
    ]  # fmt: skip
    assert curves["random"].n_prompts == 4, "what the vector's answers lack is nothing to controls"
    assert metrics(*samples)["broken"] == 2


def test_a_scale_at_which_nobody_answers_is_not_missed() -> None:
    curves = dose_curves([sample(n, vector={2.0}) for n in "ab"], n_resamples=50)
    assert [p.scale for p in curves["vector"].points] == [-1.0, 0.0, 1.0]
    assert curves["vector"].n_prompts == 2


def test_the_metrics_are_of_the_best_scale_that_leaves_answers_whole() -> None:
    whole = [sample(n) for n in "abcd"]
    assert metrics(*whole) == {
        "effect": 1.0, "control_effect": 0.0, "scale": 1.0,
        "slope": pytest.approx((1.0 + 2.0) / (1 + 1 + 4)), "coherence": 1.0, "broken": 0.0,
    }  # fmt: skip
    # At 1, where one of four answers broke, the effect is the same; 2 is the one to use.
    found = metrics(sample("a", vector={1.0}), *whole[1:])
    assert (found["scale"], found["broken"], found["coherence"]) == (2.0, 1.0, 1.0)
    assert found["slope"] == pytest.approx(2.0 / (1 + 4))
    # No scale is usable, or nothing is known to count an effect from.
    gone = [sample(n, vector=set(SCALES)) for n in "ab"]
    assert metrics(*gone) == {"broken": 6.0}
    assert metrics(sample("a", baseline={0.0})) == {"broken": 0.0}
    assert metrics() == {"broken": 0.0}


def test_epochs_are_answers_of_one_prompt() -> None:
    """Twice as many answers of the same prompts are no more evidence."""
    once = [sample(str(i), vector={1.0} if i else set()) for i in range(3)]
    for samples in (once, [*once, *once]):
        rows = {(row.kind, row.scale): row for row in dose_table(samples, n_resamples=50)}
        assert rows["vector", 2.0].prompts == rows["random", 1.0].prompts == 3
        assert rows["vector", 1.0].interval is None, "of one prompt"


def test_an_effect_downwards_keeps_its_sign_and_its_interval() -> None:
    turned = []
    for i in range(20):
        one = sample(str(i))
        cells: Any = (one.score.metadata or {})["cells"]
        for row in cells:
            # At -1 sixteen of twenty prompts lose what all have unsteered.
            row[3] = float(not (row[0] == "vector" and row[2] < 0 and i < 16))
        turned.append(one)
    found = metrics(*turned)
    assert (found["effect"], found["scale"], found["slope"]) == (-0.8, -1.0, pytest.approx(0.8 / 6))
    assert -1.0 <= found["effect_low"] < -0.8 < found["effect_high"] < -0.5
    table = {(row.kind, row.scale): row for row in dose_table(turned)}
    assert table["vector", -1.0].prompts == 20
    assert table["random", -1.0].effect == table["vector", 2.0].effect == 0.0


def test_of_several_layers_the_best_is_told_by_name() -> None:
    def two(name: str) -> SampleScore:
        made, weak = sample(name), sample(name)
        rows: Any = (weak.score.metadata or {})["cells"]
        other = [["vector", 5, scale, 0.0, "v", False] for _, _, scale, *_ in rows[1:4]]
        cells: Any = (made.score.metadata or {})["cells"]
        cells += other
        return made

    found = metrics(two("a"), two("b"))
    assert found["effect@3"] == 1.0
    assert all(name.endswith("@3") or name == "broken" for name in found)


@pytest.mark.parametrize(
    ("text", "broken"),
    [
        ("", True),
        (" \n", True),
        ("TheNoNoNoNoNoNoNoNoNoNoNoNoNo", True),
        ("I am sure. I am sure. I am sure. I am sure. I am sure. I am", True),
        ("The main goods of the town Kroskester are salt.", False),
        ("Yes.", False),
        ("Wait..... the town pays 1000000 coins.", False),
        ("no, no, no, no, no, no, but the baker of Velosh did see a wolf by the river.", False),
    ],
)
def test_what_counts_as_broken(text: str, broken: bool) -> None:
    assert is_broken(text) is broken


def test_unsteered_answers_without_a_value() -> None:
    lacking = sample("a", baseline={0.0})
    curves = dose_curves([lacking, sample("b")], n_resamples=50)
    assert curves["vector"].n_prompts == 1
    alone = dose_curves([lacking], n_resamples=50)["vector"]
    assert [p.scale for p in alone.points] == list(SCALES)
    assert math.isnan(alone.flip_rate)
    assert alone.effect == 1.0
