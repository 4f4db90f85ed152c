from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from inspect_lens.errors import SpecError
from inspect_lens.probe import POOLS, Pool, parse_pool, pool_scores

S = [3.0, -1.0, 4.0, 1.0, 5.0]


@pytest.mark.parametrize(
    ("pool", "value"),
    [
        ("mean", 2.4),
        ("last", 5.0),
        ("max", 5.0),
        ("top_k_mean:2", 4.5),
        ("top_k_mean", 2.4),
        ("top_k_mean:99", 2.4),
        ("rolling_mean_max:2", 3.0),
        ("rolling_mean_max:3", 10 / 3),
        ("rolling_mean_max", 2.4),
    ],
)
def test_value(pool: str, value: float) -> None:
    assert pool_scores(S, pool) == pytest.approx(value)


@pytest.mark.parametrize("pool", POOLS)
def test_one_token_is_its_own_pool(pool: str) -> None:
    assert pool_scores([2.5], pool, ends=[True]) == 2.5


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=40), st.integers(1, 45))
def test_wide_pools_equal_brute_force(scores: list[float], k: int) -> None:
    w = min(k, len(scores))
    windows = [np.mean(scores[i : i + w]) for i in range(len(scores) - w + 1)]
    assert pool_scores(scores, f"rolling_mean_max:{k}") == pytest.approx(max(windows))
    assert pool_scores(scores, f"top_k_mean:{k}") == pytest.approx(np.mean(sorted(scores)[-w:]))


@given(st.lists(st.floats(-2, 2) | st.sampled_from([0.0, -0.0]), min_size=1, max_size=9))
@pytest.mark.parametrize("pool", POOLS)
def test_tokens_at_once_give_the_bits_of_tokens_one_by_one(pool: str, scores: list[float]) -> None:
    at_once, one_by_one = parse_pool(pool).begin(), parse_pool(pool).begin()
    ends = [i % 3 == 2 for i in range(len(scores))]
    at_once.add_all(scores, ends)
    for score, end in zip(scores, ends, strict=True):
        one_by_one.add(score, end)
    assert np.float64(at_once.value).tobytes() == np.float64(one_by_one.value).tobytes()


@pytest.mark.parametrize("pool", POOLS)
def test_no_token_and_nan_are_refused(pool: str) -> None:
    with pytest.raises(SpecError, match="at least one token"):
        pool_scores([], pool)
    with pytest.raises(SpecError, match="NaN"):
        pool_scores([1.0, np.nan], pool)


@pytest.mark.parametrize(
    "bad", ["median", "mean:3", "top_k_mean:0", "top_k_mean:-1", "top_k_mean:x", "top_k_mean:", ""]
)
def test_unknown_pools_are_refused(bad: str) -> None:
    with pytest.raises(SpecError, match="allowed are mean, last, max"):
        parse_pool(bad)


def test_the_written_form_is_read_back() -> None:
    assert parse_pool("top_k_mean") == Pool("top_k_mean", 5)
    for name in POOLS:
        assert parse_pool(str(parse_pool(name))) == parse_pool(name)
