"""Fitting any family on a set, at a layer or at several."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from sklearn.base import clone

from inspect_lens.errors import SpecError
from inspect_lens.train.families._binary import Rows, TrainableProbe
from inspect_lens.train.families._ensemble import EnsembleProbe
from inspect_lens.train.sets._dataset import ActivationSet
from inspect_lens.train.sets._store_set import StoreSet

from ._held import fit_held
from ._row_view import RowView
from ._store_fits import fit_from_store, fit_jointly

__all__ = ["fit_layers", "fit_on", "rows_of"]


def rows_of(estimator: TrainableProbe, rows: Rows | None) -> Rows | None:
    """What one row of a fit is; None for families that read sequences."""
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
    rows = rows_of(estimator, rows)
    if not isinstance(data, StoreSet):
        return fit_held(estimator, data, (first, *others), rows)
    view = RowView(data, rows or "tokens")
    if others or isinstance(estimator, EnsembleProbe):
        fit_jointly(estimator, view, (first, *others))
    else:
        list(fit_from_store({first: estimator}, view))
    return estimator


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
    - Logistic regression, that of scikit-learn too (alone or behind a `StandardScaler`), reads a
      layer after the other, about ten times. It holds matrices of hidden² numbers where these fit,
      and reads more often where they do not.
    - Neural heads are trained in memory where a layer fits, after one pass for as many layers as
      do. Else each batch is read from disk. Batches and results are the same.
    - `TorchLogisticProbe` and `SAEFeatureProbe` are fitted in memory where a layer and its copies
      fit. Else they read it once per step, or twice.
    - An `EnsembleProbe` is fitted in memory, or its members are, by the rules above.
    - Other families, such as other classifiers of scikit-learn, need memory for a layer and its
      copies, and say so before they read.

    What a fit needs once per row, such as labels and scores, comes on top; so do pieces.

    With a folder for fits (`StoreSet(work=)`), each layer that is done is kept, but for classifiers
    of scikit-learn. A run that was stopped begins again with the layers of the pass that it was in.

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
        UserWarning: a formula takes more memory for one layer than is stated, or a layer is read
            from disk a thousand times.

    Example:
        ```python
        from inspect_lens.train import ActivationSet, LDAProbe, fit_layers

        train = ActivationSet.load("acts/train.safetensors")
        fits = dict(fit_layers(LDAProbe(), train, train.layers))
        assert fits[1].coef_.shape == (train.hidden,)
        ```
    """
    _check_rows(rows)
    if isinstance(data, StoreSet) and not isinstance(estimator, EnsembleProbe):
        made = {layer: clone(estimator) for layer in layers}
        view = RowView(data, rows_of(estimator, rows) or "tokens")
        yield from ((layer, made[layer]) for layer in fit_from_store(made, view))
        return
    for layer in layers:
        yield layer, fit_on(clone(estimator), data, layer, rows=rows)


def _check_rows(rows: str | None) -> None:
    if rows not in (None, "tokens", "mean", "last"):
        raise SpecError(f"rows={rows!r}; allowed are 'tokens', 'mean' and 'last'")
