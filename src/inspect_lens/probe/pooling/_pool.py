"""Token aggregation: how the scores of many tokens become one number.

Each rule sees one token at a time and keeps a state of fixed size, so that a whole answer, a stream
and a monitor after every token get the same bits. How a rule is written stands in `spec`, which
judges requests by it.
"""

from __future__ import annotations

import math
import re
from bisect import insort
from collections import deque
from collections.abc import Callable
from typing import Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from inspect_lens.errors import SpecError
from inspect_lens.spec import SENTENCE_POOL, Pool, parse_pool

_SENTENCE_END = re.compile(r"[.!?](?:[\"')\]]*)\s*$|\n\s*$")


class _Rule:
    """State of one rule; `add` takes a token, `value` needs one at least."""

    def add(self, score: float, end: bool) -> None:
        raise NotImplementedError

    @property
    def value(self) -> float:
        raise NotImplementedError


class _Mean(_Rule):
    def __init__(self, _: Pool) -> None:
        self.total, self.n = 0.0, 0

    def add(self, score: float, end: bool) -> None:
        self.total += score
        self.n += 1

    @property
    def value(self) -> float:
        return self.total / self.n


class _Last(_Rule):
    def __init__(self, _: Pool) -> None:
        self.state = math.nan

    def add(self, score: float, end: bool) -> None:
        self.state = score

    @property
    def value(self) -> float:
        return self.state


class _Max(_Last):
    def __init__(self, _: Pool) -> None:
        self.state = -math.inf

    def add(self, score: float, end: bool) -> None:
        self.state = max(self.state, score)


class _TopK(_Rule):
    def __init__(self, pool: Pool) -> None:
        self.k, self.kept = pool.width, list[float]()

    def add(self, score: float, end: bool) -> None:
        insort(self.kept, score)
        if len(self.kept) > self.k:
            del self.kept[0]

    @property
    def value(self) -> float:
        total = 0.0
        for score in reversed(self.kept):
            total += score
        return total / len(self.kept)


class _RollingMax(_Rule):
    def __init__(self, pool: Pool) -> None:
        self.window: deque[float] = deque(maxlen=pool.width)
        self.best = -math.inf

    def add(self, score: float, end: bool) -> None:
        self.window.append(score)
        if len(self.window) == self.window.maxlen:
            self.best = max(self.best, self._mean())

    def _mean(self) -> float:
        total = 0.0
        for score in self.window:
            total += score
        return total / len(self.window)

    @property
    def value(self) -> float:
        # Before the window is full, all there is makes the one window.
        return self._mean() if len(self.window) != self.window.maxlen else self.best


class _Softmax(_Rule):
    def __init__(self, pool: Pool) -> None:
        self.sharpness, self.top, self.total, self.weight = pool.rate, -math.inf, 0.0, 0.0

    def add(self, score: float, end: bool) -> None:
        if score > self.top:
            shrink = math.exp(self.sharpness * (self.top - score))
            self.top, self.total, self.weight = score, self.total * shrink, self.weight * shrink
        weight = math.exp(self.sharpness * (score - self.top))
        self.total += score * weight
        self.weight += weight

    @property
    def value(self) -> float:
        return self.total / self.weight


class _Average(_Rule):
    def __init__(self, pool: Pool) -> None:
        self.rate, self.state, self.largest = pool.rate, math.nan, -math.inf
        self.of_all = pool.name == "ema_max"

    def add(self, score: float, end: bool) -> None:
        first = math.isnan(self.state)
        self.state = score if first else self.rate * score + (1.0 - self.rate) * self.state
        self.largest = max(self.largest, self.state)

    @property
    def value(self) -> float:
        return self.largest if self.of_all else self.state


class _SentenceMax(_Rule):
    def __init__(self, pool: Pool) -> None:
        self.sentence, self.best = _Mean(pool), -math.inf

    def add(self, score: float, end: bool) -> None:
        self.sentence.add(score, end)
        if end:
            self.best, self.sentence = max(self.best, self.sentence.value), _Mean(Pool("mean"))

    @property
    def value(self) -> float:
        return max(self.best, self.sentence.value) if self.sentence.n else self.best


_RULES: Final[dict[str, Callable[[Pool], _Rule]]] = {
    "mean": _Mean,
    "last": _Last,
    "max": _Max,
    "top_k_mean": _TopK,
    "rolling_mean_max": _RollingMax,
    "softmax_mean": _Softmax,
    "ema": _Average,
    "ema_max": _Average,
    SENTENCE_POOL: _SentenceMax,
}


def _checked(scores: ArrayLike) -> NDArray[np.float64]:
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


def _marked(
    values: NDArray[np.float64], pool: Pool, ends: ArrayLike | None
) -> list[tuple[float, bool]]:
    """Each score, and whether a sentence ends with its token."""
    if pool.name != SENTENCE_POOL:
        return [(score, False) for score in values.tolist()]
    marks = None if ends is None else np.asarray(ends, dtype=bool)
    if marks is None or marks.shape != values.shape:
        raise SpecError(
            f"ends: {'not given' if marks is None else f'shape {marks.shape}'} for {values.size} "
            f"tokens; {SENTENCE_POOL} allows one bool per token; make them with "
            "sentence_ends(pieces)"
        )
    return list(zip(values.tolist(), marks.tolist(), strict=True))


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
        One number, bit-equal to what `StreamingPool` makes of the same tokens.

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
    if np.size(scores) == 0:
        _checked(scores)
    return StreamingPool(pool).update(scores, ends=ends).value


class StreamingPool:
    """Pools token scores while tokens arrive; memory does not grow.

    Args:
        pool: the rule.

    Raises:
        SpecError: an unknown rule.

    Example:
        ```python
        from inspect_lens.probe import StreamingPool, pool_scores

        stream = StreamingPool("top_k_mean:2")
        for score in (0.1, 2.0, -1.0, 1.0):
            stream.update([score])
        assert stream.value == pool_scores([0.1, 2.0, -1.0, 1.0], "top_k_mean:2") == 1.5
        ```
    """

    def __init__(self, pool: str | Pool = "mean") -> None:
        self.pool = pool if isinstance(pool, Pool) else parse_pool(pool)
        self.n = 0
        self._rule = _RULES[self.pool.name](self.pool)

    def update(self, scores: ArrayLike, *, ends: ArrayLike | None = None) -> StreamingPool:
        """Take the next tokens.

        Args:
            scores: (tokens,) float; any number of them, also none.
            ends: (tokens,) bool, sentence ends; for `sentence_mean_max` only.

        Returns:
            self.

        Raises:
            SpecError: a NaN, or no sentence ends where they are needed.
        """
        if np.size(scores) == 0:
            return self
        values = _checked(scores)
        for score, end in _marked(values, self.pool, ends):
            self._rule.add(score, end)
        self.n += values.size
        return self

    @property
    def value(self) -> float:
        """The pooled score of all tokens so far.

        Raises:
            SpecError: there was no token yet.
        """
        if self.n == 0:
            raise SpecError(
                "StreamingPool: no token yet; allowed is a value after at least one; call update "
                "with scores first"
            )
        return self._rule.value


def running_pool(
    scores: ArrayLike, pool: str | Pool = "mean", *, ends: ArrayLike | None = None
) -> NDArray[np.float64]:
    """The pooled score after each token: what a monitor sees while the model writes.

    Args:
        scores: (tokens,) float.
        pool: the rule; `last` gives the scores themselves.
        ends: (tokens,) bool, sentence ends; for `sentence_mean_max` only.

    Returns:
        (tokens,) float64; its last entry is `pool_scores` of all.

    Raises:
        SpecError: as `pool_scores`.

    Example:
        ```python
        from inspect_lens.probe import running_pool

        assert running_pool([1.0, 3.0, 2.0], "mean").tolist() == [1.0, 2.0, 2.0]
        assert running_pool([1.0, 3.0, 2.0], "max").tolist() == [1.0, 3.0, 3.0]
        ```
    """
    values = _checked(scores)
    rule = pool if isinstance(pool, Pool) else parse_pool(pool)
    state, made = _RULES[rule.name](rule), np.empty(values.size)
    for i, (score, end) in enumerate(_marked(values, rule, ends)):
        state.add(score, end)
        made[i] = state.value
    return made


def first_crossing(
    scores: ArrayLike, threshold: float, *, pool: str | Pool = "last", ends: ArrayLike | None = None
) -> int | None:
    """The token at which a monitor first raises the alarm.

    Args:
        scores: (tokens,) float.
        threshold: the alarm is raised strictly above it.
        pool: what the monitor compares: `last` the token's own score, `ema` a smoothed one,
            or any other rule over the tokens so far.
        ends: (tokens,) bool, sentence ends; for `sentence_mean_max` only.

    Returns:
        0-based index of the token, or None when there is no alarm.

    Raises:
        SpecError: as `pool_scores`.

    Example:
        ```python
        from inspect_lens.probe import first_crossing

        assert first_crossing([0.0, 0.4, 2.0, 0.1], threshold=1.0) == 2
        assert first_crossing([0.0, 0.4, 2.0, 0.1], threshold=1.0, pool="mean") is None
        ```
    """
    above = np.flatnonzero(running_pool(scores, pool, ends=ends) > threshold)
    return int(above[0]) if above.size else None


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
