"""Logistic regression on rows that come in pieces, as often as they are asked for.

One pass makes the scaler, and each step of L-BFGS takes one more. The loss is the very loss that
scikit-learn minimises, a sum over rows, so both end in the same place. Coordinates whitened by a
sample of the rows let it end there after a few passes.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.linalg import cho_solve, solve_triangular
from scipy.optimize import minimize
from sklearn.base import clone
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import Pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.class_weight import compute_class_weight
from torch.nn import functional

from inspect_lens.train.families._logistic import SklearnProbe

from ._moments import Moments, RowSource, accumulate, prefetch, read_blocks, require_both
from ._row_view import Again, RowView

__all__ = [
    "Logistic",
    "fit_sklearn",
    "is_streamed",
    "reads_within",
    "solve_logistic",
]

Floats = NDArray[np.float64]
_SAMPLE: Final = 65_536  # rows that the preconditioner is made of
_MATRICES: Final = 8  # of hidden x hidden float64, that whitening takes at its peak


class Logistic(NamedTuple):
    """What was found: decision = coef · (x - mean) / scale + intercept."""

    coef: Floats
    """(hidden,)."""
    intercept: float
    mean: Floats
    """(hidden,) of all rows; 0 where rows are not standardised."""
    scale: Floats
    """(hidden,) standard deviation of all rows, 1 for a constant column; 1 likewise."""
    variance: Floats
    """(hidden,) of all rows."""
    n: int
    """Rows."""
    n_iter: int
    """Steps of L-BFGS."""
    n_passes: int
    """Times that the rows were read."""


def solve_logistic(
    source: RowSource,
    *,
    C: float,
    fit_intercept: bool,
    standardize: bool,
    max_iter: int,
    tol: float,
    device: str = "cpu",
    whiten: bool = True,
    precise: bool = False,
) -> Logistic:
    """Minimise the L2-penalised logistic loss over a stream."""
    sample = Moments(0, covariance=True, device=device) if whiten else None
    moments = accumulate(
        source, covariance=False, device=device, sample=sample, sample_rows=_SAMPLE
    )
    mean, scale = moments.standard()
    hidden = mean.size
    if not standardize:
        mean, scale = np.zeros(hidden), np.ones(hidden)
    root, start = _whitener(sample, moments, scale)
    penalty = 1.0 / (C * moments.total)
    pass_over = _Pass(source, moments.total, penalty, (mean, scale), device, precise=precise)

    def loss(whitened: Floats) -> tuple[float, Floats]:
        # Coordinates in which the rows are about white: steps go straight to the optimum.
        weight = _solve(root, whitened[:hidden], trans=1)
        offset = float(whitened[hidden]) if fit_intercept else 0.0
        value, slope, slope_offset = pass_over(weight, offset)
        slope = _solve(root, slope, trans=0)
        return value, np.append(slope, slope_offset) if fit_intercept else slope

    begin = root * start if root.ndim == 1 else root.T @ start
    found = minimize(
        loss,
        np.append(begin, 0.0) if fit_intercept else begin,
        jac=True,
        method="L-BFGS-B",
        # Sums of float32 logits are no surer than that: a stricter stop searches in the noise.
        options={"maxiter": max_iter, "gtol": tol, "ftol": tol * 1e-5},
    )
    if found.nit >= max_iter:
        warnings.warn(
            f"logistic regression: L-BFGS stopped after max_iter={max_iter} steps without "
            f"reaching tol={tol:g}; raise max_iter or tol",
            ConvergenceWarning,
            stacklevel=4,
        )
    return Logistic(
        coef=_solve(root, found.x[: hidden], trans=1),
        intercept=float(found.x[hidden]) if fit_intercept else 0.0,
        mean=mean, scale=scale, variance=moments.variance(), n=moments.total,
        n_iter=int(found.nit), n_passes=int(found.nfev) + 1,
    )  # fmt: skip


def reads_within(view: RowView, layer: int) -> tuple[Again, bool]:
    """Split the memory of a store between what whitens rows and rows that are kept."""
    memory, matrices = view.data.memory * 1e9, 8 * _MATRICES * view.hidden**2
    whiten = matrices <= memory
    return view.again(layer, spare=memory - matrices * whiten), whiten


def _whitener(sample: Moments | None, moments: Moments, scale: Floats) -> tuple[Floats, Floats]:
    """Root of about the covariance of scaled rows, and weights to start from.

    The root is a lower triangle (hidden, hidden), or (hidden,) of a diagonal matrix. For Gaussian
    classes the discriminant of the covariance is the logistic optimum itself.
    """
    low, high = moments.class_means()
    gap = (high - low) / scale
    # Some directions say nothing in a few rows, some columns are constant: not all is divided by.
    diagonal = np.maximum((moments.standard()[1] / scale) ** 2, 1e-6)
    if sample is None or (sample.n == 0).any():
        return np.sqrt(diagonal), gap / diagonal
    covariance = sample.within()
    covariance /= scale[:, None]
    covariance /= scale
    diagonal = np.maximum(np.diag(covariance), 1e-6)
    # A sample of fewer rows than columns says nothing of some directions: lean to a diagonal.
    lean = gap.size / (gap.size + sample.total)
    covariance *= 1.0 - lean
    covariance[np.arange(gap.size), np.arange(gap.size)] += lean * diagonal + 1e-6
    root = np.linalg.cholesky(covariance)
    return np.asarray(root), np.asarray(cho_solve((root, True), gap))


def _solve(root: Floats, vector: Floats, *, trans: int) -> Floats:
    """Solve with the root, or with its transpose."""
    if root.ndim == 1:
        return vector / root
    return np.asarray(solve_triangular(root, vector, lower=True, trans=trans))


class _Pass:
    """Penalised mean loss over the stream and its slopes; one pass per call."""

    def __init__(
        self,
        source: RowSource,
        n: int,
        penalty: float,
        scaler: tuple[Floats, Floats],
        device: str,
        *,
        precise: bool,
    ) -> None:
        self.source, self.n, self.device = source, n, device
        self.dtype = torch.float64 if precise else torch.float32
        self.penalty, self.scale = penalty, scaler[1]
        self.mean = torch.from_numpy(scaler[0]).to(device, self.dtype)

    def __call__(self, weight: Floats, offset: float) -> tuple[float, Floats, float]:
        hidden = weight.size
        w = torch.from_numpy(weight / self.scale).to(self.device, self.dtype)
        total, slope_offset = 0.0, 0.0
        slope = torch.zeros(hidden, dtype=torch.float64, device=self.device)
        for rows, labels, *weights in prefetch(self.source()):
            done = 0
            for x, positive in read_blocks(rows, labels, device=self.device, hidden=hidden):
                z = x.to(self.dtype) - self.mean
                logits, target = z @ w + offset, positive.to(self.dtype)
                losses = functional.binary_cross_entropy_with_logits(
                    logits.double(), target.double(), reduction="none"
                )
                gap = torch.sigmoid(logits) - target
                if weights:
                    counted = torch.from_numpy(weights[0][done : done + len(x)]).to(self.device)
                    losses, gap = losses * counted, gap * counted.to(self.dtype)
                done += len(x)
                total += float(losses.sum())
                slope += (gap @ z).double()
                slope_offset += float(gap.double().sum())
        gradient: Floats = slope.cpu().numpy() / self.scale / self.n + self.penalty * weight
        value = total / self.n + 0.5 * self.penalty * float(weight @ weight)
        return value, gradient, slope_offset / self.n


class _Parts(NamedTuple):
    whole: Any
    scaler: StandardScaler | None
    model: LogisticRegression


def is_streamed(made: SklearnProbe) -> bool:
    """Whether a classifier has one optimum, which a stream of rows leads to.

    These are `LogisticRegression` with the L2 penalty and any solver but liblinear, which
    penalises the intercept, alone or behind a `StandardScaler` in a `Pipeline`.
    """
    parts = _parts(made.estimator)
    if parts is None:
        return False
    settings = parts.model.get_params()
    l2 = settings.get("penalty", "l2") in ("l2", "deprecated") and not settings.get("l1_ratio")
    plain = not settings["warm_start"] and not settings["dual"]
    # Of both, balanced weights are sums of weights in some releases, and of rows in others.
    twice = settings["class_weight"] == "balanced" and bool(made.sample_weight)
    finite = math.isfinite(settings["C"]) and settings["C"] > 0.0
    return l2 and plain and finite and not twice and settings["solver"] != "liblinear"


def fit_sklearn(
    made: SklearnProbe, view: RowView, layer: int, weights: NDArray[np.float64] | None
) -> None:
    """Fit as `SklearnProbe.fit` does, to the tolerance of the classifier."""
    labels = view.labels
    require_both(labels)
    parts = _parts(clone(made.estimator))
    assert parts is not None
    model, classes = parts.model, np.array([False, True])
    each = None if weights is None else np.repeat(weights, view.lengths)
    if model.class_weight is not None:
        low, high = compute_class_weight(model.class_weight, classes=classes, y=labels)
        by_class = np.where(labels, high, low)
        each = by_class if each is None else each * by_class
    read, whiten = reads_within(view, layer)

    def source() -> Iterator[Any]:
        for index, rows in read():
            known = (rows, labels[index])
            yield known if each is None else (*known, each[index])

    scaler = parts.scaler
    found = solve_logistic(
        source, C=float(model.C), fit_intercept=model.fit_intercept,
        standardize=scaler is not None, max_iter=model.max_iter, tol=model.tol,
        whiten=whiten, precise=True,
    )  # fmt: skip
    if scaler is not None:
        scaler.n_samples_seen_, scaler.n_features_in_ = found.n, view.hidden
        scaler.mean_, scaler.scale_ = found.mean, found.scale
        scaler.var_ = found.variance
    model.classes_, model.n_features_in_ = classes, view.hidden
    model.coef_, model.intercept_ = found.coef[None], np.array([found.intercept])
    model.n_iter_ = np.array([found.n_iter], dtype=np.int32)
    made.classes_, made.n_features_in_, made.estimator_ = classes, view.hidden, parts.whole


def _parts(estimator: Any) -> _Parts | None:
    """Scaler and model of a classifier that is made of these; None of another."""
    if type(estimator) is LogisticRegression:
        return _Parts(estimator, None, estimator)
    steps = [step for _, step in estimator.steps] if type(estimator) is Pipeline else []
    if [type(step) for step in steps] == [StandardScaler, LogisticRegression]:
        scaler = steps[0]
        if scaler.with_mean and scaler.with_std:
            return _Parts(estimator, scaler, steps[1])
    return None
