"""Scaling of dimensions, so that a few huge ones do not hide the others."""

from __future__ import annotations

import math
import warnings
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from inspect_lens.errors import SpecError

__all__ = ["HUGE_SHARE", "Scaling", "dominated", "find_scale", "rows_for_scale", "scale_bytes"]

Scaling = Literal["auto", "robust", "none"]
"""How a family scales dimensions before it looks for a direction."""
HUGE_SHARE: Final = 0.5
"""Share of the variance in 1% of the dimensions from which on these are called huge."""
_MAD: Final = 1.4826  # of a normal variable, its standard deviation over its median deviation
_ROWS: Final = 20_000
_COLUMNS: Final = 256
Floats = NDArray[np.float64]


def dominated(variance: Floats) -> tuple[int, float]:
    """How many dimensions are 1% of them, and which share of the variance the largest so many hold.

    Args:
        variance: (hidden,) within the classes.
    """
    n = max(1, math.ceil(0.01 * variance.size))
    total = float(variance.sum())
    return n, float(np.sort(variance)[-n:].sum()) / total if total > 0.0 else 0.0


def find_scale(
    x: NDArray[np.floating[Any]], positive: NDArray[np.bool_], scaling: Scaling, *, family: str
) -> Floats | None:
    """What to divide each dimension by before a direction is looked for.

    Args:
        x: (rows, hidden).
        positive: (rows,) class of each row.
        scaling: `robust` divides by the median absolute deviation from the class median, in units
            of a standard deviation; `none` by nothing; `auto` is robust where 1% of the dimensions
            hold half of the variance or more, and warns.
        family: name, for the warning.

    Returns:
        (hidden,), or None where nothing is scaled.

    Raises:
        SpecError: an unknown way.
    """
    if scaling not in ("auto", "robust", "none"):
        raise SpecError(f"scaling={scaling!r}; allowed are 'auto', 'robust' and 'none'")
    if scaling == "none" or len(x) < 4:
        return None
    picked = rows_for_scale(len(x))
    rows, sides = x[picked], (positive[picked], ~positive[picked])
    spread, variance = np.empty(rows.shape[1]), np.empty(rows.shape[1])
    # A few columns at once: medians take several copies of what they are of.
    for first in range(0, rows.shape[1], _COLUMNS):
        part = slice(first, first + _COLUMNS)
        spread[part], variance[part] = _median_deviation(rows[:, part], sides)
    if scaling == "auto":
        n, share = dominated(variance)
        if share < HUGE_SHARE or rows.shape[1] < 8:
            return None
        warnings.warn(
            f"{family}: {n} of {rows.shape[1]} dimensions hold {share:.0%} of the variance, so "
            "each dimension is divided by its median deviation; scaling='none' is the published "
            "method, which these few dimensions decide, and scaling='robust' does without this "
            "warning",
            UserWarning,
            stacklevel=4,
        )
    return spread


def rows_for_scale(n: int) -> slice:
    """Which of n rows the medians are of: all of up to 40,000, else one in so many."""
    return slice(0, n, max(1, n // _ROWS))


def scale_bytes(n: int, hidden: int) -> int:
    """What `find_scale` takes for n rows as float32, with these rows."""
    rows = len(range(n)[rows_for_scale(n)])
    return rows * (4 * hidden + 40 * min(hidden, _COLUMNS))


def _median_deviation(
    part: NDArray[np.floating[Any]], sides: tuple[NDArray[np.bool_], NDArray[np.bool_]]
) -> tuple[Floats, Floats]:
    """Median deviation and variance of some columns within their classes."""
    rows = np.asarray(part, dtype=np.float64)
    away = np.empty_like(rows)
    for side in sides:
        if side.any():
            away[side] = rows[side] - np.median(rows[side], axis=0)
    made: Floats = _MAD * np.median(np.abs(away), axis=0)
    # A dimension that is mostly one value has no median deviation.
    flat = made <= 1e-9 * (np.abs(rows).max(axis=0) + 1e-30)
    made[flat] = away[:, flat].std(axis=0)
    made[made <= 0.0] = 1.0
    return made, (away**2).mean(axis=0)
