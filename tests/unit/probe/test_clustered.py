"""The interval of an AUROC whose samples come in groups."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.stats import t

from inspect_lens.probe import auroc, bootstrap_interval, delong_interval
from inspect_lens.probe._intervals import student_quantile

SETS = 1000


def clustered(
    rng: np.random.Generator, k: int, *, size: int, both: bool, strength: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray, float]:
    """Labels, scores, groups, and the true AUROC; half of the variance is between groups.

    With `both`, every group holds both classes and its positives have a strength of their own.
    """
    group = np.repeat(np.arange(k), size)
    y = np.tile([0, 1], k * size // 2) if both else group % 2
    own, noise = rng.normal(size=k)[group], rng.normal(size=k * size)
    scores = noise + (strength + own) * y if both else noise + own + strength * y
    spread = math.sqrt(3.0 if both else 4.0)
    return y, scores, group, 0.5 * (1.0 + math.erf(strength / spread / math.sqrt(2.0)))


@pytest.mark.parametrize(
    ("k", "both", "strength"),
    [(10, False, 1.2), (10, True, 2.4), (16, False, 2.4), (16, True, 1.2), (40, False, 1.2),
     (40, True, 2.4)],
)  # fmt: skip
def test_it_holds_the_truth(k: int, both: bool, strength: float) -> None:
    rng, hits = np.random.default_rng(k), []
    for _ in range(SETS):
        y, s, group, truth = clustered(rng, k, size=6, both=both, strength=strength)
        made = delong_interval(y, s, groups=group.tolist())
        hits.append(made.low <= truth <= made.high)
    # Of 10 groups with one class each, 5 hold a class: t of 4 is careful.
    assert 0.93 <= np.mean(hits) <= (0.97 if k >= 40 else 0.995)


def test_percentiles_of_few_groups_are_too_narrow() -> None:
    """Why the cluster bootstrap is not what cards show first."""
    rng, hits = np.random.default_rng(16), np.zeros(2)
    for seed in range(300):
        y, s, group, truth = clustered(rng, 16, size=6, both=True, strength=2.4)
        drawn = bootstrap_interval(y, s, groups=group.tolist(), n_resamples=300, seed=seed)
        made = delong_interval(y, s, groups=group.tolist())
        hits += [i.low <= truth <= i.high for i in (drawn, made)]
    assert hits[0] / 300 < 0.9 < hits[1] / 300


def test_it_is_obuchowskis_formula() -> None:
    rng = np.random.default_rng(0)
    group = rng.permutation(np.arange(96) % 12)
    y, order = np.zeros(96, dtype=int), np.argsort(group, kind="stable")
    y[order] = rng.random(96) < np.repeat(np.linspace(0.3, 0.7, 12), 8)
    y[order[::8]], y[order[7::8]] = 0, 1  # both classes in every group
    s = np.round(rng.normal(size=96) + y + 0.5 * rng.normal(size=12)[group], 1)
    kernel = (s[y == 1][:, None] > s[y == 0]) + 0.5 * (s[y == 1][:, None] == s[y == 0])
    area, (m, n) = kernel.mean(), kernel.shape
    x_sum = [(kernel.mean(1) - area)[group[y == 1] == g].sum() for g in range(12)]
    y_sum = [(kernel.mean(0) - area)[group[y == 0] == g].sum() for g in range(12)]
    # All 12 groups hold both classes: one correction for all of the three terms.
    s10, s01, s11 = (
        12 / 11 * np.dot(a, b) / c / d
        for a, b, c, d in ((x_sum, x_sum, m, m), (y_sum, y_sum, n, n), (x_sum, y_sum, m, n))
    )
    step = t.ppf(0.975, 11) * math.sqrt(s10 + s01 + 2 * s11) / (area * (1 - area))
    logit = math.log(area / (1 - area))
    made = delong_interval(y, s, groups=group.tolist())
    assert made.low == pytest.approx(1 / (1 + math.exp(step - logit)), abs=1e-9)
    assert made.high == pytest.approx(1 / (1 + math.exp(-step - logit)), abs=1e-9)
    assert made.method == "obuchowski, 12 groups"


def test_copies_are_worth_what_they_are_copies_of() -> None:
    rng, y = np.random.default_rng(1), np.arange(300) % 2
    s = rng.normal(size=300) + y
    alone = delong_interval(y, s)
    copies = delong_interval(
        np.repeat(y, 4), np.repeat(s, 4), groups=np.repeat(np.arange(300), 4).tolist()
    )
    assert (copies.low, copies.high) == pytest.approx((alone.low, alone.high), abs=0.002)
    # Groups need not stand together, and their names say nothing.
    order = rng.permutation(1200)
    names = [f"scenario {i % 300}" for i in range(1200)]
    mixed = delong_interval(
        np.tile(y, 4)[order], np.tile(s, 4)[order], groups=[names[i] for i in order]
    )
    assert (mixed.low, mixed.high) == pytest.approx((copies.low, copies.high), abs=1e-12)
    assert auroc(y, s) == auroc(np.tile(y, 4), np.tile(s, 4))


def test_quantiles_are_those_of_scipy() -> None:
    for free in (1, 2, 3, 4, 9, 10, 999, 1000):
        for p in (0.6, 0.95, 0.975, 0.9995):
            assert student_quantile(p, free) == pytest.approx(t.ppf(p, free), rel=1e-10)
