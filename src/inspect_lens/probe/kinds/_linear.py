"""A linear probe: one direction per layer, frozen; from scikit-learn, and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from inspect_lens._base.artifact import from_files, read_artifact
from inspect_lens.errors import ArtifactError, SpecError
from inspect_lens.probe.card._card import Calibration, ProbeCard
from inspect_lens.probe.card._files import PROBE, decode_probe
from inspect_lens.spec import EngineProbe, as_array

from ._neural import CardProbe, alarm_fields, require_finite

__all__ = ["Probe"]

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

    def forward(self, y: Floats) -> Floats:
        z = (y - self.shift) / self.scale
        z = z if self.columns is None else z[..., self.columns]
        return np.asarray(z if self.matrix is None else z @ self.matrix.T / self.after)

    def pull(self, weight: Floats) -> Floats:
        """The weight on this step's input that does what `weight` does on its output."""
        if self.matrix is not None:
            weight = self.matrix.T @ (weight / self.after)
        if self.columns is not None:
            wide = np.zeros(self.columns.size)
            wide[self.columns] = weight
            weight = wide
        return np.asarray(weight / self.scale)


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
    if len(affine) == 1 and affine[0].columns is None and affine[0].matrix is None:
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


_CHUNK_TOKENS = 64


@dataclass(frozen=True, eq=False, kw_only=True)
class Probe(CardProbe):
    """Scores tokens by `mean over layers of weight · (x - mean) / scale + bias`.

    The scaler is kept apart from the weight, so that what was fitted can be read back. Products
    have the precision of the activations, float32 at least, and sums are float64, row by row: a
    token's score does not depend on its neighbours.

    Args:
        weight: (layers, hidden) float32.
        bias: (layers,) float32.
        mean: (layers, hidden) float32; what the scaler subtracts.
        scale: (layers, hidden) float32, positive; what the scaler divides by.
        card: layers, positions, pool, thresholds and provenance.
        path: folder that it was loaded from.

    Raises:
        SpecError: shapes disagree with the card, or a value is NaN, infinite or a scale <= 0.

    Example:
        ```python
        import numpy as np

        from inspect_lens.probe import Probe, ProbeCard

        card = ProbeCard(name="mine/first-axis", layers=(4,), hidden=8, pool="max")
        probe = Probe.from_direction(np.eye(8)[0], card=card)
        acts = np.arange(24.0).reshape(1, 3, 8)  # (layers, tokens, hidden)
        assert probe.score_tokens(acts).tolist() == [0.0, 8.0, 16.0]
        assert probe.score(acts) == 16.0
        ```
    """

    weight: NDArray[np.float32]
    bias: NDArray[np.float32]
    mean: NDArray[np.float32]
    scale: NDArray[np.float32]
    card: ProbeCard
    path: Path | None = field(default=None)

    def __post_init__(self) -> None:
        n, hidden = len(self.card.layers), self.card.hidden
        self._freeze(weight=(n, hidden), bias=(n,), mean=(n, hidden), scale=(n, hidden))
        if not (self.scale > 0).all():
            raise SpecError(
                "scale: holds values <= 0; allowed are positive numbers; use 1 for a constant "
                "feature"
            )

    @classmethod
    def from_direction(
        cls, direction: ArrayLike, *, card: ProbeCard, bias: ArrayLike | None = None
    ) -> Self:
        """A probe that projects on a raw direction, without a scaler.

        Args:
            direction: (layers, hidden), or (hidden,) for one layer.
            card: its layers and width have to agree with the direction.
            bias: (layers,) or a number; 0 by default.

        Raises:
            SpecError: shapes disagree, or a value is not finite.
        """
        weight = np.atleast_2d(as_array(direction).astype(np.float32, copy=False))
        offset = np.atleast_1d(np.asarray(0.0 if bias is None else bias, dtype=np.float32))
        return cls(
            weight=weight,
            bias=np.broadcast_to(offset, (weight.shape[0],)) if offset.size == 1 else offset,
            mean=np.zeros_like(weight),
            scale=np.ones_like(weight),
            card=card,
        )

    @classmethod
    def from_sklearn(cls, estimator: Any, *, card: ProbeCard, average_folds: bool = False) -> Self:
        """A probe of a classifier that was fitted with scikit-learn.

        Read are linear models (also LDA), pipelines of scalers, PCA or feature selection that end
        in one, the best estimator of a search, and `CalibratedClassifierCV` of any of these. Its
        calibration goes to the card; the probe's score is the decision function before it. The
        scores are compared with the estimator's own before a probe is returned.

        Args:
            estimator: fitted on rows (rows, hidden) of two classes; the larger label is what a
                large score means.
            card: of one layer, and the width that the estimator was fitted on. An empty `method`
                or `source` is filled in.
            average_folds: take a `CalibratedClassifierCV` of several classifiers by the mean of
                their log odds. Its own probabilities are the mean of theirs, which differs a
                little and is no linear score.

        Raises:
            SpecError: not fitted, not linear, not two classes, or the card does not fit.
        """
        read = read_linear(estimator, average_folds=average_folds)
        if len(card.layers) != 1 or card.hidden != read.weight.size:
            raise SpecError(
                f"card: layers {card.layers} of width {card.hidden}; allowed is one layer of width "
                f"{read.weight.size}, which the estimator was fitted on"
            )
        filled: dict[str, object] = {
            "method": card.method or read.method, "source": card.source or "scikit-learn",
            "calibration": card.calibration or read.calibration,
        }  # fmt: skip
        parts: dict[str, Any] = {k: getattr(read, k)[None] for k in ("weight", "mean", "scale")}
        return cls(bias=np.array([read.bias]), **parts, card=card.model_copy(update=filled))

    def to_sklearn(self, layer: int | None = None) -> Any:
        """The probe of a layer as a fitted `Pipeline` of StandardScaler and LogisticRegression.

        Its `decision_function` gives rows (rows, hidden) the token scores of the probe, and
        `Probe.from_sklearn` of it is the same probe. Of one layer, it need not be named.

        Raises:
            SpecError: the probe has several layers, and none is named.
            ArtifactError: it has no direction at that layer.
        """
        if layer is None and len(self.layers) != 1:
            raise SpecError(
                f"layer: probe {self.name!r} has {list(self.layers)}; a pipeline reads one; name it"
            )
        from sklearn.linear_model import LogisticRegression
        from sklearn.pipeline import Pipeline
        from sklearn.preprocessing import StandardScaler

        one = self if layer is None else self.at(layer)
        weight, mean, scale = (a[0].astype(np.float64) for a in (one.weight, one.mean, one.scale))
        scaler, model = StandardScaler(), LogisticRegression()
        scaler.mean_, scaler.scale_, scaler.var_ = mean, scale, scale**2
        scaler.n_features_in_, scaler.n_samples_seen_ = mean.size, np.int64(1)
        model.coef_, model.intercept_ = weight[None], one.bias.astype(np.float64)
        model.classes_, model.n_features_in_ = np.array([0, 1]), weight.size
        model.n_iter_ = np.array([0], dtype=np.int32)
        return Pipeline([("scaler", scaler), ("classifier", model)])

    def for_engine(self) -> EngineProbe:
        """As in `CardProbe`: a linear one, which the engine always has."""
        weight = self.weight.astype(np.float64) / self.scale / len(self.layers)
        bias = np.mean(self.bias.astype(np.float64)) - np.sum(weight * self.mean)
        return EngineProbe(
            layers=self.layers,
            site=self.site,
            tensors={"weight": weight.astype(np.float32), "bias": np.float32(bias)},
            aggregate=str(self.card.pool),
            **alarm_fields(self.card),
        )

    def direction(self) -> NDArray[np.float32]:
        """Unit vectors (layers, hidden) float32 in the residual stream along which scores grow."""
        raw = self.weight.astype(np.float64) / self.scale
        norm = np.linalg.norm(raw, axis=1, keepdims=True)
        return np.asarray((raw / np.where(norm > 0, norm, 1.0)).astype(np.float32))

    def at(self, layer: int) -> Self:
        """The probe of one of its layers. Arguments are those of `CardProbe`."""
        super().at(layer)
        if self.layers == (layer,):
            return self
        row = [self.layers.index(layer)]
        facts: dict[str, object] = {
            "layers": (layer,), "thresholds": (), "calibration": None, "evaluations": (),
            "transfers": (),
        }  # fmt: skip
        parts: dict[str, Any] = {name: array[row] for name, array in self._in_file().items()}
        return type(self)(**parts, card=self.card.model_copy(update=facts))

    def score_tokens(
        self, acts: ArrayLike, layers: Sequence[int] | None = None
    ) -> NDArray[np.float64]:
        """Score every token. Arguments are those of `CardProbe`."""
        array, rows = self._picked(acts, layers)
        total = np.zeros(array.shape[1], dtype=np.float64)
        dtype = np.result_type(array.dtype, np.float32)
        for i, row in enumerate(rows):
            weight = (self.weight[i].astype(np.float64) / self.scale[i]).astype(dtype)
            mean = self.mean[i].astype(dtype)
            for start in range(0, total.size, _CHUNK_TOKENS):
                stop = start + _CHUNK_TOKENS
                terms = array[row, start:stop] - mean
                terms *= weight
                # Not a matrix product: BLAS sums in float32, in an order that depends on the batch.
                total[start:stop] += terms.sum(axis=1, dtype=np.float64) + float(self.bias[i])
        total /= len(rows)
        require_finite(total)
        return total

    def _in_file(self) -> Mapping[str, NDArray[np.float32]]:
        return {"weight": self.weight, "bias": self.bias, "mean": self.mean, "scale": self.scale}

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Load the probe of a folder, or of `probe.safetensors` in it, bit-equal to what was saved.

        Raises:
            ArtifactError: a file is missing or damaged, the content hash of the card is not
                that of the tensors, or both disagree on what decides a score.
        """
        folder, content, card = read_artifact(PROBE, Path(path), ProbeCard.model_validate)
        if card.kind != "linear":
            raise ArtifactError(
                f"{folder}: holds a {card.kind} probe; Probe allows linear ones; use load_probe, "
                "which reads every kind"
            )
        return from_files(cls, folder, **decode_probe(content, card, folder), card=card)
