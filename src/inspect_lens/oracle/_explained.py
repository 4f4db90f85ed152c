"""How much of the variance of rows their reconstructions explain, beside what explains nothing."""

from __future__ import annotations

import math
import warnings
from collections.abc import Hashable, Sequence
from typing import Final

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pydantic import BaseModel, ConfigDict, Field

from inspect_lens.errors import SpecError
from inspect_lens.probe import Interval

_FEWEST: Final = 20
"""Groups below which there is no interval: the mean of few rows is too near to each of them. In
simulation 95% intervals hold the truth in 46 of 100 sets of 10 groups, in 80 of 20, in 92 of 50."""
_CELLS: Final = 8_000_000
"""Numbers of drawn means that are held at once."""


class FractionExplained(BaseModel):
    """What reconstructions explain of rows at unit length, with an interval and two baselines."""

    model_config = ConfigDict(frozen=True)

    fraction: float = Field(
        description="1 - Σ|x̂ - x|² / Σ|x - m|²; m is the mean of these rows. At most 1, and 0 for "
        "what is no better than m in the place of every reconstruction."
    )
    interval: Interval = Field(
        description="BCa interval of draws of whole groups, each with the mean of its own rows; "
        "NaN with fewer than 20 groups. In simulation a 95% interval holds the truth in 80 of 100 "
        "sets of 20 groups, and in 92 of 50: the mean of few rows is too near to each of them."
    )
    shuffled: float = Field(
        description="The same if each row is paired with reconstructions of all other groups; the "
        "mean over these pairings. NaN with one group."
    )
    empty_text: float | None = Field(
        description="The same if what is made of an empty text stands in the place of every "
        "reconstruction. It is never above 0, because no constant is better than the mean."
    )
    n_rows: int = Field(description="Rows.")
    n_groups: int = Field(description="Groups, within which rows are not independent.")


def fraction_explained(
    rows: ArrayLike,
    reconstructions: ArrayLike,
    *,
    groups: Sequence[Hashable] | None = None,
    empty_text: ArrayLike | None = None,
    confidence: float = 0.95,
    n_resamples: int = 1000,
    seed: int = 0,
) -> FractionExplained:
    """Fraction of the variance of rows that reconstructions explain, all at unit length.

    That is `1 - Σ|x̂ - x|² / Σ|x - m|²`, where x are the rows and x̂ the reconstructions, each
    divided by its own length, and m is the mean of the x that are given here. Natural-language
    autoencoders are reported with it: 1 is perfect, 0 no better than the mean of the rows in
    the place of every reconstruction, and less is worse. m is not brought to unit length.

    Args:
        rows: (rows, hidden), at least two different ones.
        reconstructions: (rows, hidden); what was made of their descriptions.
        groups: (rows,) what is independent, such as the sample of each row; None takes rows.
        empty_text: (hidden,) what is made of an empty text, as a baseline; None leaves it out.
        confidence: two-sided level of the interval.
        n_resamples: draws.
        seed: of the draws.

    Returns:
        The fraction, its interval, and the baselines.

    Raises:
        SpecError: shapes do not fit, a row is zero or not finite, all rows are alike, or an
            argument is wrong.

    Source:
        kitft/natural_language_autoencoders (2026), `fve_nrm`; the interval is Efron and Tibshirani
        1993, chapter 14, by `scipy.stats.bootstrap`, over groups.

    Example:
        ```python
        import numpy as np

        from inspect_lens.oracle import fraction_explained

        rows = np.random.default_rng(0).standard_normal((20, 8))
        assert fraction_explained(rows, 3 * rows).fraction == 1.0  # lengths do not count
        found = fraction_explained(rows, -rows, groups=np.arange(20) // 2)
        assert found.fraction < 0 and found.n_groups == 10
        ```
    """
    if n_resamples < 1 or not 0.0 < confidence < 1.0:
        raise SpecError(
            f"n_resamples={n_resamples}, confidence={confidence}; allowed are at least one draw, "
            "and a level between 0 and 1"
        )
    given, made = (np.asarray(part, dtype=np.float64) for part in (rows, reconstructions))
    if given.ndim != 2 or given.shape != made.shape or len(given) < 2:
        raise SpecError(
            f"rows: shape {given.shape}, reconstructions: shape {made.shape}; needed are both "
            "(rows, hidden) with two rows or more"
        )
    if groups is not None and len(groups) != len(given):
        raise SpecError(f"groups: {len(groups)} for {len(given)} rows; needed is one for each row")
    x, guess = _units(given, "rows"), _units(made, "reconstructions")
    total = float(((x - x.mean(axis=0)) ** 2).sum())
    # Rounding leaves as much of rows that are all alike.
    if total < 1e-12 * len(x):
        raise SpecError("rows: all have one direction, so that there is nothing to explain")
    number: dict[Hashable, int] = {}
    named = range(len(x)) if groups is None else groups
    codes = np.array([number.setdefault(group, len(number)) for group in named])
    return FractionExplained(
        fraction=1.0 - float(((guess - x) ** 2).sum()) / total,
        interval=_interval(x, guess, codes, len(number), confidence, n_resamples, seed),
        shuffled=1.0 - _shuffled(x, guess, codes, len(number)) / total,
        empty_text=None if empty_text is None else 1.0 - _constant(x, empty_text) / total,
        n_rows=len(x),
        n_groups=len(number),
    )


def _units(rows: NDArray[np.float64], name: str) -> NDArray[np.float64]:
    norms = np.linalg.norm(rows, axis=1, keepdims=True)
    if not np.isfinite(norms).all() or not norms.all():
        raise SpecError(f"{name}: one is zero or not finite, and has no direction")
    return np.asarray(rows / norms)


def _shuffled(
    x: NDArray[np.float64], guess: NDArray[np.float64], codes: NDArray[np.int64], n_groups: int
) -> float:
    """Σ|x̂ - x|² where each x̂ is that of a row of another group, on average; they are units."""
    if n_groups < 2:
        return math.nan
    own = np.zeros((n_groups, x.shape[1]))
    np.add.at(own, codes, guess)
    others = len(x) - np.bincount(codes)[codes]
    dots = np.einsum("nd,nd->n", x, guess.sum(axis=0) - own[codes]) / others
    return float((2.0 - 2.0 * dots).sum())


def _constant(x: NDArray[np.float64], made: ArrayLike) -> float:
    """Σ|x̂ - x|² where every x̂ is the same."""
    row = np.asarray(made, dtype=np.float64).reshape(-1)
    if row.shape != x.shape[1:]:
        raise SpecError(f"empty_text: {row.size} numbers; needed are {x.shape[1]}, as in a row")
    return float(((_units(row[np.newaxis], "empty_text") - x) ** 2).sum())


def _interval(
    x: NDArray[np.float64],
    guess: NDArray[np.float64],
    codes: NDArray[np.int64],
    n_groups: int,
    confidence: float,
    n_resamples: int,
    seed: int,
) -> Interval:
    from scipy.stats import DegenerateDataWarning, bootstrap

    method = "bootstrap BCa" if n_groups == len(x) else "cluster bootstrap BCa"
    if n_groups < _FEWEST:
        method += f"; too few groups ({n_groups})"
        return Interval(low=math.nan, high=math.nan, confidence=confidence, method=method)
    error = np.bincount(codes, weights=((guess - x) ** 2).sum(axis=1), minlength=n_groups)
    size = np.bincount(codes, minlength=n_groups)
    sums = np.zeros((n_groups, x.shape[1]))
    np.add.at(sums, codes, x)

    def fraction(drawn: NDArray[np.int64], axis: int) -> NDArray[np.float64]:
        """Of draws (..., groups) of numbers of groups."""
        rows = np.moveaxis(drawn, axis, -1).reshape(-1, drawn.shape[axis])
        times = np.stack([np.bincount(row, minlength=n_groups) for row in rows])
        n = times @ size
        # Of unit vectors, Σ|x - m|² is n - |Σx|² / n; of one row drawn many times it is nothing.
        spread = n - ((times @ sums) ** 2).sum(axis=1) / n
        made = 1.0 - (times @ error) / np.maximum(spread, 1e-12 * n)
        return np.asarray(made.reshape(np.moveaxis(drawn, axis, -1).shape[:-1]))

    if error.sum() <= 1e-12 * len(x):  # of rounding alone
        return Interval(low=1.0, high=1.0, confidence=confidence, method=method)
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore", DegenerateDataWarning)  # the bounds are then NaN
        low, high = bootstrap(
            (np.arange(n_groups),), fraction, n_resamples=n_resamples, method="BCa",
            confidence_level=confidence, rng=np.random.default_rng(seed), vectorized=True,
            batch=max(1, _CELLS // x.shape[1]),
        ).confidence_interval  # fmt: skip
    return Interval(low=float(low), high=float(high), confidence=confidence, method=method)
