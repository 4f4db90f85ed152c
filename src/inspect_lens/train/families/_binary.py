"""What every probe family shares: two classes, a decision, and scikit-learn's manners."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils.multiclass import check_classification_targets

__all__ = ["BinaryEstimator"]


class BinaryEstimator(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """Base of all families: `fit`, `decision_function`, `predict`, `predict_proba`.

    Attributes:
        classes_: (2,) the two labels; the second is the positive one.
        n_features_in_: hidden.

    Example:
        ```python
        from inspect_lens.train import ActivationSet, BinaryEstimator, make_estimator

        train = ActivationSet.load("acts/train.safetensors")
        estimator = make_estimator("mean-difference")
        assert isinstance(estimator, BinaryEstimator)
        x, labels, _ = train.rows(1)
        assert estimator.fit(x, labels).predict_proba(x).shape == (len(x), 2)
        ```
    """

    method: str = ""
    """How the probe is found, for the card."""
    source: str = ""
    """Where the method comes from, for the card."""
    reads: Literal["tokens", "sequences"] = "tokens"
    """Whether `fit` takes one row per token or one sequence per sample."""
    default_rows: Literal["tokens", "mean", "last"] = "tokens"
    """What one row is in the source, where `fit` takes rows: a token, or the mean or the last token
    of a sample."""

    classes_: NDArray[Any]
    n_features_in_: int

    def _positive(self, y: ArrayLike) -> NDArray[np.bool_]:
        """Whether each label is the larger one; sets `classes_`."""
        check_classification_targets(y)
        labels = np.asarray(y)
        self.classes_ = np.unique(labels)
        if self.classes_.size != 2:
            classes = "class" if self.classes_.size == 1 else "classes"
            raise ValueError(
                f"y: {self.classes_.size} {classes} given; Only binary classification is "
                "supported, so allowed are exactly two classes; check the labels of the set"
            )
        positive: NDArray[np.bool_] = labels == self.classes_[1]
        return positive

    def decision_function(self, X: ArrayLike) -> NDArray[np.floating[Any]]:
        """Scores; larger means more of the positive class, above 0 means that class."""
        raise NotImplementedError

    def predict(self, X: ArrayLike) -> NDArray[Any]:
        """Class of each row or sequence: the positive one where the decision is above 0."""
        positive = self.decision_function(X) > 0
        classes: NDArray[Any] = self.classes_[positive.astype(int)]
        return classes

    def predict_proba(self, X: ArrayLike) -> NDArray[np.float64]:
        """Logistic function of the decision, (rows, 2).

        Families that are fitted by likelihood mean it as a probability; for the others it is
        a squashed score. A calibrator (`PlattCalibrator`) makes a probability of either.
        """
        decision = np.asarray(self.decision_function(X), dtype=np.float64)
        # Both tails without overflow, and both columns from the same exponential.
        small = np.exp(-np.abs(decision))
        likely, unlikely = 1.0 / (1.0 + small), small / (1.0 + small)
        positive = np.where(decision > 0, likely, unlikely)
        return np.stack([np.where(decision > 0, unlikely, likely), positive], axis=1)

    def describe(self) -> str:
        """Method and settings, for the card."""
        settings = ", ".join(
            f"{k}={_short(v)}" for k, v in sorted(self.get_params(deep=False).items())
        )
        return f"{self.method} ({type(self).__name__}: {settings})"

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.classifier_tags.multi_class = False
        return tags


def _short(value: object) -> str:
    """A setting in few words: an array is its shape."""
    return f"array{value.shape}" if isinstance(value, np.ndarray) else str(value)
