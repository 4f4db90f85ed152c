"""From counts, means and one covariance to the direction of a family."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from inspect_lens.errors import SpecError
from inspect_lens.train.families._direction import MeanDifferenceProbe
from inspect_lens.train.families._massmean import MassMeanProbe, inverse_times

from ._moments import Moments

__all__ = ["check_shrinkage", "finish"]

Floats = NDArray[np.float64]


def finish(estimator: Any, moments: Moments, scale: Floats | None) -> None:
    """Set what a family learns.

    Args:
        estimator: `MeanDifferenceProbe`, `MassMeanProbe`, or `LDAProbe` with `ridge`, a number or
            None as shrinkage.
        moments: of all rows; with the covariance where the family needs it.
        scale: (hidden,) what each dimension is divided by before the direction is looked for.

    Raises:
        SpecError: a class is missing.
    """
    low, high = moments.class_means()
    estimator.classes_, estimator.n_features_in_ = np.array([0, 1]), low.size
    estimator.mean_ = (high + low) / 2.0
    estimator.scale_ = np.ones_like(low) if scale is None else scale
    estimator.intercept_ = 0.0
    gap = (high - low) / estimator.scale_
    if isinstance(estimator, MeanDifferenceProbe):
        norm = float(np.linalg.norm(gap))
        estimator.coef_ = gap / norm if estimator.normalize and norm > 0.0 else gap
    elif isinstance(estimator, MassMeanProbe):
        estimator.coef_ = gap
        if estimator.iid:
            covariance = _within(moments, scale)
            estimator.coef_ = inverse_times(covariance, gap, atol=estimator.atol)
    else:
        covariance = _shrunk(_within(moments, scale), estimator.shrinkage)
        estimator.coef_ = np.linalg.lstsq(covariance, gap, rcond=None)[0]
        if not estimator.equal_priors:
            estimator.intercept_ = float(np.log(moments.n[1] / moments.n[0]))


def check_shrinkage(estimator: Any) -> None:
    """Refuse a shrinkage that is none, before rows are read.

    Raises:
        SpecError: it is none of those that `LDAProbe` has.
    """
    value = getattr(estimator, "shrinkage", None)
    named = value in ("ridge", "ledoit-wolf")
    if value is not None and not named and (isinstance(value, str) or not 0.0 <= value <= 1.0):
        raise SpecError(
            f"shrinkage={value!r}; allowed are 'ledoit-wolf', 'ridge', a number in [0, 1] and "
            "None; correct the value"
        )


def _within(moments: Moments, scale: Floats | None) -> Floats:
    covariance = moments.within()
    if scale is not None:
        covariance /= scale[:, None]
        covariance /= scale
    return covariance


def _shrunk(covariance: Floats, shrinkage: Any) -> Floats:
    level = float(np.trace(covariance)) / len(covariance)
    diagonal = np.diag_indices_from(covariance)
    if shrinkage == "ridge":
        covariance[diagonal] += 0.01 * level or 1.0
    elif shrinkage is not None:
        covariance *= 1.0 - shrinkage
        covariance[diagonal] += shrinkage * level
    return covariance
