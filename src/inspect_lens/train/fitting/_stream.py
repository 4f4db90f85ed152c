"""Fitting linear families on rows that do not fit into memory.

Closed-form families take one pass that keeps counts, means and, where they need it, one
covariance. Logistic regression takes a few passes, see `_logistic_stream.py`.
"""

from __future__ import annotations

import warnings
from typing import Any, Final

import numpy as np

from inspect_lens.errors import UnsupportedError
from inspect_lens.train.families._binary import HUGE_SHARE, dominated
from inspect_lens.train.families._direction import (
    DirectionEstimator,
    LDAProbe,
    MassMeanProbe,
    MeanDifferenceProbe,
)
from inspect_lens.train.families._logistic import LogisticProbe, PressureLogisticProbe

from ._closed import check_shrinkage, finish
from ._logistic_stream import solve_logistic
from ._moments import Moments, RowSource, accumulate

__all__ = ["STREAMED_LOGISTIC", "fit_logistic", "fit_stream"]

STREAMED_LOGISTIC: Final = (LogisticProbe, PressureLogisticProbe)
"""Kinds that `fit_logistic` fits; who derives one may fit otherwise."""

_STREAMED: Final = "LogisticProbe, MeanDifferenceProbe, MassMeanProbe, LDAProbe"


def fit_stream(
    estimator: DirectionEstimator, source: RowSource, *, device: str = "cpu", tol: float = 1e-4
) -> DirectionEstimator:
    """Fit a linear family on a stream of rows, in memory that does not grow with them.

    Beyond two pieces of the stream it keeps a few vectors of length hidden and, but for
    `MeanDifferenceProbe` and `MassMeanProbe(iid=False)`, a few matrices of hidden x hidden float64.

    Args:
        estimator: an unfitted `LogisticProbe`, `MeanDifferenceProbe`, `MassMeanProbe`, or
            `LDAProbe` with `ridge`, a number or None as shrinkage.
        source: called once per pass, yields (rows, labels) in pieces, the same in each pass.
        device: where torch computes, such as `cuda`.
        tol: of logistic regression: largest component of the gradient of the mean loss, as in
            scikit-learn.

    Returns:
        The estimator, fitted.

    Raises:
        UnsupportedError: a family that has no streaming form.
        SpecError: the stream is empty, lacks a class, or holds NaN, or a setting is wrong.

    Warns:
        ConvergenceWarning: logistic regression took `max_iter` steps and is not done.

    Example:
        ```python
        from inspect_lens.train import ActivationSet, MeanDifferenceProbe, fit_stream

        x, labels, _ = ActivationSet.load("acts/train.safetensors").rows(1)


        def pieces():  # `lambda: store.rows(1)` of an ActivationStore that is larger than memory
            for start in range(0, len(x), 100):
                yield x[start : start + 100], labels[start : start + 100]


        assert fit_stream(MeanDifferenceProbe(), pieces).coef_.shape == (32,)
        ```
    """
    kind = type(estimator)
    if getattr(estimator, "scaling", "none") == "robust":
        raise UnsupportedError(
            f"{estimator!r}: scaling='robust' needs the medians of all rows; allowed in a stream "
            "are 'auto', which warns of huge dimensions, and 'none'"
        )
    if kind in STREAMED_LOGISTIC:
        fit_logistic(estimator, source, device=device, tol=tol)
    elif kind in (MeanDifferenceProbe, MassMeanProbe) or (
        kind is LDAProbe and estimator.shrinkage != "ledoit-wolf"
    ):
        check_shrinkage(estimator)
        covariance = kind is LDAProbe or bool(getattr(estimator, "iid", False))
        moments = accumulate(source, covariance=covariance, device=device)
        _warn_of_huge(estimator, moments)
        finish(estimator, moments, None)
    else:
        raise UnsupportedError(
            f"{estimator!r}: has no streaming form; allowed are {_STREAMED} (its shrinkage 'ridge',"
            " a number or None); choose one of these, fit on a part that fits into memory, or read "
            "a store with StoreSet and fit_on"
        )
    return estimator


def _warn_of_huge(estimator: DirectionEstimator, moments: Moments) -> None:
    """Say that a few dimensions decide, as a stream has no medians to scale them by."""
    n, huge = dominated(moments.within_variance())
    if estimator.scaling == "auto" and huge >= HUGE_SHARE and moments.hidden >= 8:
        warnings.warn(
            f"{type(estimator).__name__}: {n} of {moments.hidden} dimensions hold {huge:.0%} of "
            "the variance and decide the direction; a stream has no median deviation to divide by; "
            "take LogisticProbe, fit on a part that fits into memory, or read a store with "
            "StoreSet and fit_on (scaling='none' says that you know)",
            UserWarning,
            stacklevel=3,
        )


def fit_logistic(
    estimator: Any,
    source: RowSource,
    *,
    device: str = "cpu",
    tol: float = 1e-4,
    whiten: bool = True,
) -> None:
    """Fit a `LogisticProbe` on a stream."""
    found = solve_logistic(
        source, C=estimator.C, fit_intercept=bool(estimator.fit_intercept),
        standardize=estimator.standardize, max_iter=estimator.max_iter, device=device, tol=tol,
        whiten=whiten,
    )  # fmt: skip
    estimator.classes_, estimator.n_features_in_ = np.array([0, 1]), found.coef.size
    estimator.mean_, estimator.scale_ = found.mean, found.scale
    estimator.coef_, estimator.intercept_ = found.coef, found.intercept
    estimator.n_iter_, estimator.n_passes_ = found.n_iter, found.n_passes
