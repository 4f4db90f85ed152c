"""Ensembles over layers, whose members are fitted as each would be alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from sklearn.base import clone

from inspect_lens.errors import SpecError
from inspect_lens.train.families._ensemble import EnsembleProbe
from inspect_lens.train.families._logistic import LogisticProbe

from ._moments import prefetch, require_both
from ._row_view import RowView

__all__ = ["fit_members"]

FitAll: TypeAlias = Callable[[Mapping[int, Any], RowView], None]
_BLOCK = 512


def fit_members(made: EnsembleProbe, view: RowView, layers: Sequence[int], fit_all: FitAll) -> None:
    """Fit as `EnsembleProbe.fit` does.

    Each fold is a part of the store, as its groups are whole.
    """
    made.check_stack()
    if made.n_layers != len(layers):
        raise SpecError(
            f"n_layers={made.n_layers}: {len(layers)} layers are read, {list(layers)}; allowed is "
            "their number"
        )
    labels = view.labels
    require_both(labels)
    made.classes_, made.n_features_in_ = np.array([0, 1]), view.hidden * len(layers)
    base = LogisticProbe() if made.base is None else made.base
    starts = np.cumsum(view.lengths) - view.lengths
    outside = np.full((len(labels), len(layers)), np.nan)
    for _, held in made.folds_of(labels, view.groups):
        inside = np.ones(len(labels), dtype=bool)
        inside[held] = False
        picked = inside[starts]
        rest = RowView(view.data.subset(np.flatnonzero(picked)), view.rows)
        part = RowView(view.data.subset(np.flatnonzero(~picked)), view.rows)
        fits = {layer: clone(base) for layer in layers}
        fit_all(fits, rest)
        outside[~inside] = _scores(fits, part, layers)
    fits = {layer: clone(base) for layer in layers}
    fit_all(fits, view)
    if np.isnan(outside).any():
        outside = np.where(np.isnan(outside), _scores(fits, view, layers), outside)
    made.combine(outside, labels)
    made.estimators_ = [fits[layer] for layer in layers]


def _scores(fits: Mapping[int, Any], view: RowView, layers: Sequence[int]) -> NDArray[np.float64]:
    """Decisions (rows, layers) of each layer's fit, from one pass."""
    made = np.empty((len(view), len(layers)))
    column = {layer: i for i, layer in enumerate(layers)}
    for layer, index, rows in prefetch(view.passes(sorted(layers))):
        for first in range(0, len(rows), _BLOCK):
            part = slice(first, first + _BLOCK)
            made[index[part], column[layer]] = fits[layer].decision_function(rows[part])
    return made
