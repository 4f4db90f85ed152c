"""Linear artificial tomography: the first principal component of differences."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sklearn.decomposition import PCA

from ._direction import DirectionEstimator
from ._scaling import Scaling

__all__ = ["LATProbe", "make_pairs"]


def make_pairs(
    positive: NDArray[np.bool_],
    groups: ArrayLike | None,
    *,
    n_pairs: int | None,
    rng: np.random.Generator,
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Indices of positive and negative rows to compare.

    Args:
        positive: (rows,) class of each row.
        groups: (rows,) pair within a group where it has both classes, and leave the other
            groups out; None, or no group with both: pair at random.
        n_pairs: how many at most; None takes all, each row of the smaller side once.
        rng: of the pairing.

    Returns:
        (pairs,) indices of positives, and of their negatives.
    """
    labels = np.zeros(positive.size, dtype=np.int64)
    if groups is not None:
        _, labels = np.unique(np.asarray(groups), return_inverse=True)
    first: list[int] = []
    second: list[int] = []
    for label in np.unique(labels):
        high = rng.permutation(np.flatnonzero(positive & (labels == label)))
        low = rng.permutation(np.flatnonzero(~positive & (labels == label)))
        n = min(high.size, low.size)
        first += high[:n].tolist()
        second += low[:n].tolist()
    if not first:
        return make_pairs(positive, None, n_pairs=n_pairs, rng=rng)
    order = rng.permutation(len(first))[:n_pairs]
    return np.array(first)[order], np.array(second)[order]


class LATProbe(DirectionEstimator):
    """First principal component of the differences of contrasting rows, sign by the labels.

    Each difference points from either row of its pair to the other, at random, so that their
    mean carries no label; they are centred again before the component is taken.

    Args:
        n_pairs: pairs to compare at most; 512 in the source.
        random_state: of pairing and order.
        scaling: as of `MeanDifferenceProbe`.

    Attributes:
        explained_variance_ratio_: share of the differences' variance along the direction.

    Source:
        arXiv:2310.01405 (representation reading); scikit-learn does the PCA.

    Example:
        ```python
        from inspect_lens.train import ActivationSet, LATProbe

        train, test = (ActivationSet.load(f"acts/{name}.safetensors") for name in ("train", "test"))
        x, labels, groups = train.rows(1)  # (tokens, hidden) at layer 1, and the label of each row
        estimator = LATProbe().fit(x, labels, groups)
        x, labels, _ = test.rows(1)
        assert estimator.score(x, labels) > 0.6
        ```
    """

    method = "first principal component of differences"
    source = "arXiv:2310.01405"

    explained_variance_ratio_: float

    def __init__(
        self, *, n_pairs: int = 512, random_state: int = 0, scaling: Scaling = "auto"
    ) -> None:
        self.n_pairs = n_pairs
        self.random_state = random_state
        self.scaling = scaling

    def _fit_groups(
        self,
        x: NDArray[np.floating[Any]],
        positive: NDArray[np.bool_],
        groups: ArrayLike | None,
    ) -> None:
        rng = np.random.default_rng(self.random_state)
        wide = np.asarray(x, dtype=np.float64)
        first, second = make_pairs(positive, groups, n_pairs=self.n_pairs, rng=rng)
        signs = rng.choice([-1.0, 1.0], size=first.size)
        differences = (wide[first] - wide[second]) * signs[:, None]
        if len(differences) > 1 and differences.any():
            pca = PCA(n_components=1, svd_solver="full").fit(differences)
            direction = np.asarray(pca.components_[0])
            self.explained_variance_ratio_ = float(np.nan_to_num(pca.explained_variance_ratio_[0]))
        else:
            norm = float(np.linalg.norm(differences[0]))
            direction = differences[0] / (norm or 1.0)
            self.explained_variance_ratio_ = 1.0
        high, low = wide[positive].mean(axis=0), wide[~positive].mean(axis=0)
        self.coef_ = direction if float(direction @ (high - low)) >= 0.0 else -direction
        self.mean_, self.scale_ = (high + low) / 2.0, np.ones_like(high)
        self.intercept_ = 0.0
