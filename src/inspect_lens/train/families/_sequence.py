"""Estimators that read whole sequences: MLP, attention, MultiMax and rolling-attention probes."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Final, Literal, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sklearn.model_selection import GroupShuffleSplit, StratifiedShuffleSplit
from sklearn.utils.validation import check_is_fitted, check_X_y, validate_data

from inspect_lens.errors import SpecError
from inspect_lens.probe import HeadSpec, NeuralProbe, ProbeCard, head_outputs, parse_head_pool
from inspect_lens.probe import pool_head as score_outputs

from ._binary import BinaryEstimator, weighted
from ._torch_head import HeadTraining, Labelled, train_head

__all__ = ["SequenceEstimator"]

Sequences = list[NDArray[np.floating[Any]]]
_VALIDATE_FROM: Final = 40  # fewer samples are all needed for the fit


@dataclass(kw_only=True, eq=False, repr=False)
class SequenceEstimator(BinaryEstimator):
    """Base of estimators whose `X` is a list of sequences (tokens, hidden), one per sample.

    A 2-D `X` (rows, hidden) is read as sequences of one token, so that the estimator also
    works wherever scikit-learn expects rows.

    Args:
        lr: learning rate of the optimiser.
        weight_decay: of the optimiser.
        steps: at most.
        batch: sequences per step.
        patience: looks without a better validation loss before training stops.
        device: where torch computes, such as `cpu` or `cuda`.
        random_state: of weights, batches and the split for early stopping.

    Attributes:
        classes_: (2,) the two labels; the second is the positive one.
        n_features_in_: hidden.
        tensors_: weights, as of a `NeuralProbe`.
        losses_: that early stopping looked at.

    Example:
        ```python
        from inspect_lens.train import ActivationSet, SequenceEstimator, make_estimator

        train = ActivationSet.load("acts/train.safetensors")
        estimator = make_estimator("attention-lite", steps=20)
        assert isinstance(estimator, SequenceEstimator)
        estimator.fit(train.sequences(1), train.labels)
        assert estimator.decision_function(train.sequences(1)).shape == (len(train),)
        ```
    """

    reads: ClassVar[Literal["tokens", "sequences"]] = "sequences"
    pool_: ClassVar[str] = "attention"
    starts: ClassVar[Literal["", "zeros", "random"]] = ""
    """What the queries are at first; empty where there are none."""

    tensors_: dict[str, NDArray[np.float32]] = field(init=False)
    losses_: list[float] = field(init=False)

    lr: float = 1e-3
    weight_decay: float = 0.0
    steps: int = 1000
    batch: int = 64
    patience: int = 50
    device: str = "cpu"
    random_state: int = 0

    def fit(
        self,
        X: Any,
        y: ArrayLike,
        groups: ArrayLike | None = None,
        sample_weight: ArrayLike | None = None,
    ) -> Self:
        """Train on sequences.

        A fifth of the samples (whole groups, if groups are given) is held back for early
        stopping when there are 40 or more.

        Args:
            X: (samples,) list of (tokens, hidden) arrays, or (samples, tokens, hidden), or
                (rows, hidden) for sequences of one token.
            y: (samples,) two classes; the larger label is the positive one.
            groups: (samples,) what must not straddle the split for early stopping.
            sample_weight: (samples,) how much each counts in the loss; all the same by default.

        Returns:
            self.

        Raises:
            ValueError: not two classes, NaN, or shapes disagree.
            SpecError: training diverged.
        """
        sequences, labels = self._read_both(X, y)
        sequences, labels, groups, weight = weighted(sequences, labels, groups, sample_weight)
        positive = self._positive(labels)
        each = np.ones(len(labels)) if weight is None else weight / weight.mean()
        data = Labelled(sequences, positive, each)
        scaler = _scaler(data)
        how = self._training()
        kept, held = _hold_back(positive, groups, seed=how.seed)
        trained, self.losses_ = train_head(
            self._start(self.n_features_in_, np.random.default_rng(how.seed)),
            self._spec(self.n_features_in_),
            self._pool(),
            data.part(kept),
            data.part(held) if len(held) else None,
            how,
            scaler,
        )
        self.tensors_ = trained | scaler
        return self

    def decision_function(self, X: Any) -> NDArray[np.float64]:
        """Score sequences (samples,); larger means more of the positive class."""
        check_is_fitted(self)
        wide = {name: t.astype(np.float64) for name, t in self.tensors_.items()}
        spec, pool = self._spec(self.n_features_in_), parse_head_pool(self._pool())
        position, bias = wide.get("position"), float(wide["bias"][0])
        sequences = self._read(X, reset=False)
        if all(len(s) == 1 for s in sequences):
            # One-token sequences, all in one product; every pool of one token is its value.
            out = head_outputs(wide, spec, np.concatenate(sequences).astype(np.float64))
            return np.asarray(out.value.sum(axis=1) + bias)
        return np.array(
            [
                score_outputs(head_outputs(wide, spec, s.astype(np.float64)), pool, position, bias)
                for s in sequences
            ]
        )

    def to_probe(self, card: ProbeCard) -> NeuralProbe:
        """Freeze the trained weights.

        Args:
            card: of one layer; its width has to be that of the training rows. Its pool is
                replaced by that of the family, but for families that learn tokens, which keep
                any pool over token scores.

        Returns:
            The probe; it scores sequences as `decision_function` does.

        Raises:
            SpecError: the card names several layers or another width.
            sklearn.exceptions.NotFittedError: `fit` was not called.
        """
        check_is_fitted(self)
        if len(card.layers) != 1 or card.hidden != self.n_features_in_:
            raise SpecError(
                f"card: layers {card.layers} of width {card.hidden}; allowed is one layer of width "
                f"{self.n_features_in_}; an estimator learns the weights of one layer"
            )
        facts = {
            "method": card.method or self.describe(),
            "source": card.source or self.source,
            "kind": "neural",
            "head": self._spec(self.n_features_in_),
            "pool": card.pool if self.reads == "tokens" else self._pool(),
        }
        return NeuralProbe(tensors=self.tensors_, card=card.model_copy(update=facts))

    def _training(self) -> HeadTraining:
        """The settings of the family that are those of a training."""
        names = {f.name for f in fields(HeadTraining)} & set(self._get_param_names())
        return HeadTraining(seed=self.random_state, **{n: getattr(self, n) for n in names})

    def _start(self, hidden: int, rng: np.random.Generator) -> dict[str, NDArray[np.float32]]:
        """Weights before the first step: ReLU layers, then what heads read of the last of them."""
        made: dict[str, NDArray[np.float32]] = {}
        width = hidden
        for i, size in enumerate(self._sizes()):
            bound = np.sqrt(6.0 / width)
            made[f"w{i}"] = rng.uniform(-bound, bound, (size, width)).astype(np.float32)
            made[f"b{i}"] = np.zeros(size, dtype=np.float32)
            width = size
        shape = (int(getattr(self, "heads", 1)), width)
        for name in ("value", "query")[: 1 + bool(self.starts)]:
            made[name] = (rng.normal(size=shape) / np.sqrt(width)).astype(np.float32)
        if self.starts == "zeros":
            made["query"] = np.zeros(shape, dtype=np.float32)
        if getattr(self, "position", False):
            made["position"] = np.zeros(shape[0], dtype=np.float32)
        return made | {"bias": np.zeros(1, dtype=np.float32)}

    def _sizes(self) -> tuple[int, ...]:
        """Widths of the ReLU layers."""
        return ()

    def _spec(self, hidden: int) -> HeadSpec:
        return HeadSpec()

    def _pool(self) -> str:
        return self.pool_

    def _read(self, X: Any, *, reset: bool) -> Sequences:
        if not _is_ragged(X):
            rows = validate_data(self, X, dtype=[np.float64, np.float32], reset=reset)
            return [row[None] for row in rows]
        sequences = [np.asarray(s, dtype=np.float32) for s in X]
        widths = {s.shape[1:] for s in sequences}
        if len(widths) != 1 or any(s.ndim != 2 or not len(s) for s in sequences):
            raise SpecError(
                f"X: sequences of shapes {sorted({s.shape for s in sequences})[:5]}; allowed is "
                "(tokens, hidden) with one width and at least one token each; leave out samples "
                "without tokens"
            )
        if not all(np.isfinite(s).all() for s in sequences):
            raise SpecError("X: holds NaN or infinity; allowed are finite numbers; leave them out")
        width = sequences[0].shape[1]
        if not reset and width != self.n_features_in_:
            raise SpecError(
                f"X has {width} features, but {type(self).__name__} is expecting "
                f"{self.n_features_in_} features as input"
            )
        self.n_features_in_ = width
        return sequences

    def _read_both(self, X: Any, y: ArrayLike) -> tuple[Sequences, NDArray[Any]]:
        if not _is_ragged(X):
            rows, labels = validate_data(self, X, y, dtype=[np.float64, np.float32])
            return [row[None] for row in rows.astype(np.float32)], labels
        sequences = self._read(X, reset=True)
        _, labels = check_X_y(np.zeros((len(sequences), 1)), y)
        return sequences, labels


def _is_ragged(X: Any) -> bool:
    if getattr(X, "ndim", None) == 3:
        return True
    return (
        isinstance(X, list | tuple)
        and len(X) > 0
        and all(isinstance(s, np.ndarray) and s.ndim == 2 for s in X)
    )


def _scaler(data: Labelled) -> dict[str, NDArray[np.float32]]:
    """Mean and standard deviation of all tokens, (hidden,) each; 1 for a constant column."""
    counted = list(zip(data.sequences, data.weight, strict=True))
    mean = np.zeros(data.sequences[0].shape[1])
    for s, w in counted:
        mean += w * s.sum(axis=0, dtype=np.float64)
    n = sum(w * len(s) for s, w in counted)
    mean /= n
    square = np.zeros(len(mean))
    for s, w in counted:
        square += w * ((s - mean) ** 2).sum(axis=0)
    spread = np.sqrt(square / n)
    scale = np.where(spread > 1e-12 * np.maximum(1.0, np.abs(mean)), spread, 1.0)
    return {"mean": mean.astype(np.float32), "scale": scale.astype(np.float32)}


def _hold_back(
    positive: NDArray[np.bool_], groups: ArrayLike | None, *, seed: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Indices to fit and to stop by; none of the latter when samples or groups are few."""
    n = positive.size
    everything = np.arange(n), np.arange(0)
    if n < _VALIDATE_FROM or min(positive.sum(), n - positive.sum()) < 5:
        return everything
    if groups is None:
        splitter: Any = StratifiedShuffleSplit(n_splits=1, test_size=0.2, random_state=seed)
    elif len(set(np.asarray(groups).tolist())) < 5:
        return everything
    else:
        splitter = GroupShuffleSplit(n_splits=1, test_size=0.2, random_state=seed)
    kept, held = next(splitter.split(np.zeros(n), positive, groups))
    both = all(0 < positive[side].sum() < len(side) for side in (kept, held))
    return (kept, held) if both else everything
