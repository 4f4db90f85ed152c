from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import mannwhitneyu, rankdata
from sklearn.metrics import roc_auc_score

from inspect_lens.errors import SpecError
from inspect_lens.probe import paired_permutation_test, permutation_test


def test_permutations_equal_the_exact_test() -> None:
    y, s = [1, 1, 1, 1, 0, 0, 0, 0, 0], [3.1, 2.2, 4.0, 1.6, 1.0, 2.0, 0.4, 1.5, 2.5]
    exact = mannwhitneyu(s[:4], s[4:], alternative="greater", method="exact").pvalue
    assert permutation_test(y, s, n_permutations=20_000) == pytest.approx(exact, abs=0.005)
    assert permutation_test([1] * 20 + [0] * 20, range(40, 0, -1)) == 1 / 10_001


def test_permutations_inside_groups_ignore_what_groups_differ_by() -> None:
    rng = np.random.default_rng(0)
    group = np.repeat(np.arange(10), 8)
    # Groups differ in score and in share of positives; inside a group the label means nothing.
    y = rng.random(80) < np.where(group < 5, 0.85, 0.15)
    s = rng.normal(size=80) + 3 * (group < 5)
    assert permutation_test(y, s) < 0.001
    assert permutation_test(y, s, groups=group.tolist()) > 0.05


def test_groups_of_one_class_exchange_their_labels() -> None:
    """To leave the groups out, as was advised, finds something in 27 of 100 sets of nothing."""
    # Two groups of each class: 6 ways to label them, and one of them is this.
    exact = permutation_test(
        [0, 0, 1, 1, 0, 0, 1, 1], [1, 2, 7, 8, 3, 4, 5, 6], groups=list("aabbccdd")
    )
    assert exact == pytest.approx(1 / 6, abs=0.02)
    rng, found = np.random.default_rng(1), np.zeros(2)
    for seed in range(200):
        group = np.repeat(np.arange(20), rng.integers(2, 12, 20))
        y = group % 2
        s = rng.normal(size=20)[group] + rng.normal(size=group.size)
        groups = group.tolist()
        found += [
            permutation_test(y, s, groups=g, n_permutations=400, seed=seed) < 0.05
            for g in (groups, None)
        ]
    assert found[0] / 200 < 0.09
    assert found[1] / 200 > 0.12


def test_swapping_two_probes() -> None:
    rng, y = np.random.default_rng(0), np.arange(120) % 2
    good, bad, twin = (rng.normal(size=120) + d * y for d in (3.0, 0.2, 3.0))
    assert paired_permutation_test(y, good * 1000, bad, n_permutations=500) < 0.01
    assert paired_permutation_test(y, good, twin, n_permutations=500) > 0.05
    ps = []
    for _ in range(60):
        a, b = rng.normal(size=(2, 120)) + y
        ps.append(paired_permutation_test(y, a, b, n_permutations=99))
    assert 0.35 < np.mean(ps) < 0.65


def _by_enumeration(y: np.ndarray, a: np.ndarray, b: np.ndarray, group: np.ndarray) -> float:
    """Share of all swaps of whole groups that make as large a difference, by the definition."""
    ranks, names = [rankdata(s) for s in (a, b)], np.unique(group)

    def gap(swapped: tuple[bool, ...]) -> float:
        swap = np.isin(group, names[list(swapped)])
        sides = (np.where(swap, *ranks[::-1]), np.where(swap, *ranks))
        return abs(float(roc_auc_score(y, sides[0])) - float(roc_auc_score(y, sides[1])))

    made = [gap(swapped) for swapped in itertools.product([False, True], repeat=names.size)]
    return float(np.mean(np.array(made) >= gap((False,) * names.size) - 1e-9))


@settings(max_examples=25, deadline=None)
@given(st.integers(2, 40), st.integers(1, 7), st.integers(0, 99))
def test_swaps_of_groups_equal_their_enumeration(n: int, n_groups: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    y = rng.permutation(np.arange(n) % 2)
    a, b = np.round(rng.normal(size=(2, n)), 1)  # with ties
    group = rng.integers(n_groups, size=n)
    expected = _by_enumeration(y, a, b, group)
    made = paired_permutation_test(y, a, b, groups=group.tolist(), n_permutations=64)
    assert made == pytest.approx(expected, abs=1e-12)
    named = [f"scenario {g}" for g in group]
    assert paired_permutation_test(y, b, a, groups=named, n_permutations=64) == made
    # Drawn where there are more swaps than are asked for.
    if len(set(named)) > 6:
        drawn = paired_permutation_test(y, a, b, groups=named, n_permutations=63, seed=seed)
        assert abs(drawn - expected) < 0.25


def test_few_samples_are_swapped_in_every_way() -> None:
    rng, y = np.random.default_rng(3), np.arange(6) % 2
    a, b = rng.normal(size=6) + 2 * y, rng.normal(size=6)
    assert paired_permutation_test(y, a, b) == pytest.approx(_by_enumeration(y, a, b, np.arange(6)))
    assert paired_permutation_test(y, a, b, groups=[1] * 6) == 1.0
    assert paired_permutation_test(y, a, a, groups=np.arange(6) // 2) == 1.0  # type: ignore[arg-type]
    with pytest.raises(SpecError, match="3 groups for 6 samples"):
        paired_permutation_test(y, a, b, groups=[1, 2, 3])


def test_swaps_of_groups_are_right_where_swaps_of_samples_are_too_sure() -> None:
    rng, wrong, runs = np.random.default_rng(0), np.zeros(2), 200
    for seed in range(runs):
        group = np.repeat(np.arange(12), 10)
        y = group % 2
        a, b = y + rng.normal(size=(2, 12))[:, group] + 0.5 * rng.normal(size=(2, 120))
        kinds: tuple[list[int] | None, ...] = (group.tolist(), None)
        for i, groups in enumerate(kinds):
            p = paired_permutation_test(y, a, b, groups=groups, n_permutations=199, seed=seed)
            wrong[i] += p <= 0.05
    assert 0.01 <= wrong[0] / runs <= 0.09
    assert wrong[1] / runs > 0.2
