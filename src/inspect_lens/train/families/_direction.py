"""Estimators that end in one direction: what they share, and the difference of means."""

from __future__ import annotations

import warnings
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sklearn.decomposition import PCA
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.utils.validation import check_is_fitted, validate_data

from inspect_lens.errors import SpecError
from inspect_lens.probe import Probe, ProbeCard

from ._binary import BinaryEstimator, Scaling, find_scale

__all__ = [
    "DirectionEstimator",
    "LATProbe",
    "LDAProbe",
    "MassMeanProbe",
    "MeanDifferenceProbe",
    "inverse_times",
    "make_pairs",
    "within_covariance",
]


class DirectionEstimator(BinaryEstimator):
    """Base of estimators with `decision = coef · (x - mean) / scale + intercept`.

    Subclasses set `coef_`, `intercept_`, `mean_` and `scale_` in `_fit_rows`.

    Attributes:
        classes_: (2,) the two labels; the second is the positive one.
        n_features_in_: hidden.
        coef_: (hidden,).
        intercept_: a number.
        mean_: (hidden,) what is subtracted before the direction is applied.
        scale_: (hidden,) what is divided by.

    Example:
        ```python
        import numpy as np

        from inspect_lens.train import ActivationSet, DirectionEstimator, MassMeanProbe

        train = ActivationSet.load("acts/train.safetensors")
        x, labels, _ = train.rows(1)
        estimator = MassMeanProbe().fit(x, labels)
        assert isinstance(estimator, DirectionEstimator)
        scores = (x - estimator.mean_) / estimator.scale_ @ estimator.coef_ + estimator.intercept_
        assert np.allclose(scores, estimator.decision_function(x), atol=1e-4)
        ```
    """

    scaling: Scaling = "none"
    """How dimensions are scaled before the direction is looked for (`find_scale`)."""
    coef_: NDArray[np.floating[Any]]
    intercept_: float
    mean_: NDArray[np.floating[Any]]
    scale_: NDArray[np.floating[Any]]

    def fit(self, X: ArrayLike, y: ArrayLike, groups: ArrayLike | None = None) -> Self:
        """Find the direction.

        Args:
            X: (rows, hidden) float; a row is a token or a pooled sample.
            y: (rows,) two classes; the larger label is the positive one.
            groups: (rows,) accepted by every estimator, so that those that pair rows within
                a group can be swapped in; the others do not use it.

        Returns:
            self.

        Raises:
            ValueError: not two classes, NaN, or shapes disagree.
        """
        x, labels = validate_data(self, X, y, dtype=[np.float64, np.float32])
        positive = self._positive(labels)
        scale = find_scale(x, positive, self.scaling, family=type(self).__name__)
        self._fit_groups(x if scale is None else x / scale, positive, groups)
        if scale is not None:
            self.mean_, self.scale_ = self.mean_ * scale, self.scale_ * scale
        return self

    def _fit_groups(
        self,
        x: NDArray[np.floating[Any]],
        positive: NDArray[np.bool_],
        groups: ArrayLike | None,
    ) -> None:
        self._fit_rows(x, positive)

    def _fit_rows(self, x: NDArray[np.floating[Any]], positive: NDArray[np.bool_]) -> None:
        raise NotImplementedError

    def decision_function(self, X: ArrayLike) -> NDArray[np.floating[Any]]:
        """Score rows (rows, hidden); larger means more of the positive class."""
        check_is_fitted(self)
        x = validate_data(self, X, dtype=[np.float64, np.float32], reset=False)
        scores: NDArray[np.floating[Any]] = ((x - self.mean_) / self.scale_) @ self.coef_
        return scores + self.intercept_

    def to_probe(self, card: ProbeCard) -> Probe:
        """Freeze the fitted direction.

        Args:
            card: of one layer; its width has to be that of the training rows. An empty
                `method` or `source` is filled in.

        Returns:
            The probe; it scores rows as `decision_function` does, up to float32 rounding.

        Raises:
            SpecError: the card names several layers or another width.
            sklearn.exceptions.NotFittedError: `fit` was not called.
        """
        check_is_fitted(self)
        if len(card.layers) != 1 or card.hidden != self.n_features_in_:
            raise SpecError(
                f"card: layers {card.layers} of width {card.hidden}; allowed is one layer of width "
                f"{self.n_features_in_}; an estimator learns the direction of one layer"
            )
        method = self.describe()
        if self.scaling != "none":
            # Dividing is no part of the published methods, and `auto` decides by the data.
            divided = not np.allclose(self.scale_, 1.0)
            method += "; dimensions divided by their median deviation" if divided else "; unscaled"
        filled = {"method": card.method or method, "source": card.source or self.source}
        return Probe(
            weight=np.asarray(self.coef_, dtype=np.float32)[None],
            bias=np.array([self.intercept_], dtype=np.float32),
            mean=np.asarray(self.mean_, dtype=np.float32)[None],
            scale=np.asarray(self.scale_, dtype=np.float32)[None],
            card=card.model_copy(update=filled),
        )


class MeanDifferenceProbe(DirectionEstimator):
    """Difference of class means; a row at the midpoint scores 0.

    Args:
        normalize: make the direction unit length, so that scores are in units of the residual
            stream.
        scaling: of dimensions: `auto` divides each by its median deviation where 1% of them hold
            half of the variance, and warns; `robust` always does; `none` is the published method.

    Source:
        arXiv:2310.06824 (mass-mean probing without the covariance), arXiv:2312.06681.

    Example:
        ```python
        from inspect_lens.train import ActivationSet, MeanDifferenceProbe

        train, test = (ActivationSet.load(f"acts/{name}.safetensors") for name in ("train", "test"))
        x, labels, groups = train.rows(1)  # (tokens, hidden) at layer 1, and the label of each row
        estimator = MeanDifferenceProbe().fit(x, labels, groups)
        x, labels, _ = test.rows(1)
        assert estimator.score(x, labels) > 0.6
        ```
    """

    method = "difference of class means"
    source = "arXiv:2310.06824"

    def __init__(self, *, normalize: bool = False, scaling: Scaling = "auto") -> None:
        self.normalize = normalize
        self.scaling = scaling

    def _fit_rows(self, x: NDArray[np.floating[Any]], positive: NDArray[np.bool_]) -> None:
        high = x[positive].mean(axis=0, dtype=np.float64)
        low = x[~positive].mean(axis=0, dtype=np.float64)
        self.coef_ = high - low
        norm = float(np.linalg.norm(self.coef_))
        if self.normalize and norm > 0.0:
            self.coef_ = self.coef_ / norm
        # The midpoint goes into the centre, not into the intercept: |mean| is often hundreds of
        # times |difference|, and their product would lose the digits that decide.
        self.mean_ = (high + low) / 2.0
        self.scale_ = np.ones_like(self.mean_)
        self.intercept_ = 0.0


Floats = NDArray[np.float64]


def within_covariance(x: NDArray[np.floating[Any]], positive: NDArray[np.bool_]) -> Floats:
    """Pooled covariance (hidden, hidden) of rows around their class mean; divides by rows."""
    centred = np.asarray(x, dtype=np.float64).copy()
    for side in (positive, ~positive):
        centred[side] -= centred[side].mean(axis=0)
    made: Floats = centred.T @ centred / len(centred)
    return made


def inverse_times(covariance: Floats, vector: Floats, *, atol: float) -> Floats:
    """Pseudo-inverse of a symmetric matrix times a vector; eigenvalues below `atol` count as 0.

    Warns where all of them do, as in the first layers of models with small embeddings.
    """
    values, vectors = np.linalg.eigh(covariance)
    kept = np.abs(values) > atol
    if vector.any() and not kept.any():
        warnings.warn(
            f"atol={atol:g}: all variances lie below it (the largest is {np.abs(values).max():.2g})"
            ", so the direction is zero and scores nothing; ask for a smaller atol, or for family "
            "lda, which knows no scale",
            UserWarning,
            stacklevel=2,
        )
    inverse = np.zeros_like(values)
    inverse[kept] = 1.0 / values[kept]
    made: Floats = vectors @ (inverse * (vectors.T @ vector))
    return made


class MassMeanProbe(DirectionEstimator):
    """Mass-mean probe: the difference of means, for the IID form times the inverse covariance.

    The source centres the data in advance; here the midpoint of the class means is subtracted,
    so that a row at the midpoint has probability one half.

    Args:
        iid: sigmoid(theta · pinv(Sigma) · x), for data of the training distribution; False is
            sigmoid(theta · x), which the source uses for transfer.
        atol: eigenvalues of Sigma below it count as 0.
        scaling: as of `MeanDifferenceProbe`.

    Source:
        arXiv:2310.06824, section 5; Sigma is the pooled covariance within the classes.

    Example:
        ```python
        from inspect_lens.train import ActivationSet, MassMeanProbe

        train, test = (ActivationSet.load(f"acts/{name}.safetensors") for name in ("train", "test"))
        x, labels, groups = train.rows(1)  # (tokens, hidden) at layer 1, and the label of each row
        estimator = MassMeanProbe().fit(x, labels, groups)
        x, labels, _ = test.rows(1)
        assert estimator.score(x, labels) > 0.6
        ```
    """

    method = "mass-mean"
    source = "arXiv:2310.06824"

    def __init__(self, *, iid: bool = False, atol: float = 1e-3, scaling: Scaling = "auto") -> None:
        self.iid = iid
        self.atol = atol
        self.scaling = scaling

    def _fit_rows(self, x: NDArray[np.floating[Any]], positive: NDArray[np.bool_]) -> None:
        high = x[positive].mean(axis=0, dtype=np.float64)
        low = x[~positive].mean(axis=0, dtype=np.float64)
        theta: Floats = np.asarray(high - low, dtype=np.float64)
        if self.iid:
            theta = inverse_times(within_covariance(x, positive), theta, atol=self.atol)
        self.coef_ = theta
        self.mean_, self.scale_ = (high + low) / 2.0, np.ones_like(high)
        self.intercept_ = 0.0


class LDAProbe(DirectionEstimator):
    """Linear discriminant: (Sigma + lambda I)^-1 (mu+ - mu-), with the prior in the intercept.

    Args:
        shrinkage: `ledoit-wolf` (scikit-learn's `auto`), a number in [0, 1] (scikit-learn's
            shrinkage to the mean variance), `ridge` (lambda = 0.01 · trace(Sigma) / hidden), or
            None for none, which needs more rows than features.
        equal_priors: count both classes as equally likely, whatever their share of the rows.
        scaling: as of `MeanDifferenceProbe`; shrinkage to one mean variance needs it.

    Source:
        Fisher 1936; scikit-learn does the arithmetic but for `ridge`.

    Example:
        ```python
        from inspect_lens.train import ActivationSet, LDAProbe

        train, test = (ActivationSet.load(f"acts/{name}.safetensors") for name in ("train", "test"))
        x, labels, groups = train.rows(1)  # (tokens, hidden) at layer 1, and the label of each row
        estimator = LDAProbe().fit(x, labels, groups)
        x, labels, _ = test.rows(1)
        assert estimator.score(x, labels) > 0.6
        ```
    """

    method = "linear discriminant"
    source = "Fisher 1936; Ledoit and Wolf 2004"

    def __init__(
        self,
        *,
        shrinkage: str | float | None = "ledoit-wolf",
        equal_priors: bool = True,
        scaling: Scaling = "auto",
    ) -> None:
        self.shrinkage = shrinkage
        self.equal_priors = equal_priors
        self.scaling = scaling

    def _fit_rows(self, x: NDArray[np.floating[Any]], positive: NDArray[np.bool_]) -> None:
        wide = np.asarray(x, dtype=np.float64)
        high, low = wide[positive].mean(axis=0), wide[~positive].mean(axis=0)
        if self.shrinkage == "ridge":
            # scikit-learn's is the same (a shrinkage of 0.01 / 1.01), by singular values of the
            # covariance: ten times the work, which tells at a width of thousands.
            covariance = within_covariance(wide, positive)
            ridge = 0.01 * float(np.trace(covariance)) / len(covariance)
            self.coef_ = np.linalg.solve(
                covariance + (ridge or 1.0) * np.eye(len(covariance)), high - low
            )
        else:
            self.coef_ = self._sklearn_direction(wide, positive)
        self.mean_, self.scale_ = (high + low) / 2.0, np.ones_like(high)
        share = float(positive.mean())
        self.intercept_ = 0.0 if self.equal_priors else float(np.log(share / (1.0 - share)))

    def _sklearn_direction(self, x: Floats, positive: NDArray[np.bool_]) -> Floats:
        known = self.shrinkage == "ledoit-wolf"
        if isinstance(self.shrinkage, str) and not known:
            raise SpecError(
                f"shrinkage={self.shrinkage!r}; allowed are 'ledoit-wolf', 'ridge', a number in "
                "[0, 1] and None; correct the name"
            )
        model = LinearDiscriminantAnalysis(
            solver="lsqr", shrinkage="auto" if known else self.shrinkage
        ).fit(x, positive)
        direction: Floats = np.asarray(model.coef_[0], dtype=np.float64)
        return direction


def make_pairs(
    positive: NDArray[np.bool_],
    groups: ArrayLike | None,
    *,
    n_pairs: int | None,
    rng: np.random.Generator,
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Indices of positive and negative rows to compare."""
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
