from __future__ import annotations

import math
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inspect_lens.errors import SpecError
from inspect_lens.probe import (
    POOLS,
    StreamingPool,
    first_crossing,
    pool_scores,
    running_pool,
    sentence_ends,
)

PARAMETERS = {
    "top_k_mean": st.integers(1, 12), "rolling_mean_max": st.integers(1, 12),
    "softmax_mean": st.floats(0.01, 20.0), "ema": st.floats(0.01, 1.0),
    "ema_max": st.floats(0.01, 1.0),
}  # fmt: skip
SCORES = st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=40)


@st.composite
def pools(draw: st.DrawFn) -> str:
    name = draw(st.sampled_from(POOLS))
    return f"{name}:{draw(PARAMETERS[name])!r}" if name in PARAMETERS else name


@settings(max_examples=400)
@given(pools(), SCORES, st.data())
def test_tokens_in_any_pieces_give_what_the_whole_gives(
    pool: str, scores: list[float], data: st.DataObject
) -> None:
    n = len(scores)
    ends = data.draw(st.lists(st.booleans(), min_size=n, max_size=n))
    cuts = sorted(data.draw(st.lists(st.integers(0, n), max_size=6)))
    stream = StreamingPool(pool)
    for a, b in zip([0, *cuts], [*cuts, n], strict=True):
        stream.update(scores[a:b], ends=ends[a:b])
    whole = pool_scores(scores, pool, ends=ends)
    if pool.startswith("softmax"):
        assert stream.value == pytest.approx(whole, rel=1e-12, abs=1e-9)
    else:
        assert stream.value == whole
    assert stream.n == n


@given(pools(), SCORES)
def test_a_running_pool_is_the_pool_of_every_beginning(pool: str, scores: list[float]) -> None:
    ends = [i % 3 == 2 for i in range(len(scores))]
    running = running_pool(scores, pool, ends=ends)
    expected = [pool_scores(scores[: i + 1], pool, ends=ends[: i + 1]) for i in range(len(scores))]
    np.testing.assert_allclose(running, expected, rtol=1e-12, atol=1e-9)


@given(SCORES, st.floats(0.1, 5.0))
def test_softmax_and_averages_equal_their_formulas(scores: list[float], k: float) -> None:
    s = np.array(scores)
    weights = np.exp(k * (s - s.max()))
    assert pool_scores(s, f"softmax_mean:{k!r}") == pytest.approx(
        (s * weights).sum() / weights.sum(), rel=1e-9, abs=1e-9
    )
    # Closed form of the recursion: weights a (1 - a)^(n - t), all the rest on the first token.
    a, n = min(k / 5.0, 1.0), len(s)
    powers = (1 - a) ** np.arange(n - 1, -1, -1, dtype=float)
    form = np.where(np.arange(n) == 0, 1.0, a) * powers
    assert form.sum() == pytest.approx(1.0)
    assert pool_scores(s, f"ema:{a!r}") == pytest.approx(float(form @ s), rel=1e-9, abs=1e-6)


def test_the_state_does_not_grow() -> None:
    for pool in POOLS:
        stream = StreamingPool(pool)
        sizes = []
        for _ in range(3):
            stream.update(np.linspace(0, 1, 500), ends=[False] * 500)
            rule = vars(stream._rule)
            sizes.append(sum(len(v) for v in rule.values() if hasattr(v, "__len__")))
        assert sizes[0] == sizes[2] <= 10


def test_sentences_are_pooled_one_by_one() -> None:
    pieces = ["One", " two", ".", " Three", "!", " v", "1", ".", "5", " x", "\n", "rest"]
    ends = sentence_ends(pieces)
    assert np.flatnonzero(ends).tolist() == [2, 4, 10]
    scores = [0, 0, 3, 4, 0, 0, 0, 0, 0, 0, 1.5, 0]
    assert pool_scores(scores, "sentence_mean_max", ends=ends) == 2.0
    with pytest.raises(SpecError, match=re.escape("sentence_ends(pieces)")):
        pool_scores(scores, "sentence_mean_max")


def test_the_alarm_is_the_first_token_above_the_threshold() -> None:
    scores = [0.0, 1.0, 0.2, 3.0, 3.0, 3.0]
    assert first_crossing(scores, 1.0) == 3
    assert first_crossing(scores, 0.99) == 1
    assert first_crossing(scores, 3.0) is None
    assert first_crossing(scores, 1.5, pool="mean") == 5
    assert first_crossing(scores, 1.0, pool="ema:0.5") == 3


def test_an_empty_stream_has_no_value_and_nan_is_refused() -> None:
    stream = StreamingPool("max")
    with pytest.raises(SpecError, match="no token yet"):
        stream.update([]).value  # noqa: B018
    with pytest.raises(SpecError, match="NaN"):
        stream.update([math.nan])
    with pytest.raises(SpecError, match="allowed are mean"):
        StreamingPool("ema:1.5")
