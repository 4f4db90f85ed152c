"""Probes on the features of a sparse autoencoder, on rows that come in pieces."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from inspect_lens.train.families._sae import SAEFeatureProbe

from ._moments import require_both, wide_blocks
from ._row_view import RowView

__all__ = ["feature_bytes", "fit_features"]

_COPIES: Final = 4  # of an activation that is kept: it, scaled, and liblinear's index and value


def feature_bytes(made: SAEFeatureProbe, view: RowView) -> int:
    """What a fit holds: the activations of the kept features on all rows."""
    n = view.hidden if made.encoder is None else len(made.encoder.weight)
    return 8 * _COPIES * len(view) * (1 if made.raw else min(made.k, n))


def fit_features(made: SAEFeatureProbe, view: RowView, layer: int) -> None:
    """Fit as `SAEFeatureProbe.fit` does, from two passes: choose features, then read them."""
    labels = view.labels
    require_both(labels)
    made.classes_, made.n_features_in_ = np.array([0, 1]), view.hidden
    read = view.again(layer, spare=view.data.memory * 1e9 - feature_bytes(made, view))
    n = np.array([np.count_nonzero(~labels), np.count_nonzero(labels)])
    shift: NDArray[np.float64] | None = None
    for index, x in wide_blocks(read):
        z = np.hstack(list(made.latents(x)))
        if shift is None:
            # Squares of distances from about the mean: what is constant has none.
            shift = z.mean(axis=0)
            sums, squares = np.zeros((2, z.shape[1])), np.zeros(z.shape[1])
        z -= shift
        for k, side in enumerate((~labels[index], labels[index])):
            sums[k] += z[side].sum(axis=0)
        squares += np.einsum("ij,ij->j", z, z)
    variance = squares / n.sum() - (sums.sum(axis=0) / n.sum()) ** 2
    made.choose(np.sqrt(np.maximum(variance, 0.0)), sums[1] / n[1] - sums[0] / n[0])
    kept = np.empty((len(labels), len(made.features_)))
    for index, x in wide_blocks(read):
        kept[index] = made.kept(x)
    made.weigh(kept, labels)
