"""What every probe family shares: two classes, a decision, and scikit-learn's manners."""

from __future__ import annotations

import math
from typing import Any, Final, Literal, NamedTuple, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import expit
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data

from inspect_lens._base.arguments import warn_caller
from inspect_lens.errors import SpecError
from inspect_lens.probe import AnyProbe, FitRows, ProbeCard
from inspect_lens.spec import check_word

__all__ = ["BinaryEstimator"]

Floats = NDArray[np.float64]


class Targets(NamedTuple):
    """The class of each row or sequence, and what else is known of it."""

    positive: NDArray[np.bool_]
    groups: NDArray[Any] | None
    weight: Floats | None

    def part(self, picks: NDArray[np.int64]) -> Targets:
        return Targets(*(None if v is None else v[picks] for v in self))  # type: ignore[arg-type]


class BinaryEstimator(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """Base of all families, with scikit-learn's methods and `to_probe`.

    A family sets what it learns in `_fit`, scores with it in `_decide`, and makes a probe of it in
    `_freeze`.

    Attributes:
        classes_: (2,) the two labels; the second is the positive one.
        n_features_in_: hidden; of several layers in a row, that times their number.

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
    default_rows: FitRows = "tokens"
    """What one row is in the source, where `fit` takes rows: a token, or the mean or the last token
    of a sample."""
    n_layers: int = 1
    """Layers in a row of `X`, one after the other."""

    classes_: NDArray[Any]
    n_features_in_: int

    def fit(
        self,
        X: Any,
        y: ArrayLike,
        groups: ArrayLike | None = None,
        sample_weight: ArrayLike | None = None,
    ) -> Self:
        """Fit to activations and labels.

        Args:
            X: (rows, hidden) float, where a row is a token or a pooled sample. Neural families take
                sequences: a list of (tokens, hidden) arrays, one per sample, or (samples, tokens,
                hidden); rows are sequences of one token.
            y: (rows,) two classes; the larger label is the positive one.
            groups: (rows,) what belongs together, such as the scenario: pairs are made within a
                group, and folds and held-back samples do not divide one. Families without either
                do not use it.
            sample_weight: (rows,) how much each counts; all the same by default.

        Raises:
            ValueError: not two classes, NaN, or shapes disagree.
            SpecError: the family has no meaning for weights, a setting is wrong, or a training
                diverged.
        """
        x, labels = self._read_both(X, y)
        x, labels, groups, weight = weighted(x, labels, groups, sample_weight)
        groups = None if groups is None else np.asarray(groups)
        self._fit(x, Targets(self._positive(labels), groups, weight))
        return self

    def decision_function(self, X: Any) -> NDArray[np.floating[Any]]:
        """Score rows or sequences (rows,); larger means more of the positive class."""
        check_is_fitted(self)
        return self._decide(self._read(X))

    def to_probe(self, card: ProbeCard) -> AnyProbe:
        """Freeze what was learnt; scores stay those of `decision_function`, up to float32 rounding.

        The card is of as many layers as a row has, and of their width. An empty `method` or
        `source` is filled in, and a family that pools by itself puts its pool in.

        Raises:
            SpecError: the card names other layers or another width.
            sklearn.exceptions.NotFittedError: `fit` was not called.
        """
        check_is_fitted(self)
        n, width = self.n_layers, self.n_features_in_ // self.n_layers
        if (len(card.layers), card.hidden) != (n, width):
            raise SpecError(
                f"card: layers {card.layers} of width {card.hidden}; allowed is "
                f"{'one layer' if n == 1 else f'{n} layers'} of width {width}, as in the fit"
            )
        method = card.method or self.describe() + self._found()
        filled = {"method": method, "source": card.source or self.source}
        return self._freeze(card.model_copy(update=filled))

    def _fit(self, x: Any, target: Targets) -> None:
        raise NotImplementedError

    def _decide(self, x: Any) -> NDArray[np.floating[Any]]:
        raise NotImplementedError

    def _freeze(self, card: ProbeCard) -> AnyProbe:
        raise NotImplementedError

    def _found(self) -> str:
        """What a card says of the fit beside method and settings."""
        return ""

    def _read(self, X: Any) -> Any:
        """What was fitted on, of the same width."""
        return validate_data(self, X, dtype=[np.float64, np.float32], reset=False)

    def _read_both(self, X: Any, y: ArrayLike) -> tuple[Any, NDArray[Any]]:
        """Rows and labels to fit on; sets the width."""
        x, labels = validate_data(self, X, y, dtype=[np.float64, np.float32])
        return x, labels

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
        return np.asarray(labels == self.classes_[1])

    def predict(self, X: ArrayLike) -> NDArray[Any]:
        """Class of each row or sequence: the positive one where the decision is above 0."""
        positive = self.decision_function(X) > 0
        return np.take(self.classes_, positive)

    def predict_proba(self, X: ArrayLike) -> NDArray[np.float64]:
        """Logistic function of the decision, (rows, 2); `calibrate` makes a probability of it."""
        decision = np.asarray(self.decision_function(X), dtype=np.float64)
        return np.stack([expit(-decision), expit(decision)], axis=1)

    def describe(self) -> str:
        """Method and settings, for the card."""
        settings = sorted(self.get_params(deep=False).items())
        short = [f"array{v.shape}" if isinstance(v, np.ndarray) else v for _, v in settings]
        text = ", ".join(f"{k}={v}" for (k, _), v in zip(settings, short, strict=True))
        return f"{self.method} ({type(self).__name__}: {text})"

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.classifier_tags.multi_class = False
        return tags


def weighted(
    x: Any, labels: NDArray[Any], groups: ArrayLike | None, sample_weight: ArrayLike | None
) -> tuple[Any, NDArray[Any], ArrayLike | None, Floats | None]:
    """Rows, labels and groups that have a weight, and the weights; None where none were given."""
    if sample_weight is None:
        return x, labels, groups, None
    weight = np.asarray(sample_weight, dtype=np.float64)
    if weight.shape != labels.shape or not np.isfinite(weight).all() or (weight < 0.0).any():
        raise SpecError(
            f"sample_weight: shape {weight.shape} for {len(labels)} labels; allowed is one finite "
            "number per row, none of them negative"
        )
    kept = weight > 0.0
    if not kept.any():
        raise SpecError("sample_weight: all weights are zero; allowed is a positive one at least")
    if kept.all():
        return x, labels, groups, weight
    x = [row for row, keep in zip(x, kept, strict=True) if keep] if isinstance(x, list) else x[kept]
    groups = None if groups is None else np.asarray(groups)[kept]
    return x, labels[kept], groups, weight[kept]


Scaling = Literal["auto", "standard", "none"]
"""How a family scales dimensions before it looks for a direction."""
HUGE_SHARE: Final = 0.5
"""Share of the variance in 1% of the dimensions from which on these are called huge."""


def find_scale(variance: Floats, n_rows: int, scaling: Scaling, *, family: str) -> Floats | None:
    """What to divide each dimension by, of its variance within the classes (hidden,); else None."""
    check_word("scaling", scaling, Scaling)
    if scaling == "none" or n_rows < 4:
        return None
    if scaling == "auto":
        n, total = max(1, math.ceil(0.01 * variance.size)), float(variance.sum())
        share = float(np.sort(variance)[-n:].sum()) / total if total > 0.0 else 0.0
        if share < HUGE_SHARE or variance.size < 8:
            return None
        warn_caller(
            f"{family}: {n} of {variance.size} dimensions hold {share:.0%} of the variance, so "
            "each dimension is divided by its standard deviation within the classes; "
            "scaling='none' is the published method, which these few dimensions decide, and "
            "scaling='standard' does without this warning",
        )
    return np.asarray(np.sqrt(np.where(variance > 0.0, variance, 1.0)))
