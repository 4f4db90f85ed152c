"""Logistic regression on rows that are read as often as they are asked for.

One pass makes the scaler, and each step of L-BFGS takes one more. The loss is the very loss that
scikit-learn minimises, a sum over rows, so both end in the same place. Coordinates whitened by a
sample of the rows let it end there after a few passes.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import cho_solve, solve_triangular
from scipy.optimize import minimize
from scipy.special import expit
from sklearn.exceptions import ConvergenceWarning

from inspect_lens.train.families._logistic import LogisticProbe
from inspect_lens.train.families._moments import Moments, blocks

Floats = NDArray[np.float64]
Passes: TypeAlias = Callable[[], Iterator[tuple[NDArray[np.float32], NDArray[np.bool_]]]]
"""Starts anew each time: rows (rows, hidden) and whether each is positive."""
_TOL: Final = 1e-4
"""Largest component of the gradient of the mean loss, as in scikit-learn."""
_SAMPLE: Final = 65_536
"""Rows that the preconditioner is made of."""
_OF_PIECE: Final = 2048


def fit_logistic(made: LogisticProbe, read: Passes, hidden: int, *, whiten: bool) -> None:
    """Fit as `LogisticProbe.fit` does."""
    moments, sample = _sums(read, hidden, whiten=whiten)
    mean, scale = moments.standard() if made.standardize else (np.zeros(hidden), np.ones(hidden))
    root, start = _whitener(sample, moments, scale)
    penalty = 1.0 / (made.C * moments.n)
    n_passes = 1

    def loss(whitened: Floats) -> tuple[float, Floats]:
        # Coordinates in which the rows are about white: steps go straight to the optimum.
        nonlocal n_passes
        n_passes += 1
        weight = _solve(root, whitened[:hidden], transposed=True)
        offset = float(whitened[hidden]) if made.fit_intercept else 0.0
        total, slope, slope_offset = _loss(read, weight / scale, offset, mean)
        value = total / moments.n + 0.5 * penalty * float(weight @ weight)
        slope = _solve(root, slope / scale / moments.n + penalty * weight, transposed=False)
        extra = [slope_offset / moments.n] if made.fit_intercept else []
        return value, np.append(slope, extra)

    begin = root * start if root.ndim == 1 else root.T @ start
    found = minimize(
        loss,
        np.append(begin, [0.0] if made.fit_intercept else []),
        jac=True,
        method="L-BFGS-B",
        # Sums of float32 logits are no surer than that: a stricter stop searches in the noise.
        options={"maxiter": made.max_iter, "gtol": _TOL, "ftol": _TOL * 1e-5},
    )
    if found.nit >= made.max_iter:
        warnings.warn(
            f"logistic regression: L-BFGS stopped after max_iter={made.max_iter} steps without "
            f"reaching tol={_TOL:g}; raise max_iter",
            ConvergenceWarning,
            stacklevel=3,
        )
    made.classes_, made.n_features_in_ = np.array([0, 1]), hidden
    made.mean_, made.scale_ = mean, scale
    made.coef_ = _solve(root, found.x[:hidden], transposed=True)
    made.intercept_ = float(found.x[hidden]) if made.fit_intercept else 0.0
    made.n_iter_, made.n_passes_ = int(found.nit), n_passes


def _sums(read: Passes, hidden: int, *, whiten: bool) -> tuple[Moments, Moments | None]:
    """Sums over all rows and, for whitening, those of a sample with their covariance."""
    moments = Moments(hidden)
    sample = Moments(hidden, covariance=True) if whiten else None
    rng = np.random.default_rng(0)
    for rows, positive in read():
        moments.add(rows, positive)
        if sample is not None and sample.n < _SAMPLE:
            # At random: an even stride over rows whose classes alternate sees one class only.
            part = np.sort(rng.permutation(len(rows))[:_OF_PIECE])
            sample.add(rows[part], positive[part])
    return moments, sample


def _whitener(sample: Moments | None, moments: Moments, scale: Floats) -> tuple[Floats, Floats]:
    """Root of about the covariance of scaled rows, and weights to start from.

    The root is a lower triangle (hidden, hidden), or (hidden,) of a diagonal matrix. For Gaussian
    classes the discriminant of the covariance is the logistic optimum itself.
    """
    found = moments.statistics(scale)
    gap = found.high - found.low
    # Some directions say nothing in a few rows, some columns are constant: not all is divided by.
    diagonal = np.maximum((moments.standard()[1] / scale) ** 2, 1e-6)
    if sample is None or not sample.weight.all():
        return np.sqrt(diagonal), gap / diagonal
    covariance = sample.statistics(scale).within
    diagonal = np.maximum(np.diag(covariance), 1e-6)
    # A sample of fewer rows than columns says nothing of some directions: shrink to a diagonal.
    share = gap.size / (gap.size + sample.n)
    covariance *= 1.0 - share
    covariance[np.diag_indices_from(covariance)] += share * diagonal + 1e-6
    root = np.linalg.cholesky(covariance)
    return np.asarray(root), np.asarray(cho_solve((root, True), gap))


def _solve(root: Floats, vector: Floats, *, transposed: bool) -> Floats:
    """Solve with the root, or with its transpose."""
    if root.ndim == 1:
        return vector / root
    return np.asarray(solve_triangular(root, vector, lower=True, trans=int(transposed)))


def _loss(read: Passes, weight: Floats, offset: float, mean: Floats) -> tuple[float, Floats, float]:
    """Sum of the losses over all rows, and its slopes by weight and offset; one pass."""
    total, slope, slope_offset = 0.0, np.zeros(weight.size), 0.0
    narrow, centre = weight.astype(np.float32), mean.astype(np.float32)
    for rows, positive in read():
        for part in blocks(len(rows), weight.size):
            z = rows[part] - centre
            logits = (z @ narrow).astype(np.float64) + offset
            target = positive[part]
            total += float((np.logaddexp(0.0, logits) - target * logits).sum())
            gap = expit(logits) - target
            slope += gap.astype(np.float32) @ z
            slope_offset += float(gap.sum())
    return total, slope, slope_offset
