"""Logistic regression with the settings of three sources, and classifiers of scikit-learn."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, clone
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import StratifiedGroupKFold
from sklearn.preprocessing import StandardScaler
from torch.nn import functional

from inspect_lens.errors import SpecError
from inspect_lens.probe import Probe, ProbeCard

from ._binary import BinaryEstimator, Targets
from ._direction import DirectionEstimator

__all__ = ["LogisticProbe", "SklearnProbe", "TorchLogisticProbe"]


@dataclass(kw_only=True, eq=False, repr=False)
class LogisticProbe(DirectionEstimator):
    """L2-regularised logistic regression on standardised rows, in the source one per token.

    Args:
        C: inverse of the L2 penalty; 0.1 is Apollo's lambda = 10.
        standardize: subtract the mean and divide by the standard deviation of the training rows.
        fit_intercept: off in the source; the centre is that of the scaler then.
        max_iter: of LBFGS.

    Source:
        arXiv:2502.03407; scikit-learn does the arithmetic.

    Example:
        ```python
        from inspect_lens.train import ActivationSet, LogisticProbe

        x, labels, groups = ActivationSet.load("acts/train.safetensors").rows(1)  # at layer 1
        assert LogisticProbe().fit(x, labels, groups).score(x, labels) > 0.6
        ```
    """

    method = "logistic regression"
    source = "arXiv:2502.03407"

    C: float = 0.1
    standardize: bool = True
    fit_intercept: bool = False
    max_iter: int = 1000

    def _fit(self, x: NDArray[np.floating[Any]], target: Targets) -> None:
        positive, _, weight = target
        if self.standardize:
            scaler = StandardScaler().fit(x, sample_weight=weight)
            self.mean_, self.scale_ = np.asarray(scaler.mean_), np.asarray(scaler.scale_)
        else:
            self.mean_, self.scale_ = np.zeros(x.shape[1]), np.ones(x.shape[1])
        model = LogisticRegression(
            C=self.C, fit_intercept=self.fit_intercept, max_iter=self.max_iter
        ).fit((x - self.mean_) / self.scale_, positive, sample_weight=weight)
        self.coef_ = np.asarray(model.coef_[0])
        self.intercept_ = float(model.intercept_[0]) if self.fit_intercept else 0.0
        self.n_iter_ = int(model.n_iter_[0])


@dataclass(kw_only=True, eq=False, repr=False)
class PressureLogisticProbe(LogisticProbe):
    """`lr-pressure`: on the mean of a sample, as for high-stakes conversations."""

    source = "arXiv:2506.10805"
    default_rows = "mean"

    C: float = 1e-3
    max_iter: int = 10_000


_FOLDS: Final = 5
_METHOD: Final = 400


@dataclass(kw_only=True, eq=False, repr=False)
class SklearnProbe(BinaryEstimator):
    """A classifier of scikit-learn, fitted on each layer in turn and frozen into a `Probe`.

    `train_probe` makes one by itself of a classifier that it is given. Folds of a search
    (`GridSearchCV`) and of `CalibratedClassifierCV` become folds of whole groups if not listed.

    Args:
        estimator: unfitted; its score has to be linear in the end, see `Probe.from_sklearn`.
            `class_weight` and other settings are its own.
        sample_weight: column of the training set with the weight of each sample, which all its
            tokens get; empty for none.
        average_folds: as in `Probe.from_sklearn`.

    Attributes:
        estimator_: the fitted classifier.

    Example:
        ```python
        from sklearn.linear_model import LogisticRegression
        from sklearn.pipeline import make_pipeline
        from sklearn.preprocessing import RobustScaler

        from inspect_lens.probe import ProbeCard
        from inspect_lens.train import ActivationSet, SklearnProbe, fit_on

        pipeline = make_pipeline(RobustScaler(), LogisticRegression(class_weight="balanced"))
        train = ActivationSet.load("acts/train.safetensors")
        fitted = fit_on(SklearnProbe(pipeline), train, 1)
        probe = fitted.to_probe(ProbeCard(name="mine/robust", layers=(1,), hidden=32))
        assert train.scores(probe).shape == (len(train),)
        ```
    """

    method = "scikit-learn"
    source = "scikit-learn"

    estimator_: Any = field(init=False)
    estimator: Any = field(default=None, kw_only=False)
    sample_weight: str = ""
    average_folds: bool = False

    def _fit(self, x: NDArray[np.floating[Any]], target: Targets) -> None:
        # As they were given, since `class_weight` may name them.
        made, labels = clone(self.estimator), self.classes_[target.positive.astype(int)]
        _keep_groups(made, x, target)
        # The last step of a pipeline takes weights, which a search hands on.
        inner = getattr(made, "estimator", None) if hasattr(made, "cv") else made
        steps = getattr(inner, "steps", None)
        name = f"{steps[-1][0]}__sample_weight" if steps else "sample_weight"
        weights = {} if target.weight is None else {name: target.weight}
        try:
            self.estimator_ = made.fit(x, labels, **weights)
        except TypeError as error:
            if not weights:
                raise
            raise SpecError(
                f"sample_weight={self.sample_weight!r}: {type(made).__name__} takes none "
                f"({error}); allowed are classifiers whose fit has sample_weight; leave it out"
            ) from None

    def _decide(self, x: NDArray[np.floating[Any]]) -> NDArray[np.floating[Any]]:
        card = ProbeCard(name="any/any", layers=(0,), hidden=self.n_features_in_)
        return self.to_probe(card).score_tokens(x)

    def describe(self) -> str:
        """The classifier as it was given, and what a search found; for the card."""
        best = getattr(getattr(self, "estimator_", None), "best_params_", None)
        text = " ".join(repr(self.estimator).split())[:_METHOD]
        return f"{self.method}: {text}{f', best {best}' if best else ''}"

    def _freeze(self, card: ProbeCard) -> Probe:
        # The card of a sweep is reused from layer to layer: what it says of another fit goes.
        bare = card.model_copy(update={"calibration": None})
        return Probe.from_sklearn(self.estimator_, card=bare, average_folds=self.average_folds)


def as_family(estimator: Any) -> BinaryEstimator:
    """Make a trainable family of an estimator; scikit-learn classifiers are wrapped."""
    if isinstance(estimator, BinaryEstimator):
        return estimator
    if hasattr(estimator, "to_probe"):
        raise SpecError(
            f"estimator={type(estimator).__name__}: has to_probe, and is no BinaryEstimator; "
            "derive it from that class, whose fit calls its _fit"
        )
    if isinstance(estimator, BaseEstimator) and hasattr(estimator, "fit"):
        return SklearnProbe(estimator)
    raise SpecError(
        f"estimator={type(estimator).__name__}: is no family, and no estimator of scikit-learn; "
        "allowed are families such as LogisticProbe(), and unfitted classifiers of scikit-learn"
    )


def _keep_groups(made: Any, x: NDArray[Any], target: Targets) -> None:
    """Replace folds by number with folds of whole groups."""
    folds = () if target.groups is None else getattr(made, "cv", ())
    if folds is not None and (not isinstance(folds, int) or isinstance(folds, bool)):
        return
    n, labels, kept = _FOLDS if folds is None else folds, target.positive, target.groups
    assert kept is not None
    smallest = min(np.unique(kept[labels == c]).size for c in (False, True))
    if smallest < n:
        raise SpecError(
            f"cv={n}: a class has {smallest} groups only; allowed are as many folds as groups; "
            "choose fewer folds"
        )
    splits = StratifiedGroupKFold(n, shuffle=True, random_state=0).split(x, labels, kept)
    made.set_params(cv=list(splits))


@dataclass(kw_only=True, eq=False, repr=False)
class TorchLogisticProbe(DirectionEstimator):
    """sigmoid(w · x) without intercept, binary cross-entropy, AdamW over all rows at once.

    Args:
        lr: learning rate.
        weight_decay: of AdamW.
        epochs: steps.
        center: subtract the mean of the training rows; the source centres its data sets.
        device: where torch computes, such as `cpu` or `cuda`.
        random_state: of the initial weights.

    Source:
        Code of arXiv:2310.06824: lr 1e-3, weight decay 0.1, 1000 epochs, no bias.

    Example:
        ```python
        from inspect_lens.train import ActivationSet, TorchLogisticProbe

        x, labels, groups = ActivationSet.load("acts/train.safetensors").rows(1)  # at layer 1
        assert TorchLogisticProbe(epochs=200).fit(x, labels, groups).score(x, labels) > 0.6
        ```
    """

    method = "logistic regression by AdamW"
    source = "arXiv:2310.06824"

    lr: float = 1e-3
    weight_decay: float = 0.1
    epochs: int = 1000
    center: bool = True
    device: str = "cpu"
    random_state: int = 0

    def _fit(self, x: NDArray[np.floating[Any]], target: Targets) -> None:
        positive, _, weight = target
        wide = np.asarray(x, dtype=np.float64)
        each = np.ones(len(wide)) if weight is None else weight / weight.mean()
        mean = np.average(wide, axis=0, weights=each) if self.center else np.zeros(wide.shape[1])
        rows, counted, labels = (
            torch.from_numpy(part).to(self.device)
            for part in (wide - mean, each, positive.astype(np.float64))
        )
        bound = 1.0 / np.sqrt(wide.shape[1])
        start = np.random.default_rng(self.random_state).uniform(-bound, bound, wide.shape[1])
        direction = torch.from_numpy(start).to(self.device).requires_grad_()
        optimiser = torch.optim.AdamW([direction], lr=self.lr, weight_decay=self.weight_decay)
        for _ in range(self.epochs):
            optimiser.zero_grad()
            loss = functional.binary_cross_entropy_with_logits(rows @ direction, labels, counted)
            loss.backward()  # type: ignore[no-untyped-call]
            optimiser.step()
        self.coef_ = direction.detach().cpu().numpy()
        self.mean_, self.scale_ = mean, np.ones_like(mean)
        self.intercept_, self.loss_ = 0.0, float(loss.detach())
