"""How much of the variance of rows their reconstructions explain, beside what explains nothing."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pydantic import BaseModel, ConfigDict, Field

from inspect_lens.errors import SpecError

__all__ = ["FractionExplained", "fraction_explained"]


class FractionExplained(BaseModel):
    """What reconstructions explain of rows at unit length, with two baselines.

    There is no interval: a drawn set holds rows more than once and so has too little variance, and
    the percentile and BCa bootstraps missed the truth in whole designs of few rows.
    """

    model_config = ConfigDict(frozen=True)

    fraction: float = Field(
        description="1 - Σ|x̂ - x|² / Σ|x - m|²; m is the mean of these rows. At most 1, and 0 for "
        "what is no better than m in the place of every reconstruction."
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

    Returns:
        The fraction, the baselines, and how many rows and groups there are.

    Raises:
        SpecError: shapes do not fit, a row is zero or not finite, all rows are alike, or an
            argument is wrong.

    Source:
        kitft/natural_language_autoencoders (2026), `fve_nrm`.

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
