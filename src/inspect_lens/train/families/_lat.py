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
    # Rows of a group, ascending, for each group in turn.
    ends = np.cumsum(np.bincount(labels))[:-1]
    for rows in np.split(np.argsort(labels, kind="stable"), ends):
        high = rng.permutation(rows[positive[rows]])
        low = rng.permutation(rows[~positive[rows]])
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
        wide = np.asarray(x, dtype=np.float64)
        first, second, signs = self.pairs(positive, groups)
        self.fit_pairs(
            (wide[first] - wide[second]) * signs[:, None],
            wide[~positive].mean(axis=0),
            wide[positive].mean(axis=0),
        )

    def pairs(
        self, positive: NDArray[np.bool_], groups: ArrayLike | None
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]]:
        """Rows to compare, and which way each difference points; no activation takes part.

        Args:
            positive: (rows,) class of each row.
            groups: (rows,) what rows are paired within.

        Returns:
            (pairs,) positives, their negatives, and 1 or -1.
        """
        rng = np.random.default_rng(self.random_state)
        first, second = make_pairs(positive, groups, n_pairs=self.n_pairs, rng=rng)
        return first, second, rng.choice([-1.0, 1.0], size=first.size)

    def fit_pairs(
        self,
        differences: NDArray[np.float64],
        low: NDArray[np.float64],
        high: NDArray[np.float64],
    ) -> None:
        """Find the direction.

        Args:
            differences: (pairs, hidden) of the rows that `pairs` names, signs included.
            low: (hidden,) mean of all negatives.
            high: (hidden,) mean of all positives.
        """
        if len(differences) > 1 and differences.any():
            pca = PCA(n_components=1, svd_solver="full").fit(differences)
            direction = np.asarray(pca.components_[0])
            self.explained_variance_ratio_ = float(np.nan_to_num(pca.explained_variance_ratio_[0]))
        else:
            norm = float(np.linalg.norm(differences[0]))
            direction = differences[0] / (norm or 1.0)
            self.explained_variance_ratio_ = 1.0
        self.coef_ = direction if float(direction @ (high - low)) >= 0.0 else -direction
        self.mean_, self.scale_ = (high + low) / 2.0, np.ones_like(high)
        self.intercept_ = 0.0
