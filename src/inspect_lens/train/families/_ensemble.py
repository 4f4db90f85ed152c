"""Several layers in one probe: calibrated logits, averaged or stacked."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import minimize
from scipy.special import expit
from sklearn.base import clone
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import StratifiedGroupKFold, StratifiedKFold

from inspect_lens.errors import SpecError
from inspect_lens.probe import Probe, ProbeCard
from inspect_lens.spec import check_word

from ._binary import BinaryEstimator, Targets
from ._direction import DirectionEstimator
from ._logistic import LogisticProbe

__all__ = ["EnsembleProbe", "StackWeights", "stack_weights"]

Floats = NDArray[np.float64]
_DEPTHS: Final = (0.2, 0.35, 0.5, 0.65, 0.8)


def layers_at(n_layers: int) -> tuple[int, ...]:
    """Layers (0-based, ascending) at 20, 35, 50, 65 and 80% of the depth of a model."""
    return tuple(sorted({min(int(n_layers * d), n_layers - 1) for d in _DEPTHS}))


def fit_platt(
    scores: ArrayLike, positive: ArrayLike, weight: ArrayLike | None = None
) -> tuple[float, float]:
    """Slope and intercept of Platt's sigmoid."""
    s, y = np.asarray(scores, dtype=np.float64), np.asarray(positive, dtype=bool)
    each = np.ones(s.size) if weight is None else np.asarray(weight, dtype=np.float64)
    n, m = float(each[y].sum()), float(each[~y].sum())
    target = np.where(y, (n + 1.0) / (n + 2.0), 1.0 / (m + 2.0))
    centre, spread = float(s.mean()), float(s.std()) or 1.0
    z = (s - centre) / spread

    def loss(p: Floats) -> tuple[float, Floats]:
        f = p[0] * z + p[1]
        gap = each * (expit(f) - target)
        value = float((each * (np.logaddexp(0.0, f) - target * f)).sum())
        return value, np.array([gap @ z, gap.sum()])

    start = np.array([0.0, math.log((n + 1.0) / (m + 1.0))])
    a, b = minimize(loss, start, jac=True, method="BFGS", options={"gtol": 1e-9}).x
    return float(a / spread), float(b - a * centre / spread)


class StackWeights(NamedTuple):
    """What `inspect_lens.scorer.probe_ensemble(combine="stacked")` takes."""

    weights: tuple[float, ...]
    """One per probe."""
    bias: float


def stack_weights(logits: ArrayLike, labels: ArrayLike, *, penalty: float = 1.0) -> StackWeights:
    """Fit how much the calibrated log odds of several probes count in their ensemble.

    Args:
        logits: (samples, probes) float; log odds that the calibrations of the cards give, on
            samples that none of the probes was trained or calibrated on.
        labels: (samples,) 0 and 1, both.
        penalty: of the squared weights.

    Raises:
        SpecError: shapes disagree, or a class is missing.

    Source:
        arXiv:2604.13386.

    Example:
        ```python
        import numpy as np

        from inspect_lens.train import stack_weights

        rng = np.random.default_rng(0)
        labels = np.arange(200) % 2
        good = rng.standard_normal(200) + 2 * labels
        logits = np.column_stack([good, rng.standard_normal(200)])  # (samples, probes)
        found = stack_weights(logits, labels)
        assert found.weights[0] > abs(found.weights[1])
        ```
    """
    x, y = np.asarray(logits, dtype=np.float64), np.asarray(labels)
    if x.ndim != 2 or y.shape != x.shape[:1] or np.unique(y).size != 2:
        raise SpecError(
            f"logits and labels: shapes {x.shape} and {y.shape}, {np.unique(y).size} classes; "
            "allowed is (samples, probes) with one label per sample and both classes"
        )
    model = LogisticRegression(C=1.0 / penalty, max_iter=1000).fit(x, y)
    return StackWeights(tuple(np.asarray(model.coef_[0]).tolist()), float(model.intercept_[0]))


@dataclass(kw_only=True, eq=False, repr=False)
class EnsembleProbe(BinaryEstimator):
    """One direction per layer; their calibrated logits are averaged or stacked.

    Each layer's scores are turned into logits by Platt's method on folds that the direction was not
    fitted on. The result is one linear probe with several layers.

    Args:
        base: unfitted estimator of a direction; `LogisticProbe()` by default.
        n_layers: layers in a row of `X`, one after the other.
        stack: `mean` of the logits, or `lr`, a logistic regression on them.
        folds: of the calibration; whole groups, when groups are given.
        random_state: of the folds.

    Attributes:
        estimators_: one fitted direction per layer.
        slope_: (layers,) of the logits, weight in the ensemble included.
        intercept_: a number.

    Source:
        arXiv:2604.13386: five layers at 20, 35, 50, 65 and 80% of the depth.

    Example:
        ```python
        from inspect_lens.probe import ProbeCard
        from inspect_lens.train import ActivationSet, EnsembleProbe, LDAProbe, select_layer

        train, selection = (
            ActivationSet.load(f"acts/{name}.safetensors") for name in ("train", "selection")
        )
        card = ProbeCard(name="mine/ensemble", layers=(0,), hidden=32)
        choice = select_layer(
            EnsembleProbe(base=LDAProbe()), train, selection, card=card, layers=[0, 1, 2]
        )
        assert choice.probe.layers == (0, 1, 2)  # one probe that reads all of them
        ```
    """

    method = "ensemble over layers of calibrated logits"
    source = "arXiv:2604.13386"

    estimators_: list[DirectionEstimator] = field(init=False)
    slope_: NDArray[np.float64] = field(init=False)
    intercept_: float = field(init=False)

    base: DirectionEstimator | None = None
    n_layers: int = 1
    stack: Literal["mean", "lr"] = "mean"
    folds: int = 5
    random_state: int = 0

    def _fit(self, x: NDArray[np.floating[Any]], target: Targets) -> None:
        check_word("stack", self.stack, ("mean", "lr"))
        base = LogisticProbe() if self.base is None else self.base
        parts, folds = self._blocks(x), self._folds(target)
        outside = np.stack([_outside(base, b, target, folds) for b in parts], axis=1)
        self._combine(outside, target)
        self.estimators_ = [clone(base).fit(b, *target) for b in parts]

    def _combine(self, outside: NDArray[np.float64], target: Targets) -> None:
        """Set what makes one logit of scores (rows, layers) by directions that saw no such row."""
        platt = np.array([fit_platt(s, target.positive, target.weight) for s in outside.T])
        slopes, offsets = platt.T
        if self.stack == "lr":
            logits = outside * slopes + offsets
            model = LogisticRegression(C=1.0)
            model.fit(logits, target.positive, sample_weight=target.weight)
            weights, extra = np.asarray(model.coef_[0]), float(model.intercept_[0])
        else:
            weights, extra = np.full(self.n_layers, 1.0 / self.n_layers), 0.0
        self.slope_ = weights * slopes
        self.intercept_ = float(weights @ offsets) + extra

    def _decide(self, x: NDArray[np.floating[Any]]) -> NDArray[np.float64]:
        scores = np.stack(
            [e.decision_function(b) for e, b in zip(self.estimators_, self._blocks(x), strict=True)]
        )
        combined: NDArray[np.float64] = self.slope_ @ scores.astype(np.float64)
        return combined + self.intercept_

    def _freeze(self, card: ProbeCard) -> Probe:
        n, parts = self.n_layers, self.estimators_
        # A probe averages over its layers, so each part is multiplied by their number.
        factor = n * self.slope_
        bias = factor * np.array([float(e.intercept_) for e in parts]) + self.intercept_
        return Probe(
            weight=np.stack([f * e.coef_ for f, e in zip(factor, parts, strict=True)]),
            bias=bias,
            mean=np.stack([e.mean_ for e in parts]),
            scale=np.stack([e.scale_ for e in parts]),
            card=card,
        )

    def _blocks(self, x: NDArray[np.floating[Any]]) -> list[NDArray[np.floating[Any]]]:
        if x.shape[1] % self.n_layers:
            raise SpecError(
                f"X: {x.shape[1]} columns for n_layers={self.n_layers}; allowed is a multiple; "
                "put the layers of a row one after the other"
            )
        return np.split(x, self.n_layers, axis=1)

    def _folds(self, target: Targets) -> list[tuple[NDArray[np.int64], NDArray[np.int64]]]:
        """Rows to fit on, of both classes, and to score; none where a class is too rare."""
        positive, names, _ = target
        rare = int(min(positive.sum(), (~positive).sum()))
        limits = [self.folds, rare, *([] if names is None else [len(np.unique(names))])]
        if min(limits) < 2:
            return []
        kind = StratifiedKFold if names is None else StratifiedGroupKFold
        splitter = kind(min(limits), shuffle=True, random_state=self.random_state)
        made = list(splitter.split(positive, positive, names))
        return [(a, b) for a, b in made if 0 < positive[a].sum() < len(a)]


def _outside(
    base: DirectionEstimator,
    x: NDArray[np.floating[Any]],
    target: Targets,
    folds: list[tuple[NDArray[np.int64], NDArray[np.int64]]],
) -> NDArray[np.float64]:
    """Scores (rows,) by directions that did not see the row."""
    # Rows whose fold would leave one class to fit on are scored by a fit on all rows.
    scores = np.full(len(x), np.nan)
    for fit, held in folds:
        scores[held] = clone(base).fit(x[fit], *target.part(fit)).decision_function(x[held])
    left = np.isnan(scores)
    if left.any():
        scores[left] = clone(base).fit(x, *target).decision_function(x[left])
    return scores
