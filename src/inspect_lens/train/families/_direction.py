"""Estimators that end in one direction: what they share, and the difference of means."""

from __future__ import annotations

from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sklearn.utils.validation import check_is_fitted, validate_data

from inspect_lens.errors import SpecError
from inspect_lens.probe import Probe, ProbeCard

from ._binary import BinaryEstimator
from ._scaling import Scaling, find_scale

__all__ = ["DirectionEstimator", "MeanDifferenceProbe"]


class DirectionEstimator(BinaryEstimator):
    """Base of estimators with `decision = coef · (x - mean) / scale + intercept`.

    Subclasses set `coef_`, `intercept_`, `mean_` and `scale_` in `_fit_rows`.

    Attributes:
        classes_: (2,) the two labels; the second is the positive one.
        n_features_in_: hidden.
        coef_: (hidden,).
        intercept_: a number.
        mean_: (hidden,) what is subtracted before the direction is applied.
        scale_: (hidden,) what is divided by.

    Example:
        ```python
        import numpy as np

        from inspect_lens.train import ActivationSet, DirectionEstimator, MassMeanProbe

        train = ActivationSet.load("acts/train.safetensors")
        x, labels, _ = train.rows(1)
        estimator = MassMeanProbe().fit(x, labels)
        assert isinstance(estimator, DirectionEstimator)
        scores = (x - estimator.mean_) / estimator.scale_ @ estimator.coef_ + estimator.intercept_
        assert np.allclose(scores, estimator.decision_function(x), atol=1e-4)
        ```
    """

    scaling: Scaling = "none"
    """How dimensions are scaled before the direction is looked for (`find_scale`)."""
    coef_: NDArray[np.floating[Any]]
    intercept_: float
    mean_: NDArray[np.floating[Any]]
    scale_: NDArray[np.floating[Any]]

    def fit(self, X: ArrayLike, y: ArrayLike, groups: ArrayLike | None = None) -> Self:
        """Find the direction.

        Args:
            X: (rows, hidden) float; a row is a token or a pooled sample.
            y: (rows,) two classes; the larger label is the positive one.
            groups: (rows,) accepted by every estimator, so that those that pair rows within
                a group can be swapped in; the others do not use it.

        Returns:
            self.

        Raises:
            ValueError: not two classes, NaN, or shapes disagree.
        """
        x, labels = validate_data(self, X, y, dtype=[np.float64, np.float32])
        positive = self._positive(labels)
        scale = find_scale(x, positive, self.scaling, family=type(self).__name__)
        self._fit_groups(x if scale is None else x / scale, positive, groups)
        if scale is not None:
            self.mean_, self.scale_ = self.mean_ * scale, self.scale_ * scale
        return self

    def _fit_groups(
        self,
        x: NDArray[np.floating[Any]],
        positive: NDArray[np.bool_],
        groups: ArrayLike | None,
    ) -> None:
        self._fit_rows(x, positive)

    def _fit_rows(self, x: NDArray[np.floating[Any]], positive: NDArray[np.bool_]) -> None:
        raise NotImplementedError

    def decision_function(self, X: ArrayLike) -> NDArray[np.floating[Any]]:
        """Score rows (rows, hidden); larger means more of the positive class."""
        check_is_fitted(self)
        x = validate_data(self, X, dtype=[np.float64, np.float32], reset=False)
        scores: NDArray[np.floating[Any]] = ((x - self.mean_) / self.scale_) @ self.coef_
        return scores + self.intercept_

    def to_probe(self, card: ProbeCard) -> Probe:
        """Freeze the fitted direction.

        Args:
            card: of one layer; its width has to be that of the training rows. An empty
                `method` or `source` is filled in.

        Returns:
            The probe; it scores rows as `decision_function` does, up to float32 rounding.

        Raises:
            SpecError: the card names several layers or another width.
            sklearn.exceptions.NotFittedError: `fit` was not called.
        """
        check_is_fitted(self)
        if len(card.layers) != 1 or card.hidden != self.n_features_in_:
            raise SpecError(
                f"card: layers {card.layers} of width {card.hidden}; allowed is one layer of width "
                f"{self.n_features_in_}; an estimator learns the direction of one layer"
            )
        method = self.describe()
        if self.scaling != "none":
            # Dividing is no part of the published methods, and `auto` decides by the data.
            divided = not np.allclose(self.scale_, 1.0)
            method += "; dimensions divided by their median deviation" if divided else "; unscaled"
        filled = {"method": card.method or method, "source": card.source or self.source}
        return Probe(
            weight=np.asarray(self.coef_, dtype=np.float32)[None],
            bias=np.array([self.intercept_], dtype=np.float32),
            mean=np.asarray(self.mean_, dtype=np.float32)[None],
            scale=np.asarray(self.scale_, dtype=np.float32)[None],
            card=card.model_copy(update=filled),
        )


class MeanDifferenceProbe(DirectionEstimator):
    """Difference of class means; a row at the midpoint scores 0.

    Args:
        normalize: make the direction unit length, so that scores are in units of the residual
            stream.
        scaling: of dimensions: `auto` divides each by its median deviation where 1% of them hold
            half of the variance, and warns; `robust` always does; `none` is the published method.

    Source:
        arXiv:2310.06824 (mass-mean probing without the covariance), arXiv:2312.06681.

    Example:
        ```python
        from inspect_lens.train import ActivationSet, MeanDifferenceProbe

        train, test = (ActivationSet.load(f"acts/{name}.safetensors") for name in ("train", "test"))
        x, labels, groups = train.rows(1)  # (tokens, hidden) at layer 1, and the label of each row
        estimator = MeanDifferenceProbe().fit(x, labels, groups)
        x, labels, _ = test.rows(1)
        assert estimator.score(x, labels) > 0.6
        ```
    """

    method = "difference of class means"
    source = "arXiv:2310.06824"

    def __init__(self, *, normalize: bool = False, scaling: Scaling = "auto") -> None:
        self.normalize = normalize
        self.scaling = scaling

    def _fit_rows(self, x: NDArray[np.floating[Any]], positive: NDArray[np.bool_]) -> None:
        high = x[positive].mean(axis=0, dtype=np.float64)
        low = x[~positive].mean(axis=0, dtype=np.float64)
        self.coef_ = high - low
        norm = float(np.linalg.norm(self.coef_))
        if self.normalize and norm > 0.0:
            self.coef_ = self.coef_ / norm
        # The midpoint goes into the centre, not into the intercept: |mean| is often hundreds of
        # times |difference|, and their product would lose the digits that decide.
        self.mean_ = (high + low) / 2.0
        self.scale_ = np.ones_like(self.mean_)
        self.intercept_ = 0.0
