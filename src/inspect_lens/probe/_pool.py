"""Token aggregation: how the scores of many tokens become one number."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from inspect_lens.errors import SpecError

__all__ = ["POOLS", "Pool", "parse_pool", "pool_scores"]


class Pool(NamedTuple):
    """A rule and its width, written `mean` or `top_k_mean:5`."""

    name: str
    """One of `POOLS`."""
    k: int | None = None
    """Tokens of a top-k mean or of a window; None where the rule has no width."""

    def __str__(self) -> str:
        """The form that `parse_pool` reads."""
        return self.name if self.k is None else f"{self.name}:{self.k}"


def _top_k_mean(scores: NDArray[np.float64], k: int) -> float:
    k = min(k, scores.size)
    return float(np.partition(scores, scores.size - k)[scores.size - k :].mean())


def _rolling_mean_max(scores: NDArray[np.float64], k: int) -> float:
    k = min(k, scores.size)
    return float(np.lib.stride_tricks.sliding_window_view(scores, k).mean(axis=1).max())


_PLAIN: Final[dict[str, Callable[[NDArray[np.float64]], float]]] = {
    "mean": lambda scores: float(scores.mean()),
    "last": lambda scores: float(scores[-1]),
    "max": lambda scores: float(scores.max()),
}
_WIDE: Final[dict[str, tuple[Callable[[NDArray[np.float64], int], float], int]]] = {
    "top_k_mean": (_top_k_mean, 5),
    "rolling_mean_max": (_rolling_mean_max, 10),
}

POOLS: Final = (*_PLAIN, *_WIDE)
"""Names of the rules; `top_k_mean` and `rolling_mean_max` take a width after a colon."""


def parse_pool(value: str) -> Pool:
    """Read a pool as a user writes it.

    Args:
        value: `mean`, `last`, `max`, `top_k_mean` (k 5), `rolling_mean_max` (window 10), the
            last two also with another width, such as `top_k_mean:3`.

    Returns:
        The rule, its width filled in.

    Raises:
        SpecError: anything else.

    Source:
        Defaults of top-k and window: arXiv:2601.11516.
    """
    name, colon, width = str(value).partition(":")
    if name in _PLAIN and not colon:
        return Pool(name)
    if name in _WIDE and (not colon or (width.isdecimal() and int(width) > 0)):
        return Pool(name, int(width) if colon else _WIDE[name][1])
    raise SpecError(
        f"pool={value!r}; allowed are {', '.join(_PLAIN)}, {', '.join(_WIDE)}, the last two also "
        "with a width as in top_k_mean:5; correct the name"
    )


def pool_scores(scores: ArrayLike, pool: str | Pool = "mean") -> float:
    """Aggregate token scores.

    A width larger than the number of tokens is cut to it.

    Args:
        scores: (tokens,) float, in the order of the tokens.
        pool: the rule.

    Returns:
        One number.

    Raises:
        SpecError: no token, a NaN, or an unknown rule.
    """
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
    rule = pool if isinstance(pool, Pool) else parse_pool(pool)
    if rule.k is None:
        return _PLAIN[rule.name](values)
    return _WIDE[rule.name][0](values, rule.k)
