from __future__ import annotations

import numpy as np
import pytest
from scipy.special import expit
from sklearn.calibration import CalibratedClassifierCV
from sklearn.frozen import FrozenEstimator
from sklearn.isotonic import IsotonicRegression
from sklearn.linear_model import LogisticRegression

from inspect_lens.errors import SpecError
from inspect_lens.probe import Calibration, expected_calibration_error
from inspect_lens.train import calibrate


def applied(made: Calibration, scores) -> np.ndarray:
    return np.array([made.probability(score) for score in scores])


def scored(n: int, *, slope: float = 0.4, shift: float = 0.0, seed: int = 0):
    rng = np.random.default_rng(seed)
    s = rng.normal(size=n) * 4
    return s, (rng.random(n) < expit(slope * s + shift)).astype(int)


def test_platt_equals_scikit_learn() -> None:
    s, y = scored(800, shift=-0.7)
    inner = FrozenEstimator(LogisticRegression().fit([[0.0], [1.0]], [0, 1]))
    # A frozen model whose decision is the score itself.
    inner.estimator.coef_, inner.estimator.intercept_ = np.array([[1.0]]), np.array([0.0])
    reference = CalibratedClassifierCV(inner, method="sigmoid", cv=2, ensemble=False)
    expected = reference.fit(s[:, None], y).predict_proba(s[:, None])[:, 1]
    np.testing.assert_allclose(applied(calibrate(s, y), s), expected, atol=1e-4)


def test_platt_and_temperature_recover_what_was_planted() -> None:
    s, y = scored(40_000, shift=-0.7)
    platt = calibrate(s, y)
    assert (platt.slope, platt.intercept) == pytest.approx((0.4, -0.7), abs=0.03)
    s, y = scored(40_000)
    slope = calibrate(s, y, method="temperature").slope
    assert slope is not None
    assert 1 / slope == pytest.approx(2.5, abs=0.1)
    fresh, labels = scored(20_000, seed=9)
    for method in ("platt", "temperature", "isotonic"):
        error = expected_calibration_error(labels, applied(calibrate(s, y, method=method), fresh))
        assert error < 0.02 < expected_calibration_error(labels, expit(fresh))


@pytest.mark.parametrize("method", ["platt", "temperature", "isotonic"])
@pytest.mark.parametrize("unit", [1e-9, 1e-3, 1e6, 1e9])
def test_probabilities_do_not_depend_on_the_unit_of_scores(method: str, unit: float) -> None:
    """Scores of six digits had a temperature at the end of its range: worse than a coin."""
    s, y = scored(1200)
    told = applied(calibrate(s * unit, y, method=method), s * unit)
    np.testing.assert_allclose(told, applied(calibrate(s, y, method=method), s), atol=1e-4)


def test_isotonic_equals_scikit_learn_and_refuses_few() -> None:
    s, y = scored(1200)
    reference = IsotonicRegression(out_of_bounds="clip").fit(s, y)
    grid = np.linspace(-20, 20, 300)
    ours = applied(calibrate(s, y, method="isotonic"), grid)
    np.testing.assert_allclose(ours, reference.predict(grid), atol=1e-6)
    with pytest.raises(SpecError, match="1000 or more"):
        calibrate(s[:900], y[:900], method="isotonic")
    assert len(calibrate(s[:900], y[:900], method="isotonic", allow_few=True).x) > 2


def test_scores_of_one_sign_or_perfect_ones_stay_finite() -> None:
    made = calibrate([1e6, 1e6 + 1, 1e6 + 2, 1e6 + 3], [0, 0, 1, 1])
    p = applied(made, [1e6, 1e6 + 3])
    assert np.isfinite(p).all()
    assert p[0] < 0.5 < p[1]
    with pytest.raises(SpecError, match="both classes"):
        calibrate([1.0, 2.0], [1, 1])


def test_the_card_says_how_and_how_well() -> None:
    s, y = scored(1500)
    fresh, labels = scored(500, seed=3)
    for method in ("platt", "temperature", "isotonic"):
        made = calibrate(s, y, method=method, name="dev", check=(fresh, labels))
        assert (made.method, made.set, made.n) == (method, "dev", 1500)
        assert made.ece is not None
        assert made.ece < 0.1
        assert made.brier is not None
        assert (made.slope is None) == (method == "isotonic") == bool(made.x)
    with pytest.raises(SpecError, match="allowed are platt"):
        calibrate(s, y, method="beta")


@pytest.mark.parametrize("method", ["platt", "temperature", "isotonic"])
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_a_score_that_is_not_finite_is_refused(method: str, bad: float) -> None:
    s, y = scored(1200)
    s[7] = bad
    with pytest.raises(SpecError, match=r"scores: 1 of 1200 are (infinite|NaN)"):
        calibrate(s, y, method=method)
