"""Estimators that end in one direction: what they share, and the difference of means."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sklearn.decomposition import PCA
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis

from inspect_lens.errors import SpecError
from inspect_lens.probe import Probe, ProbeCard

from ._binary import BinaryEstimator, Scaling, Targets, find_scale
from ._moments import ClassStatistics, Moments

Floats = NDArray[np.float64]


class DirectionEstimator(BinaryEstimator):
    """Base of estimators with `decision = coef · (x - mean) / scale + intercept`.

    Subclasses set `coef_`, `intercept_`, `mean_` and `scale_` in `_fit_rows`.

    Attributes:
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

    def _fit(self, x: NDArray[np.floating[Any]], target: Targets) -> None:
        scale = find_scale(x, target, self.scaling, family=type(self).__name__)
        self._fit_rows(x if scale is None else x / scale, target)
        self.unscale(scale)

    def unscale(self, scale: Floats | None) -> None:
        """Take back that rows were divided by a scale (hidden,) before the direction was found."""
        if scale is not None:
            self.mean_, self.scale_ = self.mean_ * scale, self.scale_ * scale

    def _fit_rows(self, x: NDArray[np.floating[Any]], target: Targets) -> None:
        raise NotImplementedError

    def _decide(self, x: NDArray[np.floating[Any]]) -> NDArray[np.floating[Any]]:
        scores: NDArray[np.floating[Any]] = ((x - self.mean_) / self.scale_) @ self.coef_
        return scores + self.intercept_

    def _found(self) -> str:
        # Dividing is no part of the published methods, and `auto` decides by the data.
        if self.scaling == "none":
            return ""
        divided = not np.allclose(self.scale_, 1.0)
        return "; dimensions divided by their median deviation" if divided else "; unscaled"

    def _freeze(self, card: ProbeCard) -> Probe:
        return Probe(
            weight=np.asarray(self.coef_, dtype=np.float32)[None],
            bias=np.array([self.intercept_], dtype=np.float32),
            mean=np.asarray(self.mean_, dtype=np.float32)[None],
            scale=np.asarray(self.scale_, dtype=np.float32)[None],
            card=card,
        )


class FormulaEstimator(DirectionEstimator):
    """Base of the families whose direction follows from class means and the pooled covariance."""

    needs_covariance = False
    """Whether the formula has the covariance in it."""

    def _fit_rows(self, x: NDArray[np.floating[Any]], target: Targets) -> None:
        made = Moments.of(x, target.positive, target.weight, covariance=self.needs_covariance)
        self.solve(made.statistics())

    def solve(self, found: ClassStatistics) -> None:
        """Find the direction."""
        self.coef_ = self._direction(found, found.high - found.low)
        # The midpoint goes into the centre, not into the intercept: |mean| is often hundreds of
        # times |difference|, and their product would lose the digits that decide.
        self.mean_ = (found.high + found.low) / 2.0
        self.scale_ = np.ones_like(self.mean_)
        self.intercept_ = 0.0

    def _direction(self, found: ClassStatistics, gap: Floats) -> Floats:
        raise NotImplementedError


@dataclass(kw_only=True, eq=False, repr=False)
class MeanDifferenceProbe(FormulaEstimator):
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

        x, labels, groups = ActivationSet.load("acts/train.safetensors").rows(1)  # at layer 1
        assert MeanDifferenceProbe().fit(x, labels, groups).score(x, labels) > 0.6
        ```
    """

    method = "difference of class means"
    source = "arXiv:2310.06824"

    normalize: bool = False
    scaling: Scaling = "auto"

    def _direction(self, found: ClassStatistics, gap: Floats) -> Floats:
        norm = float(np.linalg.norm(gap))
        return gap / norm if self.normalize and norm > 0.0 else gap


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


@dataclass(kw_only=True, eq=False, repr=False)
class MassMeanProbe(FormulaEstimator):
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

        x, labels, groups = ActivationSet.load("acts/train.safetensors").rows(1)  # at layer 1
        assert MassMeanProbe().fit(x, labels, groups).score(x, labels) > 0.6
        ```
    """

    method = "mass-mean"
    source = "arXiv:2310.06824"

    iid: bool = False
    atol: float = 1e-3
    scaling: Scaling = "auto"

    @property
    def needs_covariance(self) -> bool:  # type: ignore[override]
        """Whether the formula has the covariance in it."""
        return self.iid

    def _direction(self, found: ClassStatistics, gap: Floats) -> Floats:
        return inverse_times(found.within, gap, atol=self.atol) if self.iid else gap


@dataclass(kw_only=True, eq=False, repr=False)
class LDAProbe(FormulaEstimator):
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

        x, labels, groups = ActivationSet.load("acts/train.safetensors").rows(1)  # at layer 1
        assert LDAProbe().fit(x, labels, groups).score(x, labels) > 0.6
        ```
    """

    method = "linear discriminant"
    source = "Fisher 1936; Ledoit and Wolf 2004"

    shrinkage: str | float | None = "ledoit-wolf"
    equal_priors: bool = True
    scaling: Scaling = "auto"

    needs_covariance = True

    def _fit_rows(self, x: NDArray[np.floating[Any]], target: Targets) -> None:
        self.check_shrinkage()
        if self.shrinkage != "ledoit-wolf":
            super()._fit_rows(x, target)
            return
        if target.weight is not None:
            raise SpecError(
                "sample_weight: Ledoit and Wolf's shrinkage is of rows that count alike; allowed "
                "with weights are shrinkage='ridge', a number and None"
            )
        wide = np.asarray(x, dtype=np.float64)
        model = LinearDiscriminantAnalysis(solver="lsqr", shrinkage="auto")
        model.fit(wide, target.positive)
        self.solve(Moments.of(wide, target.positive).statistics())
        self.coef_ = np.asarray(model.coef_[0], dtype=np.float64)

    def check_shrinkage(self) -> None:
        """Refuse a shrinkage that is none, before rows are read."""
        value = self.shrinkage
        if isinstance(value, str):
            known = value in ("ridge", "ledoit-wolf")
        else:
            known = value is None or 0.0 <= value <= 1.0
        if not known:
            raise SpecError(
                f"shrinkage={value!r}; allowed are 'ledoit-wolf', 'ridge', a number in [0, 1] and "
                "None; correct the value"
            )

    def solve(self, found: ClassStatistics) -> None:
        """Find the direction."""
        super().solve(found)
        if not self.equal_priors:
            self.intercept_ = float(np.log(found.weight[1] / found.weight[0]))

    def _direction(self, found: ClassStatistics, gap: Floats) -> Floats:
        if not found.within.size:
            return gap
        covariance, diagonal = found.within, np.diag_indices_from(found.within)
        level = float(np.trace(covariance)) / len(covariance)
        if self.shrinkage == "ridge":
            covariance[diagonal] += 0.01 * level or 1.0
        elif self.shrinkage is not None:
            covariance *= 1.0 - float(self.shrinkage)
            covariance[diagonal] += float(self.shrinkage) * level
        if not self.shrinkage:
            return np.asarray(np.linalg.lstsq(covariance, gap, rcond=None)[0])
        return np.asarray(np.linalg.solve(covariance, gap))


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


@dataclass(kw_only=True, eq=False, repr=False)
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

        x, labels, groups = ActivationSet.load("acts/train.safetensors").rows(1)  # at layer 1
        assert LATProbe().fit(x, labels, groups).score(x, labels) > 0.6
        ```
    """

    method = "first principal component of differences"
    source = "arXiv:2310.01405"

    n_pairs: int = 512
    random_state: int = 0
    scaling: Scaling = "auto"

    def _fit_rows(self, x: NDArray[np.floating[Any]], target: Targets) -> None:
        if target.weight is not None:
            raise SpecError(
                "sample_weight: LAT compares pairs of rows, which count alike; allowed with "
                "weights are families such as MeanDifferenceProbe; leave the weights out"
            )
        wide, positive = np.asarray(x, dtype=np.float64), target.positive
        first, second, signs = self.pairs(positive, target.groups)
        self.fit_pairs(
            (wide[first] - wide[second]) * signs[:, None],
            wide[~positive].mean(axis=0),
            wide[positive].mean(axis=0),
        )

    def pairs(
        self, positive: NDArray[np.bool_], groups: ArrayLike | None
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]]:
        """Rows to compare, their partners, and which way each difference points, (pairs,) each.

        Args:
            positive: (rows,) class of each row.
            groups: (rows,) what rows are paired within.
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
