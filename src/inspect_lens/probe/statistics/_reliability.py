"""Whether probabilities mean what they say."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from inspect_lens.errors import SpecError

Floats = NDArray[np.float64]


class Reliability(NamedTuple):
    """Bins of predicted probabilities, empty ones left out."""

    predicted: Floats
    """Mean probability of each bin."""
    observed: Floats
    """Share of positives of each bin."""
    size: NDArray[np.int64]
    """Samples of each bin."""


def reliability_curve(
    labels: ArrayLike, probabilities: ArrayLike, *, n_bins: int = 15, equal_mass: bool = False
) -> Reliability:
    """Compare probabilities with frequencies in bins of equal width, or of equal size.

    Args:
        labels: (samples,) 0 and 1.
        probabilities: (samples,) of the positive class.
        n_bins: over [0, 1]; a bin holds its upper edge and not its lower one, but for 0.
        equal_mass: bins of about as many samples each; equal probabilities share a bin.

    Returns:
        The bins that hold a sample.

    Raises:
        SpecError: shapes disagree, a value is no probability, or there is no bin.

    Source:
        Bins of arXiv:1706.04599; equals `sklearn.calibration.calibration_curve`.

    Example:
        ```python
        from inspect_lens.probe import reliability_curve

        curve = reliability_curve([0, 1, 1, 1], [0.2, 0.2, 0.8, 0.8], n_bins=5)
        assert curve.observed.tolist() == [0.5, 1.0]
        assert curve.size.tolist() == [2, 2]
        ```
    """
    y, p = _check(labels, probabilities)
    if n_bins < 1:
        raise SpecError(f"n_bins={n_bins}; allowed is 1 or more; 15 is usual")
    inner = np.linspace(0.0, 1.0, n_bins + 1)[1:-1]
    bins = np.searchsorted(np.quantile(p, inner) if equal_mass else inner, p, side="left")
    every = np.bincount(bins, minlength=n_bins)
    kept = every > 0
    size = every[kept]
    return Reliability(
        np.bincount(bins, weights=p, minlength=n_bins)[kept] / size,
        np.bincount(bins, weights=y, minlength=n_bins)[kept] / size,
        size,
    )


def expected_calibration_error(
    labels: ArrayLike, probabilities: ArrayLike, *, n_bins: int = 15
) -> float:
    """Mean gap between probability and frequency, bins weighted by their samples.

    Args:
        labels: (samples,) 0 and 1.
        probabilities: (samples,) of the positive class.
        n_bins: over [0, 1].

    Returns:
        The error, 0 to 1.

    Raises:
        SpecError: shapes disagree, or a value is no probability.

    Source:
        arXiv:1706.04599.

    Example:
        ```python
        from inspect_lens.probe import expected_calibration_error

        assert expected_calibration_error([1, 1, 0, 0], [1.0, 1.0, 0.0, 0.0]) == 0.0
        assert expected_calibration_error([0, 0], [0.8, 0.8]) == 0.8
        ```
    """
    curve = reliability_curve(labels, probabilities, n_bins=n_bins)
    gaps = np.abs(curve.predicted - curve.observed)
    return float((gaps * curve.size).sum() / curve.size.sum())


def brier_score(labels: ArrayLike, probabilities: ArrayLike) -> float:
    """Mean squared distance of probability and label.

    Args:
        labels: (samples,) 0 and 1.
        probabilities: (samples,) of the positive class.

    Returns:
        The score, 0 to 1; smaller is better.

    Raises:
        SpecError: shapes disagree, or a value is no probability.

    Source:
        Brier 1950; equals `sklearn.metrics.brier_score_loss`.

    Example:
        ```python
        from inspect_lens.probe import brier_score

        assert round(brier_score([1, 0, 1], [0.9, 0.2, 0.6]), 3) == 0.07
        ```
    """
    y, p = _check(labels, probabilities)
    return float(((p - y) ** 2).mean())


def _check(labels: ArrayLike, probabilities: ArrayLike) -> tuple[Floats, Floats]:
    y, p = np.asarray(labels), np.asarray(probabilities, dtype=np.float64)
    if y.ndim != 1 or y.shape != p.shape or not y.size:
        raise SpecError(
            f"labels and probabilities: shapes {y.shape} and {p.shape}; allowed is one label per "
            "probability, at least one; drop unscored samples from both"
        )
    if not np.isin(y, (0, 1)).all():
        raise SpecError("labels: allowed are 0 and 1; map your classes to them first")
    if not ((p >= 0.0) & (p <= 1.0)).all():
        raise SpecError(
            "probabilities: holds values outside [0, 1] or NaN; allowed are probabilities; "
            "calibrate scores first, as with train.PlattCalibrator"
        )
    return y.astype(np.float64), p
