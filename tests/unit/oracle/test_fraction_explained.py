"""The fraction of variance that descriptions explain: closed forms, groups, baselines."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from inspect_lens.errors import SpecError
from inspect_lens.oracle import fraction_explained

Rows = NDArray[np.float64]


def units(rows: Rows) -> Rows:
    return np.asarray(rows / np.linalg.norm(rows, axis=1, keepdims=True))


def planted(seed: int, groups: int = 30, each: int = 3) -> tuple[Rows, Rows, list[int]]:
    rng = np.random.default_rng(seed)
    n = groups * each
    rows = rng.standard_normal((n, 16)) * rng.uniform(0.1, 9.0, (n, 1)) + 1
    return rows, rows + rng.standard_normal((n, 16)), [i // each for i in range(n)]


def test_it_is_one_minus_the_error_over_the_variance_of_directions() -> None:
    rows, made, _ = planted(0)
    cosines = (units(rows) * units(made)).sum(axis=1)
    spread = 1 - float((units(rows).mean(axis=0) ** 2).sum())
    wanted = 1 - (2 * (1 - cosines)).mean() / spread
    found = fraction_explained(rows, made)
    assert found.fraction == pytest.approx(wanted)
    assert (found.n_rows, found.n_groups, found.empty_text) == (90, 90, None)
    assert fraction_explained(rows, 0.01 * rows).fraction == pytest.approx(1.0)


def test_the_mean_row_has_nothing_but_for_its_length() -> None:
    """0 by definition; at unit length, as every reconstruction is, the mean itself is below."""
    rows, _, _ = planted(1)
    mean = units(rows).mean(axis=0)
    length = float(np.linalg.norm(mean))
    found = fraction_explained(rows, np.broadcast_to(mean, rows.shape), empty_text=mean)
    wanted = -((1 - length) ** 2) / (1 - length**2)
    assert found.fraction == pytest.approx(wanted)
    assert found.empty_text == pytest.approx(wanted)


@given(st.integers(0, 10_000))
def test_no_constant_is_better_than_the_mean(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows = rng.standard_normal((6, 3)) + 2 * rng.standard_normal(3)
    found = fraction_explained(rows, rows, empty_text=rng.standard_normal(3))
    assert found.empty_text is not None
    assert found.empty_text <= 1e-9


def test_shuffled_is_the_mean_over_all_pairs_of_two_groups() -> None:
    rows, made, groups = planted(2, groups=5)
    rows, made, groups = rows[:-1], made[:-1], groups[:-1]
    x, guess = units(rows), units(made)
    error = sum(
        np.mean([((guess[j] - x[i]) ** 2).sum() for j in range(14) if groups[j] != groups[i]])
        for i in range(14)
    )
    wanted = 1 - error / ((x - x.mean(axis=0)) ** 2).sum()
    found = fraction_explained(rows, made, groups=groups)
    assert found.shuffled == pytest.approx(wanted)
    assert found.fraction > found.shuffled
    assert math.isnan(fraction_explained(rows, made, groups=[0] * 14).shuffled)


def test_what_has_no_direction_or_does_not_fit_is_refused() -> None:
    rows, _, _ = planted(4)
    for bad in (rows[:1], rows[:, :3], np.zeros_like(rows), rows * np.nan):
        with pytest.raises(SpecError):
            fraction_explained(rows, bad)
    with pytest.raises(SpecError, match="one direction"):
        fraction_explained(np.full((3, 2), 0.1), np.ones((3, 2)))
    with pytest.raises(SpecError, match="groups: 2 for 90 rows"):
        fraction_explained(rows, rows, groups=[1, 2])
    with pytest.raises(SpecError, match="empty_text: 3 numbers"):
        fraction_explained(rows, rows, empty_text=[1.0, 2.0, 3.0])
