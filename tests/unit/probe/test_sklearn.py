"""Probes of scikit-learn's classifiers score as these do, and go back to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from sklearn.calibration import CalibratedClassifierCV
from sklearn.decomposition import PCA, TruncatedSVD
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.ensemble import RandomForestClassifier
from sklearn.feature_selection import SelectKBest
from sklearn.frozen import FrozenEstimator
from sklearn.linear_model import (
    LogisticRegression,
    LogisticRegressionCV,
    RidgeClassifier,
    SGDClassifier,
)
from sklearn.model_selection import GridSearchCV, RandomizedSearchCV
from sklearn.neighbors import KNeighborsClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import (
    MaxAbsScaler,
    MinMaxScaler,
    PolynomialFeatures,
    RobustScaler,
    StandardScaler,
)
from sklearn.svm import SVC, LinearSVC

from inspect_lens.errors import SpecError
from inspect_lens.probe import Probe, ProbeCard, load_probe

H = 12
CARD = ProbeCard(name="mine/sklearn", layers=(7,), hidden=H)


def rows(n: int = 300, *, far: float = 200.0) -> tuple[np.ndarray, np.ndarray]:
    """Rows far from 0, as residual streams are, with one huge column."""
    rng = np.random.default_rng(0)
    y = rng.integers(0, 2, n)
    x = rng.normal(size=(n, H)) + far + np.outer(y, rng.normal(size=H))
    x[:, 3] *= 40.0
    return x, y


def lr(**settings: Any) -> LogisticRegression:
    return LogisticRegression(max_iter=300, **settings)


LINEAR: dict[str, Callable[[], Any]] = {
    "plain": lambda: lr(tol=1.0),
    "scaled": lambda: make_pipeline(StandardScaler(), lr()),
    "no mean": lambda: make_pipeline(StandardScaler(with_mean=False), lr()),
    "no std": lambda: make_pipeline(StandardScaler(with_std=False), lr()),
    "no intercept": lambda: make_pipeline(StandardScaler(), lr(fit_intercept=False)),
    "robust": lambda: make_pipeline(RobustScaler(), lr(C=0.01)),
    "min-max": lambda: make_pipeline(MinMaxScaler(), lr()),
    "max-abs": lambda: make_pipeline(MaxAbsScaler(), lr()),
    "passthrough": lambda: make_pipeline("passthrough", StandardScaler(), lr()),
    "two scalers": lambda: make_pipeline(RobustScaler(), StandardScaler(), lr()),
    "pca": lambda: make_pipeline(StandardScaler(), PCA(5, whiten=True), lr()),
    "svd": lambda: make_pipeline(StandardScaler(), TruncatedSVD(4), lr()),
    "best columns": lambda: make_pipeline(StandardScaler(), SelectKBest(k=4), lr()),
    "nested": lambda: make_pipeline(make_pipeline(StandardScaler(), lr())),
    "lda": lambda: LinearDiscriminantAnalysis(),
    "lda shrunk": lambda: make_pipeline(
        StandardScaler(), LinearDiscriminantAnalysis(solver="lsqr", shrinkage="auto")
    ),
    "ridge": lambda: make_pipeline(StandardScaler(), RidgeClassifier()),
    "sgd": lambda: make_pipeline(StandardScaler(), SGDClassifier(random_state=0)),
    "svc": lambda: make_pipeline(StandardScaler(), LinearSVC()),
    "kernel": lambda: make_pipeline(StandardScaler(), SVC(kernel="linear")),
    "lr cv": lambda: make_pipeline(
        StandardScaler(),
        LogisticRegressionCV(
            l1_ratios=(0,), use_legacy_attributes=False, scoring="neg_log_loss", max_iter=300
        ),
    ),
    "grid": lambda: GridSearchCV(
        make_pipeline(StandardScaler(), lr()), {"logisticregression__C": [1e-3, 1.0]}
    ),
    "random": lambda: RandomizedSearchCV(
        make_pipeline(StandardScaler(), lr()), {"logisticregression__C": [1e-3, 1.0]}, n_iter=2
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LINEAR)
def test_scores_are_those_of_the_estimator_and_back_again(name: str) -> None:
    x, y = rows(100)
    fitted = LINEAR[name]().fit(x, y)
    probe = Probe.from_sklearn(fitted, card=CARD)
    expected = fitted.decision_function(x)
    np.testing.assert_allclose(
        probe.score_tokens(x), expected, rtol=2e-4, atol=2e-4 * np.abs(expected).max()
    )
    assert probe.card.source == "scikit-learn"
    assert probe.card.method
    back = probe.to_sklearn()
    np.testing.assert_allclose(back.decision_function(x), probe.score_tokens(x), rtol=1e-9)
    assert (back.predict(x) == (probe.score_tokens(x) > 0)).all()
    assert back.predict_proba(x).shape == (len(x), 2)
    again = Probe.from_sklearn(back, card=probe.card)
    assert again.sha256 == probe.sha256


def test_the_scaler_of_a_pipeline_stays_to_be_read() -> None:
    x, y = rows()
    fitted = make_pipeline(StandardScaler(), lr()).fit(x, y)
    probe = Probe.from_sklearn(fitted, card=CARD)
    np.testing.assert_allclose(probe.mean[0], fitted[0].mean_, rtol=1e-6)
    np.testing.assert_allclose(probe.scale[0], fitted[0].scale_, rtol=1e-6)
    np.testing.assert_allclose(probe.weight[0], fitted[1].coef_[0], rtol=1e-6)


@pytest.mark.parametrize("method", ["sigmoid", "isotonic", "temperature"])
def test_the_calibration_goes_to_the_card(method: Any, tmp_path: Any) -> None:
    x, y = rows()
    x[:, 3] = 0.0
    base = make_pipeline(StandardScaler(), lr(C=1e-3))
    fitted = CalibratedClassifierCV(base, method=method, ensemble=False).fit(x, y)
    probe = load_probe(Probe.from_sklearn(fitted, card=CARD).save(tmp_path / "p"))
    assert probe.card.calibration is not None
    made = [probe.card.calibration.probability(s) for s in probe.score_tokens(x)]
    np.testing.assert_allclose(made, fitted.predict_proba(x)[:, 1], atol=1e-4)


def test_a_frozen_classifier_is_calibrated_too() -> None:
    x, y = rows()
    base = make_pipeline(StandardScaler(), lr()).fit(x, y)
    fitted = CalibratedClassifierCV(FrozenEstimator(base), ensemble=False).fit(x, y)
    probe = Probe.from_sklearn(fitted, card=CARD)
    np.testing.assert_allclose(
        probe.score_tokens(x), base.decision_function(x), rtol=1e-4, atol=1e-3
    )


@pytest.mark.parametrize("method", ["sigmoid", "temperature"])
def test_an_average_of_classifiers_is_said_to_be_none(method: Any) -> None:
    x, y = rows(far=0.0)
    base = make_pipeline(StandardScaler(), lr(C=1e-3))
    fitted = CalibratedClassifierCV(base, method=method, ensemble=True).fit(x, y)
    with pytest.raises(SpecError, match="ensemble=False"):
        Probe.from_sklearn(fitted, card=CARD)
    probe = Probe.from_sklearn(fitted, card=CARD, average_folds=True)
    assert probe.card.calibration is not None
    made = np.array([probe.card.calibration.probability(s) for s in probe.score_tokens(x)])
    np.testing.assert_allclose(made, fitted.predict_proba(x)[:, 1], atol=0.02)
    assert "averaged" in probe.card.method


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "forest": (lambda: RandomForestClassifier(3), "not linear"),
    "kernel": (lambda: SVC(kernel="rbf"), "not linear"),
    "neighbours": (lambda: KNeighborsClassifier(), "not linear"),
    "squares": (
        lambda: make_pipeline(PolynomialFeatures(), lr(tol=1.0)), "is no linear transformer",
    ),
    "clipped": (lambda: make_pipeline(MinMaxScaler(clip=True), lr()), "a clip"),
    "calibrated forest": (
        lambda: CalibratedClassifierCV(RandomForestClassifier(3), ensemble=False), "not linear",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_linear_is_refused(name: str) -> None:
    make, match = REFUSED[name]
    x, y = rows(far=0.0)
    with pytest.raises(SpecError, match=match):
        Probe.from_sklearn(make().fit(x, y), card=CARD)


def test_wrong_fits_and_cards_are_refused() -> None:
    x, y = rows()
    with pytest.raises(SpecError, match="is not fitted"):
        Probe.from_sklearn(lr(), card=CARD)
    with pytest.raises(SpecError, match="3 classes"):
        Probe.from_sklearn(lr().fit(x, np.arange(len(x)) % 3), card=CARD)
    narrow = CARD.model_copy(update={"hidden": H + 1})
    with pytest.raises(SpecError, match="allowed is one layer of width 12"):
        Probe.from_sklearn(lr().fit(x, y), card=narrow)
    two = ProbeCard(name="mine/two", layers=(1, 2), hidden=2)
    probe = Probe.from_direction(np.eye(2), card=two)
    with pytest.raises(SpecError, match="name it"):
        probe.to_sklearn()
    assert probe.to_sklearn(2).decision_function([[3.0, 5.0]]).tolist() == [5.0]
