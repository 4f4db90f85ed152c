"""Token aggregation: how the scores of many tokens become one number.

Every rule here has a twin in `_streaming.py` that sees one token at a time and keeps a state of
fixed size. Sums run in the order of the tokens (`cumsum`, not numpy's pairwise `sum`), so that
both give the same bits. How a rule is written stands in `spec`, which judges requests by it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from inspect_lens.errors import SpecError
from inspect_lens.spec import POOLS, SENTENCE_POOL, Pool, parse_pool

__all__ = [
    "POOLS",
    "SENTENCE_POOL",
    "Pool",
    "check_scores",
    "parse_pool",
    "pool_scores",
    "sentence_ends",
]

_SENTENCE_END = re.compile(r"[.!?](?:[\"')\]]*)\s*$|\n\s*$")


def ordered_mean(scores: NDArray[np.float64]) -> float:
    """Mean summed from the first token to the last, as a stream does."""
    return float(np.cumsum(scores)[-1]) / scores.size


def _top_k_mean(scores: NDArray[np.float64], pool: Pool) -> float:
    k = min(pool.width, scores.size)
    return ordered_mean(np.sort(np.partition(scores, scores.size - k)[scores.size - k :])[::-1])


def _rolling_mean_max(scores: NDArray[np.float64], pool: Pool) -> float:
    k = min(pool.width, scores.size)
    windows = np.lib.stride_tricks.sliding_window_view(scores, k)
    return float((np.cumsum(windows, axis=1)[:, -1] / k).max())


def _softmax_mean(scores: NDArray[np.float64], pool: Pool) -> float:
    top = float(scores.max())
    # Weights of the distance to the largest, so that nothing overflows.
    weights = np.exp(pool.rate * (scores - top))
    return float(np.cumsum(scores * weights)[-1] / np.cumsum(weights)[-1])


def _averages(scores: NDArray[np.float64], pool: Pool) -> list[float]:
    rate, values = pool.rate, scores.tolist()
    state = values[0]
    averages = [state]
    for value in values[1:]:
        state = rate * value + (1.0 - rate) * state
        averages.append(state)
    return averages


def _sentence_mean_max(scores: NDArray[np.float64], ends: NDArray[np.bool_]) -> float:
    stops = [*(np.flatnonzero(ends) + 1).tolist(), scores.size]
    starts = [0, *stops[:-1]]
    return max(ordered_mean(scores[a:b]) for a, b in zip(starts, stops, strict=True) if b > a)


_PLAIN: Final[dict[str, Callable[[NDArray[np.float64]], float]]] = {
    "mean": ordered_mean,
    "last": lambda scores: float(scores[-1]),
    "max": lambda scores: float(scores.max()),
}
_WIDE: Final[dict[str, Callable[[NDArray[np.float64], Pool], float]]] = {
    "top_k_mean": _top_k_mean,
    "rolling_mean_max": _rolling_mean_max,
    "softmax_mean": _softmax_mean,
    "ema": lambda scores, pool: _averages(scores, pool)[-1],
    "ema_max": lambda scores, pool: max(_averages(scores, pool)),
}


def check_scores(scores: ArrayLike) -> NDArray[np.float64]:
    """Token scores as float64."""
    values = np.asarray(scores, dtype=np.float64)
    if values.ndim != 1 or values.size == 0:
        raise SpecError(
            f"scores: shape {values.shape}; allowed is (tokens,) with at least one token; choose "
            "positions that exist in this sample, or leave it unscored"
        )
    if np.isnan(values).any():
        raise SpecError(
            f"scores: {int(np.isnan(values).sum())} of {values.size} tokens are NaN; allowed are "
            "numbers; the activations are damaged"
        )
    return values


def pool_scores(
    scores: ArrayLike, pool: str | Pool = "mean", *, ends: ArrayLike | None = None
) -> float:
    """Make one score of the token scores of a sample.

    A width larger than the number of tokens is cut to it.

    Args:
        scores: (tokens,) float, in the order of the tokens.
        pool: the rule.
        ends: (tokens,) bool, whether a sentence ends with the token, as `sentence_ends` tells;
            needed by `sentence_mean_max` only.

    Returns:
        One number, bit-equal to what `StreamingPool` makes of the same tokens (`softmax_mean`:
        equal to 1e-12).

    Raises:
        SpecError: no token, a NaN, an unknown rule, or no sentence ends where they are needed.

    Example:
        ```python
        from inspect_lens.probe import pool_scores

        assert pool_scores([1.0, 2.0, 6.0]) == 3.0
        assert pool_scores([1.0, 2.0, 6.0], "max") == 6.0
        assert pool_scores([1.0, 2.0, 6.0], "top_k_mean:2") == 4.0
        ```
    """
    values = check_scores(scores)
    rule = pool if isinstance(pool, Pool) else parse_pool(pool)
    if rule.name == SENTENCE_POOL:
        return _sentence_mean_max(values, check_ends(ends, values.size))
    if rule.name in _PLAIN:
        return _PLAIN[rule.name](values)
    return _WIDE[rule.name](values, rule)


def check_ends(ends: ArrayLike | None, n: int) -> NDArray[np.bool_]:
    """Sentence ends (n,) as bools, or SpecError when they are missing."""
    marks = None if ends is None else np.asarray(ends, dtype=bool)
    if marks is None or marks.shape != (n,):
        raise SpecError(
            f"ends: {'not given' if marks is None else f'shape {marks.shape}'} for {n} tokens; "
            f"{SENTENCE_POOL} allows one bool per token; make them with sentence_ends(pieces)"
        )
    return marks


def sentence_ends(pieces: list[str] | tuple[str, ...]) -> NDArray[np.bool_]:
    """Tell with which tokens a sentence ends.

    A sentence ends with a token that ends in `.`, `!` or `?` (closing quotes and brackets may
    follow) when the next token begins with white space or there is none, and with a line break.

    Args:
        pieces: text of each token, in order.

    Returns:
        (tokens,) bool.

    Example:
        ```python
        from inspect_lens.probe import sentence_ends

        assert sentence_ends(["It", " is", ".", " Yes", "!"]).tolist() == [0, 0, 1, 0, 1]
        ```
    """
    following = [*pieces[1:], " "]
    return np.array(
        [
            bool(_SENTENCE_END.search(piece))
            and (piece[-1:].isspace() or after[:1].isspace() or not after)
            for piece, after in zip(pieces, following, strict=True)
        ],
        dtype=bool,
    )
