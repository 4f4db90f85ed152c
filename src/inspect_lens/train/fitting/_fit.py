"""Fitting any family on a set at a layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Protocol, Self, cast

import numpy as np
from numpy.typing import NDArray

from inspect_lens.errors import SpecError
from inspect_lens.probe import AnyProbe, ProbeCard
from inspect_lens.train.sets._dataset import ActivationSet
from inspect_lens.train.sets._store_set import StoreSet

from ._kept_fits import fit_from_store

__all__ = ["Rows", "TrainableProbe", "fit_on", "rows_of"]

Rows = Literal["tokens", "mean", "last"]
"""What one row of a fit is: a token, or the mean or the last token of a sample."""


class TrainableProbe(Protocol):
    """What every family has: scikit-learn's `fit`, and a way to a probe."""

    reads: Literal["tokens", "sequences"]

    def fit(self, X: Any, y: Any, groups: Any = None) -> Self:
        """Fit.

        Args:
            X: rows (rows, hidden), or sequences (tokens, hidden), as `reads` says.
            y: one of two classes for each.
            groups: what must not straddle a split of the family's own.

        Returns:
            self.
        """

    def to_probe(self, card: ProbeCard) -> AnyProbe:
        """Freeze what was fitted."""


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
        The estimator, fitted. Of a `StoreSet`, families that `fit_stream` knows are fitted piece
        by piece.

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
    if rows not in (None, "tokens", "mean", "last"):
        raise SpecError(f"rows={rows!r}; allowed are 'tokens', 'mean' and 'last'")
    groups, extra = np.array(data.groups), _weights(estimator, data)
    first, *others = (layer,) if isinstance(layer, int) else tuple(layer)
    if estimator.reads == "sequences":
        if others:
            raise SpecError(f"layer={layer}: this family reads one layer; name one")
        return estimator.fit(data.sequences(first), data.labels, groups)
    rows, fit = rows_of(estimator, rows), cast(Any, estimator.fit)
    made: TrainableProbe
    if rows == "tokens" and isinstance(data, StoreSet) and not others and not extra:
        kept: TrainableProbe | None = fit_from_store(estimator, data, first)
        if kept is not None:
            return kept
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
