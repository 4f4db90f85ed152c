"""Estimators that end in one direction, and the sums over rows that their formulas need."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Self, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sklearn.decomposition import PCA
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis

from inspect_lens._base.arguments import warn_caller
from inspect_lens.errors import SpecError
from inspect_lens.probe import Probe, ProbeCard

from ._binary import BinaryEstimator, Scaling, Targets, find_scale

__all__ = ["DirectionEstimator", "LATProbe", "LDAProbe", "MassMeanProbe", "MeanDifferenceProbe"]

Floats = NDArray[np.float64]
Rows = NDArray[np.floating]
Take: TypeAlias = Callable[[NDArray[np.int64]], Rows]
_NUMBERS: Final = 1 << 22


class ClassStatistics(NamedTuple):
    """What the families that end in a formula need to know of the rows."""

    low: Floats
    """(hidden,) mean of the negatives."""
    high: Floats
    """(hidden,) mean of the positives."""
    weight: Floats
    """(2,) of the negatives and the positives; their number where rows have no weights."""
    within: Floats
    """(hidden, hidden) covariance around the class means; empty where nobody asked for it."""


class Moments:
    """Sums over rows of two classes."""

    def __init__(self, hidden: int, *, covariance: bool = False) -> None:
        self.n = 0
        """Rows."""
        self.weight = np.zeros(2)
        self._shift: Floats | None = None
        self._sum, self._square = np.zeros((2, hidden)), np.zeros(hidden)
        self._outer = np.zeros((hidden, hidden) if covariance else (0, 0))

    @classmethod
    def of(
        cls,
        x: Rows,
        positive: NDArray[np.bool_],
        weight: Floats | None = None,
        *,
        covariance: bool = False,
    ) -> Self:
        """Those of rows (rows, hidden) that are in memory, summed in float64."""
        made = cls(x.shape[1], covariance=covariance)
        for part in blocks(len(x), x.shape[1]):
            each = None if weight is None else weight[part]
            made.add(x[part].astype(np.float64), positive[part], each)
        return made

    def add(self, x: Rows, positive: NDArray[np.bool_], weight: Floats | None = None) -> None:
        """Take rows (rows, hidden), their classes and their weights (rows,)."""
        if not np.isfinite(x.sum()):
            raise SpecError(
                "rows: hold NaN or infinity; allowed are finite numbers; leave them out"
            )
        if self._shift is None:
            # Squares of distances from about the mean: the stream is often far from 0.
            # A number of the rows' own kind, so that what is added back is what was taken away.
            self._shift = x.mean(axis=0, dtype=np.float64).astype(x.dtype).astype(np.float64)
        z = x - self._shift.astype(x.dtype)
        each = np.ones(len(x)) if weight is None else weight
        # A product instead of rows picked by class: picking costs more than all the rest.
        sides = (np.stack([~positive, positive]) * each).astype(x.dtype)
        self.n += len(x)
        self.weight += sides.sum(axis=1, dtype=np.float64)
        self._sum += sides @ z
        weighted = z if weight is None else z * each[:, None].astype(x.dtype)
        if self._outer.size:
            self._outer += weighted.T @ z
        self._square += np.einsum("ij,ij->j", weighted, z)

    def statistics(self, scale: Floats | None = None) -> ClassStatistics:
        """Means and covariance of the rows, each dimension divided by its scale (hidden,)."""
        shift, means = self._means()
        low, high = shift + means[0], shift + means[1]
        within = np.zeros((0, 0))
        if self._outer.size:
            share = self.weight / self.weight.sum()
            within = self._outer / self.weight.sum()
            within -= (means * share[:, None]).T @ means
            within = (within + within.T) / 2.0
        if scale is not None:
            low, high = low / scale, high / scale
            within = within / np.outer(scale, scale) if within.size else within
        return ClassStatistics(low, high, self.weight, within)

    def standard(self) -> tuple[Floats, Floats]:
        """Mean and standard deviation of all rows, (hidden,) each; 1 for a constant column."""
        shift, means = self._means()
        offset = self.weight @ means / self.weight.sum()
        variance = self._square / self.weight.sum() - offset**2
        spread = np.sqrt(_above_rounding(variance, shift + offset))
        return shift + offset, np.where(spread == 0.0, 1.0, spread)

    def within_variance(self) -> Floats:
        """Variance of each dimension around the class means, (hidden,); 0 where it is constant."""
        shift, means = self._means()
        share = self.weight / self.weight.sum()
        variance = self._square / self.weight.sum() - share @ means**2
        return _above_rounding(variance, np.abs(shift + means).max(axis=0))

    def _means(self) -> tuple[Floats, Floats]:
        """What sums are about, and the class means from there, (2, hidden)."""
        if self._shift is None or not self.weight.all():
            raise SpecError(
                f"rows: {self.weight[1]:g} positive and {self.weight[0]:g} negative; allowed are "
                "both classes; check the labels"
            )
        return self._shift, self._sum / self.weight[:, None]


def _above_rounding(variance: Floats, mean: Floats) -> Floats:
    """Variances (hidden,), and 0 for one that is no more than the rounding of such a mean."""
    spread = np.sqrt(np.maximum(variance, 0.0))
    return np.where(spread <= 10 * np.finfo(np.float32).eps * np.abs(mean), 0.0, variance)


def blocks(n: int, hidden: int) -> Iterator[slice]:
    """Parts of n rows that fit into a processor's caches, about."""
    size = max(1, _NUMBERS // hidden)
    return (slice(first, first + size) for first in range(0, n, size))


class DirectionEstimator(BinaryEstimator):
    """Base of estimators with `decision = coef · (x - mean) / scale + intercept`.

    Subclasses set `coef_`, `intercept_`, `mean_` and `scale_` in `_fit`.

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

    coef_: NDArray[np.floating[Any]]
    intercept_: float
    mean_: NDArray[np.floating[Any]]
    scale_: NDArray[np.floating[Any]]

    def _decide(self, x: NDArray[np.floating[Any]]) -> NDArray[np.floating[Any]]:
        scores: NDArray[np.floating[Any]] = ((x - self.mean_) / self.scale_) @ self.coef_
        return scores + self.intercept_

    def _freeze(self, card: ProbeCard) -> Probe:
        arrays = {"weight": self.coef_, "mean": self.mean_, "scale": self.scale_}
        parts: dict[str, Any] = {name: array[None] for name, array in arrays.items()}
        return Probe(bias=np.array([self.intercept_]), **parts, card=card)


class FormulaEstimator(DirectionEstimator):
    """Base of the families that are fitted to sums over rows, and to few of the rows themselves."""

    scaling: Scaling = "none"
    """How dimensions are scaled before the direction is looked for (`find_scale`)."""
    needs_covariance = False
    """Whether the formula has the covariance in it."""

    def _fit(self, x: NDArray[np.floating[Any]], target: Targets) -> None:
        made = Moments.of(x, target.positive, target.weight, covariance=self.needs_covariance)
        self.learn(made, target, lambda picks: x[picks])

    def learn(self, moments: Moments, target: Targets, take: Take) -> None:
        """Fit to the sums over rows, wherever they are; `take` gives those at some places."""
        scale = None
        if self.scaling != "none":
            family = type(self).__name__
            scale = find_scale(moments.within_variance(), moments.n, self.scaling, family=family)
        found = moments.statistics(scale)
        by: Floats | float = 1.0 if scale is None else scale
        self._solve(found, target, lambda at: take(at).astype(np.float64) / by)
        # Take back that rows were divided before the direction was found.
        self.mean_, self.scale_ = self.mean_ * by, self.scale_ * by

    def _found(self) -> str:
        # Dividing is no part of the published methods, and `auto` decides by the data.
        if self.scaling == "none":
            return ""
        divided = not np.allclose(self.scale_, 1.0)
        return "; dimensions divided by their deviation within classes" if divided else "; unscaled"

    def _solve(self, found: ClassStatistics, target: Targets, take: Take) -> None:
        """Find the direction, of rows that are scaled already."""
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
        scaling: of dimensions: `auto` divides each by its standard deviation within the classes
            where 1% of them hold half of the variance, and warns; `standard` always does; `none`
            is the published method.

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
        if not self.iid:
            return gap
        # The pseudo-inverse times the gap: `scipy.linalg.pinvh` takes three times as long.
        values, vectors = np.linalg.eigh(found.within)
        kept = np.abs(values) > self.atol
        if gap.any() and not kept.any():  # as in the first layers of models with small embeddings
            warn_caller(
                f"atol={self.atol:g}: all variances lie below it (the largest is "
                f"{np.abs(values).max():.2g}), so the direction is zero and scores "
                "nothing; ask for a smaller atol, or for family lda, which knows no scale",
            )
        return np.asarray(vectors[:, kept] @ (gap @ vectors[:, kept] / values[kept]))


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

    @property
    def needs_covariance(self) -> bool:  # type: ignore[override]
        """Whether the formula has the covariance in it; asked before rows are read."""
        value = self.shrinkage
        named = value in ("ridge", "ledoit-wolf", None)
        if not named and (isinstance(value, str) or not 0.0 <= float(value or 0.0) <= 1.0):
            raise SpecError(
                f"shrinkage={value!r}; allowed are 'ledoit-wolf', 'ridge', a number in [0, 1] and "
                "None; correct the value"
            )
        return value != "ledoit-wolf"

    def _solve(self, found: ClassStatistics, target: Targets, take: Take) -> None:
        super()._solve(found, target, take)
        if self.shrinkage == "ledoit-wolf":
            if target.weight is not None:
                raise SpecError(
                    "sample_weight: Ledoit and Wolf's shrinkage is of rows that count alike; "
                    "allowed with weights are shrinkage='ridge', a number and None"
                )
            model = LinearDiscriminantAnalysis(solver="lsqr", shrinkage="auto")
            model.fit(take(np.arange(target.positive.size)), target.positive)
            self.coef_ = np.asarray(model.coef_[0], dtype=np.float64)
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
class LATProbe(FormulaEstimator):
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

    def _solve(self, found: ClassStatistics, target: Targets, take: Take) -> None:
        if target.weight is not None:
            raise SpecError(
                "sample_weight: LAT compares pairs of rows, which count alike; allowed with "
                "weights are families such as MeanDifferenceProbe; leave the weights out"
            )
        rng = np.random.default_rng(self.random_state)
        first, second = make_pairs(target.positive, target.groups, n_pairs=self.n_pairs, rng=rng)
        signs = rng.choice([-1.0, 1.0], size=first.size)
        wide = take(np.concatenate([first, second]))
        differences = (wide[: first.size] - wide[first.size :]) * signs[:, None]
        if len(differences) > 1 and differences.any():
            pca = PCA(n_components=1, svd_solver="full").fit(differences)
            direction = np.asarray(pca.components_[0])
            self.explained_variance_ratio_ = float(np.nan_to_num(pca.explained_variance_ratio_[0]))
        else:
            norm = float(np.linalg.norm(differences[0]))
            direction = differences[0] / (norm or 1.0)
            self.explained_variance_ratio_ = 1.0
        super()._solve(found, target, take)
        self.coef_ = direction if float(direction @ self.coef_) >= 0.0 else -direction

    def _direction(self, found: ClassStatistics, gap: Floats) -> Floats:
        return gap
