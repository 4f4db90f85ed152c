"""Probes on the features of a sparse autoencoder."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Self

import numpy as np
import sklearn
from numpy.typing import NDArray
from sklearn.linear_model import LogisticRegression

from inspect_lens.errors import ArtifactError, SpecError
from inspect_lens.probe import HeadSpec, NeuralProbe, ProbeCard
from inspect_lens.sae import SparseEncoder, read_sae
from inspect_lens.spec import RESID_POST

from ._binary import BinaryEstimator, Targets

__all__ = ["SAEFeatureProbe", "SparseEncoder", "read_sae"]

Floats = NDArray[np.float64]
Rows = NDArray[np.floating[Any]]
_FEATURES: Final = 512


def l1_settings(version: str) -> dict[str, Any]:
    """How a `LogisticRegression` of a release of scikit-learn is asked for the L1 penalty."""
    # Releases before 1.8 ignore `l1_ratio` unless the penalty is `elasticnet`, which liblinear does
    # not know, and use L2; later ones warn of `penalty`.
    old = tuple(int(part) for part in version.split(".")[:2]) < (1, 8)
    return {"penalty": "l1"} if old else {"l1_ratio": 1.0}


@dataclass(kw_only=True, eq=False, repr=False)
class SAEFeatureProbe(BinaryEstimator):
    """L1 logistic regression on the features that tell the classes apart best.

    The `k` features with the largest difference of class means in standard deviations are kept.

    Args:
        encoder: of `read_sae`, with its threshold (JumpReLU) or how many features a token keeps
            (TopK); None: the columns of `X` are features already.
        k: features to keep.
        C: inverse of the L1 penalty.
        raw: keep the best feature alone and score with encoder row · x, without ReLU, threshold
            and rivals.

    Attributes:
        features_: (kept,) numbers of the features, best first.
        coef_: (kept,) their weights.
        intercept_: a number.

    Source:
        SAELens' probing of features, arXiv:2502.16681; scikit-learn does the regression.

    Example:
        ```python
        import numpy as np

        from inspect_lens.train import ActivationSet, SAEFeatureProbe, SparseEncoder

        train = ActivationSet.load("acts/train.safetensors")
        weight = np.random.default_rng(0).standard_normal((128, 32))  # (features, hidden)
        encoder = SparseEncoder(weight=weight, bias=np.zeros(128))  # read_sae reads one
        estimator = SAEFeatureProbe(encoder=encoder, k=16)
        x, labels, _ = train.rows(1)
        estimator.fit(x, labels)
        assert len(estimator.features_) == 16
        ```
    """

    method = "logistic regression on sparse autoencoder features"
    source = "arXiv:2502.16681"

    features_: NDArray[np.int64] = field(init=False)
    coef_: NDArray[np.float64] = field(init=False)
    intercept_: float = field(init=False)

    encoder: SparseEncoder | None = None
    k: int = 32
    C: float = 1.0
    raw: bool = False

    @classmethod
    def from_sae(
        cls, path: str | Path, *, norm_scale: float | None = None, **settings: Any
    ) -> Self:
        """Take the encoder of an SAE that SAELens or Gemma Scope published.

        Args:
            path: as in `read_sae`.
            norm_scale: as in `read_sae`.
            **settings: of the estimator.

        Raises:
            ArtifactError: as `read_sae`, or the SAE does not read the residual stream.
        """
        encoder = read_sae(path, norm_scale=norm_scale)
        if encoder.hook and (encoder.place or (0, ""))[1] not in (RESID_POST, "resid_pre"):
            raise ArtifactError(
                f"{path}: reads {encoder.hook!r}; allowed for a probe is an SAE of the residual "
                "stream before or after a block"
            )
        return cls(encoder=encoder, **settings)

    def _fit(self, x: NDArray[np.floating[Any]], target: Targets) -> None:
        spread, gap = self._separation(x, target)
        apart = np.abs(gap / np.where(spread > 0, spread, np.inf))
        self.features_ = np.argsort(-apart, kind="stable")[: 1 if self.raw else self.k]
        self.scale_ = np.where(spread > 0, spread, 1.0)[self.features_]
        kept = self._activate(x, self.features_, self._cut(x))
        if self.raw:
            low, high = _class_means(kept, target)[:, 0]
            sign = 1.0 if high >= low else -1.0
            self.coef_, self.intercept_ = np.array([sign]), float(-sign * (high + low) / 2.0)
            return
        model = LogisticRegression(
            solver="liblinear",
            C=self.C,
            random_state=0,
            max_iter=10_000,
            **l1_settings(sklearn.__version__),
        ).fit(kept / self.scale_, target.positive, sample_weight=target.weight)
        self.coef_ = np.asarray(model.coef_[0]) / self.scale_
        self.intercept_ = float(model.intercept_[0])

    def _decide(self, x: NDArray[np.floating[Any]]) -> NDArray[np.float64]:
        scores: NDArray[np.float64] = self._activate(x, self.features_, self._cut(x)) @ self.coef_
        return scores + self.intercept_

    def _freeze(self, card: ProbeCard) -> NeuralProbe:
        sae = self._encoder()
        tensors: dict[str, Any] = {"mean": np.zeros(card.hidden), "scale": np.ones(card.hidden)}
        head, bias = HeadSpec(), self.intercept_
        if self.raw:
            tensors["value"] = self.coef_[:, None] * sae.weight[self.features_]
            bias += float(self.coef_ @ sae.bias[self.features_])
        else:
            # Who is among the largest shows only beside all others, so TopK keeps them all.
            kept = np.arange(len(sae.weight)) if sae.top_k else self.features_
            value = np.zeros(len(sae.weight))
            value[self.features_] = self.coef_
            tensors |= {"w0": sae.weight[kept], "b0": sae.bias[kept], "value": value[None, kept]}
            if sae.threshold is not None:
                tensors["t0"] = sae.threshold[kept]
            head = HeadSpec(top_k=sae.top_k)
        tensors["bias"] = np.array([bias])
        facts = card.model_copy(update={"kind": "neural", "head": head})
        return NeuralProbe(tensors=tensors, card=facts)

    def _separation(self, x: Rows, target: Targets) -> tuple[Floats, Floats]:
        """Standard deviation of every feature, and the difference of its class means."""
        spreads, gaps = [], []
        every, cut = np.arange(len(self._encoder().weight)), self._cut(x)
        # Some features at a time: all of them for all rows are more than memory holds.
        for first in range(0, every.size, _FEATURES):
            z = self._activate(x, every[first : first + _FEATURES], cut)
            away = (z - np.average(z, axis=0, weights=target.weight)) ** 2
            spreads.append(np.sqrt(np.average(away, axis=0, weights=target.weight)))
            low, high = _class_means(z, target)
            gaps.append(high - low)
        return np.concatenate(spreads), np.concatenate(gaps)

    def _encoder(self) -> SparseEncoder:
        width = self.n_features_in_
        if self.encoder is None:
            return SparseEncoder(
                weight=np.eye(width, dtype=np.float32), bias=np.zeros(width, np.float32)
            )
        if self.encoder.weight.ndim != 2 or self.encoder.weight.shape[1] != width:
            raise SpecError(
                f"encoder: shape {self.encoder.weight.shape}; allowed is (features, {width}); take "
                "the SAE of this model and layer"
            )
        return self.encoder

    def _cut(self, x: Rows) -> Floats | None:
        return None if self.raw else self._encoder().top_k_limit(x)

    def _activate(self, x: Rows, features: NDArray[np.int64], cut: Floats | None) -> Floats:
        sae = self._encoder()
        if not self.raw:
            return sae.activations(x, features, smallest=cut)
        weight, bias = (part[features].astype(np.float64) for part in (sae.weight, sae.bias))
        return np.asarray(x, dtype=np.float64) @ weight.T + bias


def _class_means(z: Floats, target: Targets) -> Floats:
    """Means (2, columns) of the negatives and the positives."""
    weight = np.ones(len(z)) if target.weight is None else target.weight
    sides = (~target.positive, target.positive)
    return np.stack([np.average(z[side], axis=0, weights=weight[side]) for side in sides])
