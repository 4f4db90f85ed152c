"""What counts as robust: a loss that is shown to be small, not one that was not found."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest

from inspect_lens.errors import SpecError
from inspect_lens.probe import Probe, ProbeCard, compare_auroc
from inspect_lens.train import ActivationSet, StyleShift, style_shift

PROBE = Probe.from_direction([1.0, 0.0], card=ProbeCard(name="t/p", layers=(0,), hidden=2))


def shift(
    before: np.ndarray, after: np.ndarray, y: np.ndarray, size: int = 1, margin: float = 0.05
) -> StyleShift:
    """The comparison of two lists of scores, `size` samples to a group."""

    def scored(name: str, scores: Sequence[float]) -> ActivationSet:
        return ActivationSet(
            name=name, model="m", layers=(0,), labels=y, ids=[str(i) for i in range(y.size)],
            groups=[str(i // size) for i in range(y.size)],
            acts=[np.array([[[s, 0.0]]]) for s in scores],
        )  # fmt: skip

    return style_shift(PROBE, scored("plain", before), scored("other", after), margin=margin)


def test_total_failure_is_not_robust() -> None:
    rng, y = np.random.default_rng(0), np.arange(200) % 2
    noise = rng.normal(size=200)
    made = shift(noise + 20 * y, noise - 20 * y, y)
    assert (made.comparison.auroc_a, made.comparison.auroc_b) == (1.0, 0.0)
    assert made.shift == 0.0, "negatives stay where they are"
    assert math.isnan(made.comparison.p_value)
    assert (made.verdict, made.robust) == ("not robust", False)
    # By groups, too: every draw is the same.
    assert shift(noise + 20 * y, noise - 20 * y, y, size=4).verdict == "not robust"


def test_a_small_set_shows_nothing() -> None:
    rng, y = np.random.default_rng(3), np.arange(8) % 2
    before = rng.normal(size=8)
    made = shift(before + 4 * y, before + 1.6 * y, y)
    assert made.comparison.difference > 0
    assert made.comparison.p_value > 0.05
    assert (made.verdict, made.robust) == ("cannot tell", False)
    # Perfect in both styles, and still too few to show a loss below 0.05.
    y = np.arange(60) % 2
    assert shift(9.0 * y, 8.0 * y, y).verdict == "cannot tell"
    assert shift(9.0 * y, 8.0 * y, y, margin=0.2).verdict == "robust"


def test_few_groups_cannot_tell_and_enough_samples_can() -> None:
    rng, y = np.random.default_rng(1), np.arange(400) % 2
    before = rng.normal(size=400) + 2.5 * y
    after = before + 0.05 * rng.normal(size=400)
    assert shift(before, after, y).verdict == "robust"
    assert shift(before, after, y, size=4).verdict == "robust"
    few = shift(before, after, y, size=100)
    assert few.comparison.too_few
    assert (few.verdict, few.robust) == ("cannot tell", False)
    assert shift(before, after + 3.0, y).verdict == "not robust", "negatives moved"
    with pytest.raises(SpecError, match="margin=0"):
        shift(before, after, y, margin=0.0)


def test_a_loss_of_the_margin_seldom_passes() -> None:
    """Non-inferiority: where the true loss is the margin, few of 100 sets are called robust."""
    rng, y, passed = np.random.default_rng(1), np.arange(300) % 2, 0
    truths = [0.5 * (1.0 + math.erf(d / 2.0)) for d in (2.0, 1.5)]
    for _ in range(150):
        shared = rng.normal(size=300)
        a, b = (0.8 * shared + 0.6 * rng.normal(size=300) + d * y for d in (2.0, 1.5))
        found = compare_auroc(y, a, b)
        passed += StyleShift(found, shift=0.0, fpr=None, margin=truths[0] - truths[1]).robust
    assert passed / 150 < 0.06
