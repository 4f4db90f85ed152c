"""Linear classifiers of scikit-learn as probes, and back; found by their fitted attributes."""

from __future__ import annotations

import importlib
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from inspect_lens.errors import LensError, SpecError
from inspect_lens.probe.card._card import Calibration

Floats = NDArray[np.float64]
_POINTS: Final = 8
_METHOD: Final = 400
_LINEAR: Final = (
    "LogisticRegression, LinearSVC, SGDClassifier, RidgeClassifier, LinearDiscriminantAnalysis, "
    "and other models with coef_ and intercept_, behind scalers, PCA and feature selection"
)


class LinearModel(NamedTuple):
    """What is read of an estimator: score = weight · (x - mean) / scale + bias."""

    weight: Floats
    """(hidden,)."""
    bias: float
    mean: Floats
    """(hidden,)."""
    scale: Floats
    """(hidden,), positive."""
    calibration: Calibration | None
    method: str
    """The estimator in words."""


class _Affine(NamedTuple):
    """One step of a pipeline, z = (y - shift) / scale, then the columns or a matrix."""

    shift: Floats | float = 0.0
    scale: Floats | float = 1.0
    columns: NDArray[np.bool_] | None = None
    matrix: Floats | None = None
    """(out, in)."""
    after: Floats | float = 1.0
    """Divides what the matrix gives."""
    centre: Floats | float = 0.0
    """Where the data lie, also where nothing is subtracted."""

    @property
    def is_scaler(self) -> bool:
        return self.columns is None and self.matrix is None

    def forward(self, y: Floats) -> Floats:
        z = (y - self.shift) / self.scale
        z = z if self.columns is None else z[..., self.columns]
        made: Floats = z if self.matrix is None else z @ self.matrix.T / self.after
        return made

    def pull(self, weight: Floats) -> Floats:
        """The weight on this step's input that does what `weight` does on its output."""
        if self.matrix is not None:
            weight = self.matrix.T @ (weight / self.after)
        if self.columns is not None:
            wide = np.zeros(self.columns.size)
            wide[self.columns] = weight
            weight = wide
        made: Floats = weight / self.scale
        return made


def read_linear(estimator: Any, *, average_folds: bool = False) -> LinearModel:
    """Read a fitted classifier whose score is linear in its input."""
    method = " ".join(repr(estimator).split())[:_METHOD]
    chosen = getattr(estimator, "best_estimator_", estimator)
    calibrated = getattr(chosen, "calibrated_classifiers_", None)
    if calibrated is None:
        return _read(chosen)._replace(method=method)
    parts = [_read_calibrated(part) for part in calibrated]
    if len(parts) == 1:
        return parts[0]._replace(method=method)
    if not average_folds or any(p.calibration is None or p.calibration.x for p in parts):
        raise SpecError(
            f"{type(chosen).__name__}: averages the probabilities of {len(parts)} classifiers, "
            "which is no linear score; allowed is ensemble=False, or for the sigmoid and "
            "temperature average_folds=True, which averages their log odds instead"
        )
    return _average(parts)._replace(method=f"{method}, log odds of {len(parts)} folds averaged")


def _average(parts: list[LinearModel]) -> LinearModel:
    """Mean of calibrated log odds: linear again, about one common centre."""
    centre = np.mean([p.mean for p in parts], axis=0)
    weight, bias = np.zeros_like(centre), 0.0
    for part in parts:
        assert part.calibration is not None
        slope = part.calibration.slope or 1.0
        raw = part.weight / part.scale
        weight += slope * raw / len(parts)
        bias += part.calibration.logit(part.bias + float(raw @ (centre - part.mean))) / len(parts)
    first = parts[0].calibration
    assert first is not None
    kept = first.model_copy(update={"method": "platt", "slope": 1.0, "intercept": 0.0})
    return LinearModel(weight, bias, centre, np.ones_like(centre), kept, "")


def _read_calibrated(part: Any) -> LinearModel:
    model = _read(part.estimator)
    calibrator = part.calibrators[0]
    facts: dict[str, Any] = {"set": "scikit-learn's own folds", "n": 0}
    if hasattr(calibrator, "a_"):
        slope, offset = -float(calibrator.a_), -float(calibrator.b_)
        made = Calibration(method="platt", slope=slope, intercept=offset, **facts)
    elif hasattr(calibrator, "beta_"):
        # The two logits are -score and score, so their difference is twice the score.
        slope = 2.0 * float(calibrator.beta_)
        made = Calibration(method="temperature", slope=slope, **facts)
    elif hasattr(calibrator, "X_thresholds_"):
        x, y = (tuple(map(float, v)) for v in (calibrator.X_thresholds_, calibrator.y_thresholds_))
        made = Calibration(method="isotonic", x=x, y=y, **facts | {"n": len(x)})
    else:
        raise SpecError(
            f"{type(calibrator).__name__}: is no calibration that a card can hold; allowed are "
            "sigmoid, isotonic and temperature"
        )
    return model._replace(calibration=made)


def _read(estimator: Any) -> LinearModel:
    *before, final = _flatten(estimator)
    weight, intercept = _coefficients(final)
    affine = [_affine(step) for step in before if step is not None and step != "passthrough"]
    folded = weight
    for step in reversed(affine):
        folded = step.pull(folded)
    known = affine[0].centre if affine else getattr(final, "xbar_", 0.0)
    mean = np.broadcast_to(np.asarray(known, dtype=np.float64), folded.shape) * 1.0
    inner = mean
    for step in affine:
        inner = step.forward(inner)
    # At the centre: an intercept at 0, far from the data, would lose digits in float32.
    bias = float(weight @ inner) + intercept
    model = LinearModel(folded, bias, mean, np.ones_like(mean), None, "")
    if len(affine) == 1 and affine[0].is_scaler:
        # What was fitted stays to be read: the weight on scaled input, and the scaler.
        scale = np.broadcast_to(affine[0].scale, mean.shape) * 1.0
        model = model._replace(weight=weight, scale=scale)
    _compare(model, estimator)
    return model


def _flatten(estimator: Any) -> list[Any]:
    """Steps of pipelines in pipelines, in order; FrozenEstimator hands on what it wraps."""
    chosen = getattr(estimator, "best_estimator_", estimator)
    steps = [step for _, step in getattr(chosen, "steps", ())]
    return [part for step in steps for part in _flatten(step)] if steps else [chosen]


def _coefficients(final: Any) -> tuple[Floats, float]:
    """Weights (columns,) and intercept of the last step."""
    name = type(final).__name__
    classes = getattr(final, "classes_", None)
    if classes is not None and len(classes) != 2:
        raise SpecError(f"{name}: has {len(classes)} classes; allowed are two; fit on 0 and 1")
    try:
        coef = final.coef_
    except AttributeError:
        fitted = [key for key in vars(final) if key.endswith("_") and not key.startswith("_")]
        raise SpecError(
            f"{name}: {'has no coef_, so its score is not linear' if fitted else 'is not fitted'}; "
            f"allowed are, fitted, {_LINEAR}"
        ) from None
    dense = np.asarray(coef.toarray() if hasattr(coef, "toarray") else coef, dtype=np.float64)
    if dense.ndim > 2 or (dense.ndim == 2 and dense.shape[0] != 1):
        raise SpecError(f"{name}: coef_ of shape {dense.shape}; allowed is one row, of two classes")
    intercept = np.asarray(getattr(final, "intercept_", 0.0), dtype=np.float64).reshape(-1)
    return dense.reshape(-1), float(intercept[0])


def _affine(step: Any) -> _Affine:
    """A transformer as an affine map; `_compare` finds one that is more than that."""

    def get(name: str, default: float) -> Floats | float:
        value = getattr(step, name, None)
        return default if value is None else np.asarray(value, dtype=np.float64)

    if hasattr(step, "get_support"):
        return _Affine(columns=np.asarray(step.get_support(), dtype=bool))
    if hasattr(step, "components_"):
        deep: Floats | float = 1.0
        if getattr(step, "whiten", False):
            deep = np.sqrt(np.asarray(step.explained_variance_, dtype=np.float64))
        matrix = np.asarray(step.components_, dtype=np.float64)
        mean = get("mean_", 0.0)
        return _Affine(shift=mean, matrix=matrix, after=deep, centre=mean)
    if hasattr(step, "data_min_") and hasattr(step, "min_"):  # MinMaxScaler: x · scale_ + min_
        factor = np.asarray(step.scale_, dtype=np.float64)
        # Halfway between the smallest and the largest value.
        middle = (np.asarray(step.data_min_) + np.asarray(step.data_max_)) / 2.0
        return _Affine(shift=-np.asarray(step.min_) / factor, scale=1.0 / factor, centre=middle)
    if hasattr(step, "scale_"):
        centre = get("center_" if hasattr(step, "center_") else "mean_", 0.0)
        shift = centre if getattr(step, "with_mean", True) else 0.0
        return _Affine(shift=shift, scale=get("scale_", 1.0), centre=centre)
    raise SpecError(
        f"{type(step).__name__}: is no linear transformer that is known; allowed are "
        "StandardScaler, RobustScaler, MinMaxScaler, MaxAbsScaler, PCA, TruncatedSVD and feature "
        "selection, fitted; fit without this step"
    )


def _compare(model: LinearModel, estimator: Any) -> None:
    """Refuse an estimator whose own scores are others: clipping, a kernel, an unknown step."""
    score = getattr(estimator, "decision_function", None) or getattr(estimator, "predict", None)
    if score is None:
        raise SpecError(f"{type(estimator).__name__}: neither decision_function nor predict")
    rng = np.random.default_rng(0)
    spread = 3.0 * model.scale
    points = model.mean + spread * rng.standard_normal((_POINTS, model.weight.size))
    ours = (points - model.mean) / model.scale @ model.weight + model.bias
    theirs = np.asarray(score(points), dtype=np.float64).reshape(-1)
    size = max(float(np.abs(ours).max()), 1e-12)
    if theirs.shape != ours.shape or not np.allclose(ours, theirs, rtol=0.0, atol=1e-5 * size):
        raise SpecError(
            f"{type(estimator).__name__}: its scores are not those of its coefficients, so a step "
            f"is not linear (a clip, a kernel, a link function); allowed are {_LINEAR}"
        )


def write_linear(weight: Floats, bias: float, mean: Floats, scale: Floats) -> Any:
    """A fitted pipeline of StandardScaler and LogisticRegression with these numbers."""
    try:
        linear: Any = importlib.import_module("sklearn.linear_model")
        scaling: Any = importlib.import_module("sklearn.preprocessing")
        pipeline: Any = importlib.import_module("sklearn.pipeline")
    except ImportError:
        raise LensError("to_sklearn: needs scikit-learn; install inspect-lens[train]") from None
    scaler = scaling.StandardScaler()
    scaler.mean_, scaler.scale_, scaler.var_ = mean, scale, scale**2
    scaler.n_features_in_, scaler.n_samples_seen_ = mean.size, np.int64(1)
    model = linear.LogisticRegression()
    model.coef_, model.intercept_ = weight[None], np.array([bias])
    model.classes_, model.n_features_in_ = np.array([0, 1]), weight.size
    model.n_iter_ = np.array([0], dtype=np.int32)
    return pipeline.Pipeline([("scaler", scaler), ("classifier", model)])
