"""A linear probe: one direction per layer, frozen, and scoring arrays with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from inspect_lens.errors import ArtifactError, SpecError
from inspect_lens.probe.card._card import ProbeCard
from inspect_lens.probe.card._files import decode_probe, encode_probe, read_probe_files
from inspect_lens.spec import EngineProbe

from ._base import CardProbe, frozen, require_finite
from ._neural import alarm_fields
from ._sklearn import read_linear, write_linear

_CHUNK_TOKENS = 1024


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
        shapes = {"weight": (n, hidden), "bias": (n,), "mean": (n, hidden), "scale": (n, hidden)}
        for name, shape in shapes.items():
            array = frozen(name, getattr(self, name))
            if array.shape != shape:
                raise SpecError(
                    f"{name}: shape {array.shape}; allowed is {shape} for layers "
                    f"{self.card.layers} of width {hidden}; give one row per layer of the card"
                )
            object.__setattr__(self, name, array)
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

        Returns:
            The probe.

        Raises:
            SpecError: shapes disagree, or a value is not finite.
        """
        weight = np.atleast_2d(np.asarray(direction, dtype=np.float32))
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

        Returns:
            The probe; it scores rows as the estimator's `decision_function`, up to float32.

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
        return cls(
            weight=read.weight[None].astype(np.float32),
            bias=np.array([read.bias], dtype=np.float32),
            mean=read.mean[None].astype(np.float32),
            scale=read.scale[None].astype(np.float32),
            card=card.model_copy(update=filled),
        )

    def to_sklearn(self, layer: int | None = None) -> Any:
        """The probe as a fitted scikit-learn pipeline: StandardScaler, LogisticRegression.

        Args:
            layer: one of `layers`; may be left out where there is only one.

        Returns:
            A `sklearn.pipeline.Pipeline`; its `decision_function` gives rows (rows, hidden) the
            token scores of the probe, and `Probe.from_sklearn` of it is the same probe.

        Raises:
            SpecError: the probe has several layers, and none is named.
            ArtifactError: it has no direction at that layer.
            LensError: scikit-learn is not installed.
        """
        if layer is None and len(self.layers) != 1:
            raise SpecError(
                f"layer: probe {self.name!r} has {list(self.layers)}; a pipeline reads one; name it"
            )
        one = self if layer is None else self.at(layer)
        wide = (a.astype(np.float64) for a in (one.weight[0], one.mean[0], one.scale[0]))
        weight, mean, scale = wide
        return write_linear(weight, float(one.bias[0]), mean, scale)

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
        unit: NDArray[np.float32] = (raw / np.where(norm > 0, norm, 1.0)).astype(np.float32)
        return unit

    def at(self, layer: int) -> Self:
        """The probe of one of its layers. Arguments are those of `CardProbe`."""
        super().at(layer)
        if self.layers == (layer,):
            return self
        row = [self.layers.index(layer)]
        dropped: dict[str, object] = {"thresholds": (), "calibration": None}
        card = self.card.model_copy(update={"layers": (layer,), **dropped})
        return replace(
            self, weight=self.weight[row], bias=self.bias[row], mean=self.mean[row],
            scale=self.scale[row], card=card, path=None,
        )  # fmt: skip

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
                terms = (array[row, start:stop] - mean) * weight
                # Not a matrix product: BLAS sums in float32, in an order that depends on the batch.
                total[start:stop] += terms.sum(axis=1, dtype=np.float64) + float(self.bias[i])
        total /= len(rows)
        require_finite(total)
        return total

    def to_bytes(self) -> bytes:
        """Content of `probe.safetensors`; equal probes give equal bytes."""
        tensors = {
            "weight": self.weight, "bias": self.bias, "mean": self.mean, "scale": self.scale
        }  # fmt: skip
        return encode_probe(tensors, self.card)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Load a probe and check its files against each other.

        Args:
            path: the folder, or `probe.safetensors` inside it.

        Returns:
            The probe, bit-equal to the one that was saved.

        Raises:
            ArtifactError: a file is missing or damaged, the content hash of the card is not
                that of the tensors, or both disagree on what decides a score.
        """
        folder, content, card = read_probe_files(Path(path))
        if card.kind != "linear":
            raise ArtifactError(
                f"{folder}: holds a {card.kind} probe; Probe allows linear ones; use load_probe, "
                "which reads every kind"
            )
        tensors = decode_probe(content, card, folder)
        try:
            return cls(**tensors, card=card, path=folder)
        except SpecError as error:
            raise ArtifactError(f"{folder}: {error}") from None
