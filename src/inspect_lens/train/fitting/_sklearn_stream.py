"""Logistic regression of scikit-learn, on rows that come in pieces."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from sklearn.base import clone
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import Pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.class_weight import compute_class_weight

from inspect_lens.train.families._sklearn import SklearnProbe

from ._logistic_stream import reads_within, solve_logistic
from ._moments import require_both
from ._row_view import RowView

__all__ = ["fit_sklearn", "is_streamed"]


class _Parts(NamedTuple):
    whole: Any
    scaler: StandardScaler | None
    model: LogisticRegression


def is_streamed(made: SklearnProbe) -> bool:
    """Whether a classifier has one optimum, which a stream of rows leads to.

    These are `LogisticRegression` with the L2 penalty and any solver but liblinear, which
    penalises the intercept, alone or behind a `StandardScaler` in a `Pipeline`.

    Args:
        made: with the classifier, unfitted.
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
    """Fit as `SklearnProbe.fit` does, to the tolerance of the classifier.

    Args:
        made: unfitted, one that `is_streamed`.
        view: rows of a store.
        layer: one of its layers.
        weights: (samples,) or None.

    Raises:
        SpecError: a class is missing, or a value is not finite.
    """
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
