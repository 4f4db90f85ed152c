"""The interval of an AUROC whose samples come in groups."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.stats import norm, t

from inspect_lens.probe import auroc, delong_interval

SETS = 400


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
    # 0.93, less its error in 400 sets. Few groups and few samples make it careful.
    assert 0.92 <= np.mean(hits) <= (0.99 if k >= 40 else 1.0)


def test_it_is_obuchowskis_formula() -> None:
    rng = np.random.default_rng(0)
    # Groups of 4 to 12 samples, all with both classes.
    group = np.repeat(np.arange(12), np.arange(12) % 5 * 2 + 4)
    size = group.size
    y = np.concatenate([np.arange(n) % 2 for n in np.bincount(group)])
    s = np.round(rng.normal(size=size) + y + 0.5 * rng.normal(size=12)[group], 1)
    kernel = (s[y == 1][:, None] > s[y == 0]) + 0.5 * (s[y == 1][:, None] == s[y == 0])
    area, (m, n) = kernel.mean(), kernel.shape
    share = [np.bincount(group[y == side], minlength=12) / k for side, k in ((1, m), (0, n))]
    x_sum = [(kernel.mean(1) - area)[group[y == 1] == g].sum() / m for g in range(12)]
    y_sum = [(kernel.mean(0) - area)[group[y == 0] == g].sum() / n for g in range(12)]
    spread = sum(
        (a / math.sqrt(1 - v) + b / math.sqrt(1 - w)) ** 2
        for a, b, v, w in zip(x_sum, y_sum, *share, strict=True)
    )
    free = min(1 / (w**2).sum() for w in share) - 1
    made = delong_interval(y, s, groups=group.tolist())
    logit, half = math.log(area / (1 - area)), t.ppf(0.975, free) / (area * (1 - area))
    step = half * math.sqrt(spread)
    # Never narrower than Hanley and McNeil's, with the design effect of the groups.
    assert made.low <= 1 / (1 + math.exp(step - logit)) + 1e-9
    above, below = kernel.mean(1), kernel.mean(0)
    alone = above.var(ddof=1) / m + below.var(ddof=1) / n
    q1, q2 = area / (2 - area), 2 * area**2 / (1 + area)
    least = area * (1 - area) + max(
        (a - 1) * (q1 - area**2) + (b - 1) * (q2 - area**2) for a, b in ((m, n), (n, m))
    )
    effect = min(max(1.0, spread / alone), max(m, n) / (free + 1))
    wide = half * math.sqrt(max(spread, least / (m * n) * effect))
    assert made.low == pytest.approx(1 / (1 + math.exp(wide - logit)), abs=1e-9)
    assert made.high == pytest.approx(1 / (1 + math.exp(-wide - logit)), abs=1e-9)
    assert made.method == "obuchowski, 12 groups"


@pytest.mark.parametrize("strength", [0.5, 1.2, 2.4])
@pytest.mark.parametrize("kind", ["one large", "falling"])
def test_it_holds_the_truth_of_unequal_groups(kind: str, strength: float) -> None:
    """As many degrees of freedom as groups, and equal shares, held it in 85 to 92 of 100 sets."""
    rng, hits, k = np.random.default_rng(16), [], 16
    sizes = np.full(k, 4) if kind == "one large" else 2 * (30 // np.arange(1, k + 1)) + 2
    sizes[0] = 24 if kind == "one large" else sizes[0]
    group = np.repeat(np.arange(k), sizes)
    y = np.concatenate([np.arange(n) % 2 for n in sizes])
    truth = 0.5 * (1.0 + math.erf(strength / math.sqrt(3.0) / math.sqrt(2.0)))
    for _ in range(400):
        own = rng.normal(size=k)[group]
        made = delong_interval(
            y, rng.normal(size=y.size) + (strength + own) * y, groups=group.tolist()
        )
        hits.append(made.low <= truth <= made.high)
    assert np.mean(hits) >= 0.92  # 0.93 less its error in 400 sets


@pytest.mark.parametrize("area", [0.6, 0.9, 0.95, 0.99])
@pytest.mark.parametrize("few", ["positives", "negatives"])
def test_ten_samples_of_a_class_have_an_interval_that_holds(few: str, area: float) -> None:
    """DeLong's alone held it in 86 to 94 of 100 sets of 10 positives and 300 negatives."""
    rng, hits = np.random.default_rng(10), []
    y = np.arange(310) < (10 if few == "positives" else 300)
    for _ in range(400):
        s = rng.normal(size=310)
        s[y] += norm.ppf(area) * math.sqrt(2.0)
        made = delong_interval(y, s)
        hits.append(made.low <= area <= made.high)
    assert np.mean(hits) >= 0.92


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


def test_near_one_the_bound_does_not_run_away() -> None:
    """One misplaced pair in 24 groups is no reason for a bound of 0.04."""
    group = np.repeat(np.arange(24), 8)
    y = np.tile([0, 1], 96)
    s = np.random.default_rng(0).normal(size=192) + 6.0 * y
    s[1] = 1.0
    made = delong_interval(y, s, groups=group.tolist())
    assert 0.99 < auroc(y, s) < 1.0
    assert made.low > 0.8
    assert made.high <= 1.0
