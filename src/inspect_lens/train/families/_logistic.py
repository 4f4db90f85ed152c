"""Logistic regression with the settings of two sources."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import StandardScaler

from ._direction import DirectionEstimator

__all__ = ["LogisticProbe", "PressureLogisticProbe"]


class LogisticProbe(DirectionEstimator):
    """L2-regularised logistic regression on standardised rows, in the source one per token.

    Args:
        C: inverse of the L2 penalty; 0.1 is Apollo's lambda = 10.
        standardize: subtract the mean and divide by the standard deviation of the training rows.
        fit_intercept: off in the source; the centre is that of the scaler then.
        max_iter: of LBFGS.

    Source:
        arXiv:2502.03407; scikit-learn does the arithmetic.

    Example:
        ```python
        from inspect_lens.train import ActivationSet, LogisticProbe

        train, test = (ActivationSet.load(f"acts/{name}.safetensors") for name in ("train", "test"))
        x, labels, groups = train.rows(1)  # (tokens, hidden) at layer 1, and the label of each row
        estimator = LogisticProbe().fit(x, labels, groups)
        x, labels, _ = test.rows(1)
        assert estimator.score(x, labels) > 0.6
        ```
    """

    method = "logistic regression"
    source = "arXiv:2502.03407"

    def __init__(
        self,
        *,
        C: float = 0.1,
        standardize: bool = True,
        fit_intercept: bool = False,
        max_iter: int = 1000,
    ) -> None:
        self.C = C
        self.standardize = standardize
        self.fit_intercept = fit_intercept
        self.max_iter = max_iter

    def _fit_rows(self, x: NDArray[np.floating[Any]], positive: NDArray[np.bool_]) -> None:
        if self.standardize:
            scaler = StandardScaler().fit(x)
            self.mean_, self.scale_ = np.asarray(scaler.mean_), np.asarray(scaler.scale_)
        else:
            self.mean_, self.scale_ = np.zeros(x.shape[1]), np.ones(x.shape[1])
        model = LogisticRegression(
            C=self.C, fit_intercept=self.fit_intercept, max_iter=self.max_iter
        ).fit((x - self.mean_) / self.scale_, positive)
        self.coef_ = np.asarray(model.coef_[0])
        self.intercept_ = float(model.intercept_[0]) if self.fit_intercept else 0.0
        self.n_iter_ = int(model.n_iter_[0])


class PressureLogisticProbe(LogisticProbe):
    """Logistic regression on the mean of a sample, as for high-stakes conversations.

    Args:
        C: inverse of the L2 penalty.
        standardize: subtract the mean and divide by the standard deviation of the training rows.
        fit_intercept: off in the source.
        max_iter: of LBFGS.

    Source:
        arXiv:2506.10805; scikit-learn does the arithmetic.

    Example:
        ```python
        from inspect_lens.train import ActivationSet, PressureLogisticProbe, train_probe

        train, control = (
            ActivationSet.load(f"acts/{name}.safetensors") for name in ("train", "control")
        )
        probe = train_probe(
            PressureLogisticProbe(), train, name="mine/stakes", control=control, n_resamples=0
        )
        assert probe.card.training.rows == "mean"
        ```
    """

    source = "arXiv:2506.10805"
    default_rows = "mean"

    def __init__(
        self,
        *,
        C: float = 1e-3,
        standardize: bool = True,
        fit_intercept: bool = False,
        max_iter: int = 10_000,
    ) -> None:
        super().__init__(
            C=C, standardize=standardize, fit_intercept=fit_intercept, max_iter=max_iter
        )
