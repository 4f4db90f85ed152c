"""Fitting linear families on rows that do not fit into memory.

Closed-form families take one pass that keeps counts, means and, where they need it, one
covariance. Logistic regression takes one pass for the scaler and one per step of L-BFGS, which
minimises the very loss that scikit-learn minimises, so both end in the same place; coordinates
whitened by a sample of the rows let it end there after a few passes.
"""

from __future__ import annotations

import warnings
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.linalg import cho_solve, solve_triangular
from scipy.optimize import minimize
from sklearn.exceptions import ConvergenceWarning
from torch.nn import functional

from inspect_lens.errors import UnsupportedError
from inspect_lens.train.families._direction import DirectionEstimator, MeanDifferenceProbe
from inspect_lens.train.families._logistic import LogisticProbe
from inspect_lens.train.families._massmean import LDAProbe, MassMeanProbe
from inspect_lens.train.families._scaling import HUGE_SHARE, dominated

from ._finish import check_shrinkage, finish
from ._moments import Moments, RowSource, accumulate, prefetch, read_blocks

__all__ = ["fit_stream"]

Floats = NDArray[np.float64]
_SAMPLE: Final = 65_536  # rows that the preconditioner is made of
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
    if kind is LogisticProbe:
        _fit_logistic(estimator, source, device=device, tol=tol)
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


def _fit_logistic(estimator: Any, source: RowSource, *, device: str, tol: float) -> None:
    sample = Moments(0, covariance=True, device=device)
    moments = accumulate(
        source, covariance=False, device=device, sample=sample, sample_rows=_SAMPLE
    )
    low, _ = moments.class_means()
    estimator.classes_, estimator.n_features_in_ = np.array([0, 1]), low.size
    if estimator.standardize:
        estimator.mean_, estimator.scale_ = moments.standard()
    else:
        estimator.mean_, estimator.scale_ = np.zeros(low.size), np.ones(low.size)
    root, start = _whitener(sample, moments, estimator.scale_)
    free = bool(estimator.fit_intercept)
    pass_over = _LogisticPass(estimator, source, moments.total, device)

    def loss(whitened: Floats) -> tuple[float, Floats]:
        # Coordinates in which the rows are about white: steps go straight to the optimum.
        weight = solve_triangular(root, whitened[: low.size], lower=True, trans=1)
        offset = float(whitened[low.size]) if free else 0.0
        value, slope, slope_offset = pass_over(weight, offset)
        slope = solve_triangular(root, slope, lower=True)
        return value, np.append(slope, slope_offset) if free else slope

    begin = root.T @ start
    found = minimize(
        loss,
        np.append(begin, 0.0) if free else begin,
        jac=True,
        method="L-BFGS-B",
        # Sums of float32 logits are no surer than that: a stricter stop searches in the noise.
        options={"maxiter": estimator.max_iter, "gtol": tol, "ftol": tol * 1e-5},
    )
    if found.nit >= estimator.max_iter:
        warnings.warn(
            f"fit_stream: L-BFGS stopped after max_iter={estimator.max_iter} steps without "
            f"reaching tol={tol:g}; raise max_iter or tol",
            ConvergenceWarning,
            stacklevel=3,
        )
    estimator.coef_ = solve_triangular(root, found.x[: low.size], lower=True, trans=1)
    estimator.intercept_ = float(found.x[low.size]) if free else 0.0
    estimator.n_iter_, estimator.n_passes_ = int(found.nit), int(found.nfev) + 1


def _whitener(sample: Moments, moments: Moments, scale: Floats) -> tuple[Floats, Floats]:
    """Cholesky root of about the covariance of scaled rows, and weights to start from.

    For Gaussian classes the discriminant of the covariance is the logistic optimum itself.
    """
    low, high = moments.class_means()
    gap = (high - low) / scale
    if (sample.n == 0).any():
        covariance = np.diag((moments.standard()[1] / scale) ** 2)
    else:
        covariance = sample.within() / np.outer(scale, scale)
    # A sample of fewer rows than columns says nothing of some directions: lean to a diagonal.
    lean = gap.size / (gap.size + sample.total)
    diagonal = np.maximum(np.diag(covariance), 1e-6)
    covariance = (1.0 - lean) * covariance
    covariance[np.arange(gap.size), np.arange(gap.size)] += lean * diagonal + 1e-6
    root = np.linalg.cholesky(covariance)
    return np.asarray(root), np.asarray(cho_solve((root, True), gap))


class _LogisticPass:
    """Penalised mean loss over the stream and its slopes; one pass per call."""

    def __init__(self, estimator: Any, source: RowSource, n: int, device: str) -> None:
        self.source, self.n, self.device = source, n, device
        self.penalty, self.scale = 1.0 / (estimator.C * n), estimator.scale_
        self.mean = torch.from_numpy(estimator.mean_).to(device, torch.float32)

    def __call__(self, weight: Floats, offset: float) -> tuple[float, Floats, float]:
        hidden = weight.size
        w = torch.from_numpy(weight / self.scale).to(self.device, torch.float32)
        total, slope_offset = 0.0, 0.0
        slope = torch.zeros(hidden, dtype=torch.float64, device=self.device)
        for rows, labels in prefetch(self.source()):
            for x, positive in read_blocks(rows, labels, device=self.device, hidden=hidden):
                z = x - self.mean
                logits, target = z @ w + offset, positive.float()
                losses = functional.binary_cross_entropy_with_logits(
                    logits.double(), target.double(), reduction="sum"
                )
                total += float(losses)
                gap = torch.sigmoid(logits) - target
                slope += (gap @ z).double()
                slope_offset += float(gap.double().sum())
        gradient: Floats = slope.cpu().numpy() / self.scale / self.n + self.penalty * weight
        value = total / self.n + 0.5 * self.penalty * float(weight @ weight)
        return value, gradient, slope_offset / self.n
