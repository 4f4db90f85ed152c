from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from inspect_lens.errors import SpecError
from inspect_lens.probe import ProbeCard, delong_interval
from inspect_lens.train import (
    DirectionEstimator,
    EnsembleProbe,
    LATProbe,
    LDAProbe,
    LogisticProbe,
    MassMeanProbe,
    MeanDifferenceProbe,
    PressureLogisticProbe,
    SAEFeatureProbe,
    SklearnProbe,
    TorchLogisticProbe,
    make_estimator,
)

H = 24
ESTIMATORS = [
    LogisticProbe(),
    LogisticProbe(fit_intercept=True),
    LogisticProbe(standardize=False),
    MeanDifferenceProbe(),
    MeanDifferenceProbe(normalize=True),
]
by_estimator = pytest.mark.parametrize("estimator", ESTIMATORS, ids=str)


def planted(
    n: int, dprime: float, *, seed: int = 0, offset: float = 5.0
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Two isotropic Gaussians `dprime` apart along a known unit direction."""
    rng = np.random.default_rng(seed)
    direction = np.random.default_rng(99).normal(size=H)
    direction /= np.linalg.norm(direction)
    y = np.repeat([0, 1], n)
    x = rng.normal(size=(2 * n, H)) + offset + np.outer(y, dprime * direction)
    return x.astype(np.float32), y, direction


def card(layer: int = 3, hidden: int = H) -> ProbeCard:
    return ProbeCard(name="t/p", layers=(layer,), hidden=hidden)


@by_estimator
def test_it_recovers_the_planted_direction(estimator: DirectionEstimator) -> None:
    x, y, direction = planted(4000, 2.0)
    probe = clone(estimator).fit(x, y).to_probe(card())
    assert float(probe.direction()[0] @ direction) >= 0.95


@by_estimator
def test_its_auroc_is_the_planted_one_within_the_interval(estimator: DirectionEstimator) -> None:
    x, y, _ = planted(4000, 1.5)
    probe = clone(estimator).fit(x, y).to_probe(card())
    fresh, labels, _ = planted(1500, 1.5, seed=1)
    interval = delong_interval(labels, probe.score_tokens(fresh), confidence=0.999)
    assert interval.low <= 0.5 * (1 + math.erf(1.5 / 2)) <= interval.high


@by_estimator
def test_the_probe_scores_as_the_estimator_does(estimator: DirectionEstimator) -> None:
    x, y, _ = planted(200, 1.0)
    fitted = clone(estimator).fit(x, y)
    np.testing.assert_allclose(
        fitted.to_probe(card()).score_tokens(x), fitted.decision_function(x), atol=1e-4
    )


@by_estimator
def test_fitting_twice_is_fitting_once(estimator: DirectionEstimator) -> None:
    x, y, _ = planted(100, 1.0)
    once = clone(estimator).fit(x, y).decision_function(x)
    other, labels, _ = planted(50, 3.0, seed=5)
    twice = clone(estimator).fit(other, labels).fit(x, y)
    np.testing.assert_array_equal(twice.decision_function(x), once)


@by_estimator
def test_the_order_of_rows_does_not_matter(estimator: DirectionEstimator) -> None:
    x, y, _ = planted(150, 1.0)
    order = np.random.default_rng(0).permutation(len(y))
    one = clone(estimator).fit(x, y).to_probe(card()).direction()[0]
    two = clone(estimator).fit(x[order], y[order]).to_probe(card()).direction()[0]
    assert float(one @ two) > 0.9999


@by_estimator
def test_groups_are_accepted(estimator: DirectionEstimator) -> None:
    x, y, _ = planted(50, 1.0)
    clone(estimator).fit(x, y, groups=np.arange(100) % 10)


@by_estimator
def test_one_class_nan_and_an_unfitted_estimator_are_refused(
    estimator: DirectionEstimator,
) -> None:
    x, y, _ = planted(20, 1.0)
    with pytest.raises(ValueError, match="exactly two classes"):
        clone(estimator).fit(x, np.zeros(40))
    with pytest.raises(ValueError, match="exactly two classes"):
        clone(estimator).fit(x, np.arange(40) % 3)
    with pytest.raises(ValueError, match="NaN"):
        clone(estimator).fit(np.where(x == x[0, 0], np.nan, x), y)
    with pytest.raises(NotFittedError):
        clone(estimator).to_probe(card())


def test_the_card_has_to_fit() -> None:
    x, y, _ = planted(20, 1.0)
    fitted = MeanDifferenceProbe().fit(x, y)
    with pytest.raises(SpecError, match="one layer of width 24"):
        fitted.to_probe(card(hidden=H + 1))
    with pytest.raises(SpecError, match="one layer"):
        fitted.to_probe(ProbeCard(name="t/p", layers=(1, 2), hidden=H))
    assert "normalize=False" in fitted.to_probe(card()).card.method
    assert fitted.to_probe(card()).card.source == "arXiv:2310.06824"


def test_logistic_probe_is_apollos_recipe() -> None:
    x, y, _ = planted(300, 1.0)
    recipe = make_pipeline(
        StandardScaler(), LogisticRegression(C=0.1, fit_intercept=False, max_iter=1000)
    ).fit(x.astype(np.float64), y)
    ours = LogisticProbe().fit(x.astype(np.float64), y)
    np.testing.assert_allclose(
        ours.decision_function(x), recipe.decision_function(x), rtol=1e-4, atol=1e-4
    )


def test_mean_difference_is_zero_at_the_midpoint() -> None:
    x, y, _ = planted(300, 2.0, offset=500.0)
    fitted = MeanDifferenceProbe().fit(x, y)
    high, low = x[y == 1].mean(0, dtype=np.float64), x[y == 0].mean(0, dtype=np.float64)
    np.testing.assert_allclose(fitted.coef_, high - low)
    assert fitted.decision_function([(high + low) / 2])[0] == pytest.approx(0.0, abs=1e-6)
    gap = fitted.decision_function([high])[0] - fitted.decision_function([low])[0]
    assert gap == pytest.approx(float(np.sum((high - low) ** 2)))


def test_normalised_mean_difference_has_the_same_ranking() -> None:
    x, y, _ = planted(100, 1.0)
    a, b = MeanDifferenceProbe().fit(x, y), MeanDifferenceProbe(normalize=True).fit(x, y)
    assert np.linalg.norm(b.coef_) == pytest.approx(1.0)
    assert roc_auc_score(y, a.decision_function(x)) == roc_auc_score(y, b.decision_function(x))


WEIGHTED: list[Any] = [
    *ESTIMATORS, MassMeanProbe(iid=True), LDAProbe(shrinkage="ridge"),
    LDAProbe(shrinkage=None, equal_priors=False), PressureLogisticProbe(),
    TorchLogisticProbe(epochs=20), SAEFeatureProbe(k=4), SAEFeatureProbe(raw=True),
    make_estimator("attention", optimizer="lbfgs", lr=1.0, steps=2, heads=2),
    EnsembleProbe(base=MeanDifferenceProbe(), folds=2, stack="lr"),
    SklearnProbe(LogisticRegression(tol=1e-9)),
]  # fmt: skip


@pytest.mark.parametrize("estimator", WEIGHTED, ids=str)
def test_a_weight_of_two_is_a_row_twice_and_of_none_no_row(estimator: Any) -> None:
    # Few rows: heads hold none back, and an ensemble is calibrated on what it was fitted on.
    x, y, _ = planted(15, 1.0)
    counts = np.random.default_rng(0).integers(0, 3, len(y))
    if isinstance(estimator, EnsembleProbe):
        estimator = clone(estimator).set_params(folds=1)
    ours = clone(estimator).fit(x, y, sample_weight=counts.astype(float))
    again = clone(estimator).fit(np.repeat(x, counts, axis=0), np.repeat(y, counts))
    plain = clone(estimator).fit(x, y)
    a, b, c = (e.decision_function(x) for e in (ours, again, plain))
    np.testing.assert_allclose(a, b, atol=2e-2 * np.abs(b).max())
    assert np.abs(a - b).max() < 0.3 * np.abs(b - c).max()


def test_weights_without_a_meaning_are_refused() -> None:
    x, y, _ = planted(20, 1.0)
    for estimator in (LATProbe(), LDAProbe(), EnsembleProbe(base=LATProbe(), folds=2)):
        with pytest.raises(SpecError, match=r"sample_weight: .* allowed with weights are"):
            estimator.fit(x, y, sample_weight=np.ones(40))
    wrong = (np.ones(39), -np.ones(40), np.full(40, np.nan), np.zeros(40), np.ones((40, 2)))
    for weight in wrong:
        with pytest.raises(SpecError, match="sample_weight: "):
            MeanDifferenceProbe().fit(x, y, sample_weight=weight)
