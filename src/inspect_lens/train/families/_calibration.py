"""From scores to probabilities: Platt's sigmoid, a temperature, isotonic regression."""

from __future__ import annotations

import math
from typing import Any, Final, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import minimize, minimize_scalar
from scipy.special import expit
from sklearn.base import BaseEstimator
from sklearn.isotonic import IsotonicRegression
from sklearn.utils.validation import check_is_fitted

from inspect_lens.errors import SpecError
from inspect_lens.probe import Calibration, brier_score, expected_calibration_error, split_classes

Floats = NDArray[np.float64]
_ISOTONIC_FROM: Final = 1000


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


class _Calibrator(BaseEstimator):  # type: ignore[misc]
    """Base: scores (samples,) and labels in, probabilities (samples,) out."""

    def fit(self, scores: ArrayLike, labels: ArrayLike) -> Self:
        """Fit on scores that the probe was not trained on.

        Args:
            scores: (samples,) float.
            labels: (samples,) 0 and 1, both.

        Returns:
            self.

        Raises:
            SpecError: a class is missing, or a score is NaN.
        """
        positive, negative = split_classes(labels, scores)
        if not positive.size or not negative.size:
            raise SpecError(
                f"labels: {positive.size} positive and {negative.size} negative; allowed are both "
                "classes; a calibration set holds both"
            )
        self._fit(np.asarray(scores, dtype=np.float64), np.asarray(labels).astype(bool))
        return self

    def _fit(self, scores: Floats, positive: NDArray[np.bool_]) -> None:
        raise NotImplementedError

    def predict(self, scores: ArrayLike) -> Floats:
        """Probability (samples,) of the positive class for scores (samples,)."""
        raise NotImplementedError


class _Sigmoid(_Calibrator):
    slope_: float
    intercept_: float

    def predict(self, scores: ArrayLike) -> Floats:
        """Probability (samples,) of the positive class for scores (samples,)."""
        check_is_fitted(self)
        made: Floats = expit(self.slope_ * np.asarray(scores, dtype=np.float64) + self.intercept_)
        return made


class PlattCalibrator(_Sigmoid):
    """Platt calibration: p = sigmoid(slope · score + intercept), with smoothed targets.

    Attributes:
        slope_: of the score.
        intercept_: a number.

    Source:
        Platt 1999, in the stable form of Lin, Lin and Weng 2007.

    Example:
        ```python
        import numpy as np

        from inspect_lens.train import PlattCalibrator

        labels = np.arange(200) % 2
        scores = np.random.default_rng(0).standard_normal(200) + 2 * labels
        calibrator = PlattCalibrator().fit(scores, labels)
        assert calibrator.predict([5.0])[0] > 0.9 > 0.1 > calibrator.predict([-3.0])[0]
        ```
    """

    def _fit(self, scores: Floats, positive: NDArray[np.bool_]) -> None:
        self.slope_, self.intercept_ = fit_platt(scores, positive)


class TemperatureCalibrator(_Sigmoid):
    """Temperature calibration: p = sigmoid(score / temperature), for scores that are logits.

    Attributes:
        slope_: 1 / temperature.
        intercept_: 0.

    Source:
        arXiv:1706.04599.

    Example:
        ```python
        import numpy as np

        from inspect_lens.train import TemperatureCalibrator

        labels = np.arange(200) % 2
        logits = 10 * (np.random.default_rng(0).standard_normal(200) + 2 * labels - 1)  # too sure
        calibrator = TemperatureCalibrator().fit(logits, labels)
        assert calibrator.slope_ < 1.0
        ```
    """

    def _fit(self, scores: Floats, positive: NDArray[np.bool_]) -> None:
        def loss(log_slope: float) -> float:
            f = math.exp(log_slope) * scores
            return float((np.logaddexp(0.0, f) - positive * f).mean())

        found = minimize_scalar(loss, bounds=(-12.0, 12.0), method="bounded")
        self.slope_, self.intercept_ = math.exp(float(found.x)), 0.0


class IsotonicCalibrator(_Calibrator):
    """Isotonic calibration, the best non-decreasing map; needs 1000 samples or more.

    Args:
        allow_few: accept fewer.

    Source:
        Zadrozny and Elkan 2002; scikit-learn does the arithmetic.

    Example:
        ```python
        import numpy as np

        from inspect_lens.train import IsotonicCalibrator

        labels = np.arange(1000) % 2
        scores = np.random.default_rng(0).standard_normal(1000) + 2 * labels
        probabilities = IsotonicCalibrator().fit(scores, labels).predict([-2.0, 1.0, 4.0])
        assert (np.diff(probabilities) >= 0).all()
        ```
    """

    x_: Floats
    y_: Floats

    def __init__(self, *, allow_few: bool = False) -> None:
        self.allow_few = allow_few

    def _fit(self, scores: Floats, positive: NDArray[np.bool_]) -> None:
        if scores.size < _ISOTONIC_FROM and not self.allow_few:
            raise SpecError(
                f"scores: {scores.size} for isotonic regression; allowed are {_ISOTONIC_FROM} or "
                "more, as it memorises fewer; use PlattCalibrator, or pass allow_few=True"
            )
        model = IsotonicRegression(y_min=0.0, y_max=1.0, out_of_bounds="clip").fit(
            scores, positive.astype(np.float64)
        )
        self.x_, self.y_ = np.asarray(model.X_thresholds_), np.asarray(model.y_thresholds_)

    def predict(self, scores: ArrayLike) -> Floats:
        """Probability (samples,) of the positive class for scores (samples,)."""
        check_is_fitted(self)
        return np.asarray(np.interp(np.asarray(scores, dtype=np.float64), self.x_, self.y_))


_METHODS: Final[dict[str, type[_Calibrator]]] = {
    "platt": PlattCalibrator,
    "temperature": TemperatureCalibrator,
    "isotonic": IsotonicCalibrator,
}


def calibrate(
    scores: ArrayLike,
    labels: ArrayLike,
    *,
    method: str = "platt",
    name: str = "",
    check: tuple[ArrayLike, ArrayLike] | None = None,
) -> Calibration:
    """Fit a map from scores to probabilities, for a card.

    Args:
        scores: (samples,) float, of a set that the probe was not trained on.
        labels: (samples,) 0 and 1.
        method: `platt`, `temperature` or `isotonic`.
        name: of the set.
        check: scores and labels of another set, to measure the calibration error on.

    Returns:
        The map, with its error where `check` is given.

    Raises:
        SpecError: an unknown method, a missing class, or too few samples.

    Example:
        ```python
        from inspect_lens.train import ActivationSet, LDAProbe, calibrate, train_probe

        train, control, selection = (
            ActivationSet.load(f"acts/{name}.safetensors")
            for name in ("train", "control", "selection")
        )
        probe = train_probe(LDAProbe(), train, name="mine/lda", control=control, n_resamples=100)
        made = calibrate(selection.scores(probe), selection.labels, name="selection")
        assert 0.0 < made.probability(0.0) < made.probability(5.0) <= 1.0
        ```
    """
    if method not in _METHODS:
        raise SpecError(f"method={method!r}; allowed are {', '.join(_METHODS)}; correct the name")
    fitted: Any = _METHODS[method]().fit(scores, labels)
    facts: dict[str, Any] = {}
    if method == "isotonic":
        facts |= {"x": tuple(fitted.x_.tolist()), "y": tuple(fitted.y_.tolist())}
    else:
        facts |= {"slope": fitted.slope_, "intercept": fitted.intercept_}
    if check is not None:
        p = fitted.predict(check[0])
        facts |= {
            "ece": expected_calibration_error(check[1], p), "brier": brier_score(check[1], p)
        }  # fmt: skip
    return Calibration.model_validate(
        {"method": method, "set": name, "n": int(np.size(labels)), **facts}
    )
