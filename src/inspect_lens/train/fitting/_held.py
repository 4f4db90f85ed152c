"""Fits with all rows of a layer in memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from inspect_lens.errors import SpecError
from inspect_lens.train.families._binary import Rows, TrainableProbe
from inspect_lens.train.sets._dataset import ActivationSet

__all__ = ["fit_held", "sample_weights"]


def fit_held(
    estimator: TrainableProbe, data: ActivationSet, layers: Sequence[int], rows: Rows | None
) -> TrainableProbe:
    """Fit a family."""
    groups, extra = np.array(data.groups), {}
    if estimator.reads == "sequences":
        return estimator.fit(data.sequences(layers[0]), data.labels, groups)
    weights = sample_weights(estimator, data)
    if rows == "tokens":
        x, labels, groups = data.rows(layers[0])
        parts = [x, *(data.rows(at)[0] for at in layers[1:])]
        if weights is not None:
            weights = np.repeat(weights, [int(m.sum()) for m in data.mask])
    else:
        assert rows is not None
        labels, parts = data.labels, [data.pooled(at, rows) for at in layers]
    if weights is not None:
        extra = {"sample_weight": weights}
    wide = np.hstack(parts) if len(parts) > 1 else parts[0]
    made: TrainableProbe = cast(Any, estimator.fit)(wide, labels, groups, **extra)
    return made


def sample_weights(estimator: TrainableProbe, data: ActivationSet) -> NDArray[np.float64] | None:
    """Weights (samples,) of the column that an estimator names; None where it names none."""
    column = getattr(estimator, "sample_weight", "")
    if not column:
        return None
    values = data.key(column)
    try:
        weights = np.array([float(value) for value in values])
    except ValueError:
        weights = np.full(len(values), np.nan)
    if not (np.isfinite(weights).all() and (weights >= 0).all() and weights.any()):
        raise SpecError(
            f"sample_weight={column!r}: {data.name} holds values that are no weights; allowed are "
            "finite numbers, none negative and not all 0"
        )
    return weights
