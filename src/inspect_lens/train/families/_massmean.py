"""Directions from class means and one covariance: mass-mean, and linear discriminant analysis."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis

from inspect_lens.errors import SpecError

from ._direction import DirectionEstimator
from ._scaling import Scaling

__all__ = ["LDAProbe", "MassMeanProbe", "inverse_times", "within_covariance"]

Floats = NDArray[np.float64]


def within_covariance(x: NDArray[np.floating[Any]], positive: NDArray[np.bool_]) -> Floats:
    """Pooled covariance (hidden, hidden) of rows around their class mean; divides by rows."""
    centred = np.asarray(x, dtype=np.float64).copy()
    for side in (positive, ~positive):
        centred[side] -= centred[side].mean(axis=0)
    made: Floats = centred.T @ centred / len(centred)
    return made


def inverse_times(covariance: Floats, vector: Floats, *, atol: float) -> Floats:
    """Pseudo-inverse of a symmetric matrix times a vector; eigenvalues below `atol` count as 0.

    Warns where all of them do, as in the first layers of models with small embeddings.
    """
    values, vectors = np.linalg.eigh(covariance)
    kept = np.abs(values) > atol
    if vector.any() and not kept.any():
        warnings.warn(
            f"atol={atol:g}: all variances lie below it (the largest is {np.abs(values).max():.2g})"
            ", so the direction is zero and scores nothing; ask for a smaller atol, or for family "
            "lda, which knows no scale",
            UserWarning,
            stacklevel=2,
        )
    inverse = np.zeros_like(values)
    inverse[kept] = 1.0 / values[kept]
    made: Floats = vectors @ (inverse * (vectors.T @ vector))
    return made


class MassMeanProbe(DirectionEstimator):
    """Mass-mean probe: the difference of means, for the IID form times the inverse covariance.

    The source centres the data in advance; here the midpoint of the class means is subtracted,
    so that a row at the midpoint has probability one half.

    Args:
        iid: sigmoid(theta · pinv(Sigma) · x), for data of the training distribution; False is
            sigmoid(theta · x), which the source uses for transfer.
        atol: eigenvalues of Sigma below it count as 0.
        scaling: as of `MeanDifferenceProbe`.

    Source:
        arXiv:2310.06824, section 5; Sigma is the pooled covariance within the classes.

    Example:
        ```python
        from inspect_lens.train import ActivationSet, MassMeanProbe

        train, test = (ActivationSet.load(f"acts/{name}.safetensors") for name in ("train", "test"))
        x, labels, groups = train.rows(1)  # (tokens, hidden) at layer 1, and the label of each row
        estimator = MassMeanProbe().fit(x, labels, groups)
        x, labels, _ = test.rows(1)
        assert estimator.score(x, labels) > 0.6
        ```
    """

    method = "mass-mean"
    source = "arXiv:2310.06824"

    def __init__(self, *, iid: bool = False, atol: float = 1e-3, scaling: Scaling = "auto") -> None:
        self.iid = iid
        self.atol = atol
        self.scaling = scaling

    def _fit_rows(self, x: NDArray[np.floating[Any]], positive: NDArray[np.bool_]) -> None:
        high = x[positive].mean(axis=0, dtype=np.float64)
        low = x[~positive].mean(axis=0, dtype=np.float64)
        theta: Floats = np.asarray(high - low, dtype=np.float64)
        if self.iid:
            theta = inverse_times(within_covariance(x, positive), theta, atol=self.atol)
        self.coef_ = theta
        self.mean_, self.scale_ = (high + low) / 2.0, np.ones_like(high)
        self.intercept_ = 0.0


class LDAProbe(DirectionEstimator):
    """Linear discriminant: (Sigma + lambda I)^-1 (mu+ - mu-), with the prior in the intercept.

    Args:
        shrinkage: `ledoit-wolf` (scikit-learn's `auto`), a number in [0, 1] (scikit-learn's
            shrinkage to the mean variance), `ridge` (lambda = 0.01 · trace(Sigma) / hidden), or
            None for none, which needs more rows than features.
        equal_priors: count both classes as equally likely, whatever their share of the rows.
        scaling: as of `MeanDifferenceProbe`; shrinkage to one mean variance needs it.

    Source:
        Fisher 1936; scikit-learn does the arithmetic but for `ridge`.

    Example:
        ```python
        from inspect_lens.train import ActivationSet, LDAProbe

        train, test = (ActivationSet.load(f"acts/{name}.safetensors") for name in ("train", "test"))
        x, labels, groups = train.rows(1)  # (tokens, hidden) at layer 1, and the label of each row
        estimator = LDAProbe().fit(x, labels, groups)
        x, labels, _ = test.rows(1)
        assert estimator.score(x, labels) > 0.6
        ```
    """

    method = "linear discriminant"
    source = "Fisher 1936; Ledoit and Wolf 2004"

    def __init__(
        self,
        *,
        shrinkage: str | float | None = "ledoit-wolf",
        equal_priors: bool = True,
        scaling: Scaling = "auto",
    ) -> None:
        self.shrinkage = shrinkage
        self.equal_priors = equal_priors
        self.scaling = scaling

    def _fit_rows(self, x: NDArray[np.floating[Any]], positive: NDArray[np.bool_]) -> None:
        wide = np.asarray(x, dtype=np.float64)
        high, low = wide[positive].mean(axis=0), wide[~positive].mean(axis=0)
        if self.shrinkage == "ridge":
            # scikit-learn's is the same (a shrinkage of 0.01 / 1.01), by singular values of the
            # covariance: ten times the work, which tells at a width of thousands.
            covariance = within_covariance(wide, positive)
            ridge = 0.01 * float(np.trace(covariance)) / len(covariance)
            self.coef_ = np.linalg.solve(
                covariance + (ridge or 1.0) * np.eye(len(covariance)), high - low
            )
        else:
            self.coef_ = self._sklearn_direction(wide, positive)
        self.mean_, self.scale_ = (high + low) / 2.0, np.ones_like(high)
        share = float(positive.mean())
        self.intercept_ = 0.0 if self.equal_priors else float(np.log(share / (1.0 - share)))

    def _sklearn_direction(self, x: Floats, positive: NDArray[np.bool_]) -> Floats:
        known = self.shrinkage == "ledoit-wolf"
        if isinstance(self.shrinkage, str) and not known:
            raise SpecError(
                f"shrinkage={self.shrinkage!r}; allowed are 'ledoit-wolf', 'ridge', a number in "
                "[0, 1] and None; correct the name"
            )
        model = LinearDiscriminantAnalysis(
            solver="lsqr", shrinkage="auto" if known else self.shrinkage
        ).fit(x, positive)
        direction: Floats = np.asarray(model.coef_[0], dtype=np.float64)
        return direction
