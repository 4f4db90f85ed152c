"""Fitting any family on a set, at a layer or at several."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray
from sklearn.base import clone

from inspect_lens.errors import SpecError
from inspect_lens.train.families._binary import BinaryEstimator, Rows
from inspect_lens.train.sets._dataset import ActivationSet
from inspect_lens.train.sets._store_set import StoreSet

from ._store_fits import fits_in_memory, keep, restore, stream


def rows_of(estimator: BinaryEstimator, rows: Rows | None) -> Rows | None:
    """What one row of a fit is; None for families that read sequences."""
    if estimator.reads == "sequences":
        return None
    base = getattr(estimator, "base", None) or estimator
    own: Rows = getattr(base, "default_rows", "tokens")
    return rows or own


def fit_on(
    estimator: BinaryEstimator,
    data: ActivationSet,
    layer: int | Sequence[int],
    *,
    rows: Rows | None = None,
) -> BinaryEstimator:
    """Fit a family on the selected tokens of a set.

    Args:
        estimator: unfitted.
        data: the set.
        layer: one of its layers; several for an `EnsembleProbe`, whose rows hold them one after
            the other.
        rows: what one row is, for families that read rows; that of its source by default.

    Returns:
        The estimator, fitted. Of a `StoreSet`, as `fit_layers` does it.

    Raises:
        SpecError: the layer is not in the set, several are given to a family that reads
            sequences, `rows` is unknown, or a fit needs more memory than a `StoreSet` states.

    Example:
        ```python
        from inspect_lens.probe import ProbeCard
        from inspect_lens.train import ActivationSet, LDAProbe, fit_on

        train = ActivationSet.load("acts/train.safetensors")
        fitted = fit_on(LDAProbe(), train, 1)
        probe = fitted.to_probe(ProbeCard(name="mine/lda", layers=(1,), hidden=32))
        assert train.scores(probe).shape == (len(train),)
        ```
    """
    _check_rows(rows)
    first, *others = (layer,) if isinstance(layer, int) else tuple(layer)
    if estimator.reads == "sequences" and others:
        raise SpecError(f"layer={layer}: this family reads one layer; name one")
    rows, layers = rows_of(estimator, rows), (first, *others)
    if not isinstance(data, StoreSet):
        return _fit_held(estimator, data, layers, rows)
    if restore(estimator, data, layers, rows):
        return estimator
    if fits_in_memory(estimator, data, layers, rows):
        _fit_held(estimator, data, layers, rows)
    else:
        stream(cast(Any, estimator), data, first)
    keep(estimator, data, layers, rows)
    return estimator


def fit_layers(
    estimator: BinaryEstimator,
    data: ActivationSet,
    layers: Sequence[int],
    *,
    rows: Rows | None = None,
) -> Iterator[tuple[int, BinaryEstimator]]:
    """Fit a family at several layers, each on its own.

    A layer of a `StoreSet` is fitted in memory where it fits, with the copies that the fit makes,
    into the memory that the set states. Where it does not, difference of means, mass-mean, LDA
    (without Ledoit and Wolf's shrinkage) and LAT read the layer once, and logistic regression about
    ten times. They hold a few matrices of hidden² numbers. Other families refuse before they read.

    With a folder for fits (`StoreSet(work=)`), each layer that is done is kept, but for classifiers
    of scikit-learn and ensembles. A run that was stopped goes on at the layer that it was in.

    Args:
        estimator: unfitted; it is cloned for each layer.
        data: the set.
        layers: of the set.
        rows: as in `fit_on`.

    Yields:
        Layer and fitted estimator.

    Raises:
        SpecError: as `fit_on`.

    Example:
        ```python
        from inspect_lens.train import ActivationSet, LDAProbe, fit_layers

        train = ActivationSet.load("acts/train.safetensors")
        fits = dict(fit_layers(LDAProbe(), train, train.layers))
        assert fits[1].coef_.shape == (train.hidden,)
        ```
    """
    _check_rows(rows)
    for layer in layers:
        yield layer, fit_on(clone(estimator), data, layer, rows=rows)


def _check_rows(rows: str | None) -> None:
    if rows not in (None, "tokens", "mean", "last"):
        raise SpecError(f"rows={rows!r}; allowed are 'tokens', 'mean' and 'last'")


def _fit_held(
    estimator: BinaryEstimator, data: ActivationSet, layers: Sequence[int], rows: Rows | None
) -> BinaryEstimator:
    """Fit with all rows of the layers in memory."""
    groups = np.array(data.groups)
    if estimator.reads == "sequences":
        return estimator.fit(data.sequences(layers[0]), data.labels, groups)
    weights, labels = _sample_weights(estimator, data), data.labels
    if rows == "tokens":
        x, labels, groups = data.rows(layers[0])
        parts = [x, *(data.rows(at)[0] for at in layers[1:])]
        if weights is not None:
            weights = np.repeat(weights, [int(m.sum()) for m in data.mask])
    else:
        assert rows is not None
        parts = [data.pooled(at, rows) for at in layers]
    wide = np.hstack(parts) if len(parts) > 1 else parts[0]
    extra = {} if weights is None else {"sample_weight": weights}
    return estimator.fit(wide, labels, groups, **extra)


def _sample_weights(estimator: BinaryEstimator, data: ActivationSet) -> NDArray[np.float64] | None:
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
