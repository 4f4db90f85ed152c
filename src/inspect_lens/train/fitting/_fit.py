"""Fitting any family on a set, at a layer or at several."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray
from sklearn.base import clone

from inspect_lens.errors import SpecError
from inspect_lens.train.families._trainable import Rows, TrainableProbe
from inspect_lens.train.sets._dataset import ActivationSet
from inspect_lens.train.sets._store_set import StoreSet

from ._store_fits import fit_from_store

__all__ = ["fit_layers", "fit_on", "rows_of"]


def rows_of(estimator: TrainableProbe, rows: Rows | None) -> Rows | None:
    """What one row of a fit is; None for families that read sequences.

    Args:
        estimator: its own rows count where none are named; those of its base if it is an
            ensemble.
        rows: what is asked for.
    """
    if estimator.reads == "sequences":
        return None
    base = getattr(estimator, "base", None) or estimator
    own: Rows = getattr(base, "default_rows", "tokens")
    return rows or own


def fit_on(
    estimator: TrainableProbe,
    data: ActivationSet,
    layer: int | Sequence[int],
    *,
    rows: Rows | None = None,
) -> TrainableProbe:
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
            sequences, or `rows` is unknown.

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
    groups, extra = np.array(data.groups), _weights(estimator, data)
    first, *others = (layer,) if isinstance(layer, int) else tuple(layer)
    if estimator.reads == "sequences" and others:
        raise SpecError(f"layer={layer}: this family reads one layer; name one")
    if not others and _reads_all(estimator, data, rows):
        assert isinstance(data, StoreSet)
        fits = fit_from_store({first: estimator}, data)
        if fits is not None and list(fits):
            return estimator
    if estimator.reads == "sequences":
        return estimator.fit(data.sequences(first), data.labels, groups)
    rows, fit = rows_of(estimator, rows), cast(Any, estimator.fit)
    made: TrainableProbe
    if rows == "tokens":
        x, labels, groups = data.rows(first)
        extra = {k: np.repeat(v, [int(m.sum()) for m in data.mask]) for k, v in extra.items()}
        wide = np.hstack([x, *(data.rows(o)[0] for o in others)]) if others else x
        made = fit(wide, labels, groups, **extra)
        return made
    assert rows is not None
    pooled = np.hstack([data.pooled(at, rows) for at in (first, *others)])
    made = fit(pooled, data.labels, groups, **extra)
    return made


def fit_layers(
    estimator: TrainableProbe,
    data: ActivationSet,
    layers: Sequence[int],
    *,
    rows: Rows | None = None,
) -> Iterator[tuple[int, TrainableProbe]]:
    """Fit a family at several layers, each on its own, in the memory that a `StoreSet` states.

    A `StoreSet` is not loaded:

    - Families that end in a formula (difference of means, mass-mean, LDA, LAT) are fitted at as
      many layers at once as the memory allows, from one pass over the shards. LDA with Ledoit
      and Wolf's shrinkage takes two.
    - Logistic regression reads a layer after the other, once per step, and holds a piece and a
      few matrices of hidden² numbers.
    - Neural heads are trained in memory where a layer fits, after one pass for as many layers as
      do. Else each batch is read from disk. Batches and results are the same.
    - Other families, ensembles, and fits with sample weights hold one layer, whatever the memory.

    With a folder for fits (`StoreSet(work=)`), each layer that is done is kept, but for the last
    kind. A run that was stopped begins again with the layers of the pass that it was in.

    Args:
        estimator: unfitted; it is cloned for each layer.
        data: the set.
        layers: of the set.
        rows: as in `fit_on`.

    Yields:
        Layer and fitted estimator; layers that a run before has fitted come first.

    Raises:
        SpecError: as `fit_on`.

    Warns:
        UserWarning: a formula takes more memory for one layer than is stated.

    Example:
        ```python
        from inspect_lens.train import ActivationSet, LDAProbe, fit_layers

        train = ActivationSet.load("acts/train.safetensors")
        fits = dict(fit_layers(LDAProbe(), train, train.layers))
        assert fits[1].coef_.shape == (train.hidden,)
        ```
    """
    _check_rows(rows)
    if _reads_all(estimator, data, rows):
        assert isinstance(data, StoreSet)
        made = {layer: clone(estimator) for layer in layers}
        fits = fit_from_store(made, data)
        if fits is not None:
            yield from ((layer, made[layer]) for layer in fits)
            return
    for layer in layers:
        yield layer, fit_on(clone(estimator), data, layer, rows=rows)


def _check_rows(rows: str | None) -> None:
    if rows not in (None, "tokens", "mean", "last"):
        raise SpecError(f"rows={rows!r}; allowed are 'tokens', 'mean' and 'last'")


def _reads_all(estimator: TrainableProbe, data: ActivationSet, rows: Rows | None) -> bool:
    """Whether a fit reads every row of a store, each with the same weight."""
    weighted = bool(getattr(estimator, "sample_weight", ""))
    every = rows_of(estimator, rows) in (None, "tokens")
    return isinstance(data, StoreSet) and every and not weighted


def _weights(estimator: TrainableProbe, data: ActivationSet) -> dict[str, NDArray[np.float64]]:
    """Weights (samples,) of the column that an estimator names, for its `fit`."""
    column = getattr(estimator, "sample_weight", "")
    if not column:
        return {}
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
    return {"sample_weight": weights}
