"""The neural families: one head, with the settings of each source."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from inspect_lens.probe import HeadSpec

from ._sequence import SequenceEstimator

__all__ = [
    "AttentionLiteProbe",
    "AttentionProbe",
    "GDMAttentionProbe",
    "MLPProbe",
    "MultiMaxProbe",
    "RollingAttentionProbe",
]


@dataclass(kw_only=True, eq=False, repr=False)
class MLPProbe(SequenceEstimator):
    """Two-layer ReLU network on single tokens; token scores are pooled afterwards.

    Args:
        hidden_size: width of the ReLU layer.
        lr: this and what follows is the training, as `SequenceEstimator` names it.

    Source:
        arXiv:2601.11516.

    Example:
        ```python
        from inspect_lens.train import ActivationSet, MLPProbe

        train, test = (ActivationSet.load(f"acts/{name}.safetensors") for name in ("train", "test"))
        x, labels, _ = train.rows(1)  # (tokens, hidden) at layer 1, and the label of each row
        estimator = MLPProbe(hidden_size=16, steps=100).fit(x, labels)
        x, labels, _ = test.rows(1)
        assert estimator.score(x, labels) > 0.6
        ```
    """

    method = "two-layer ReLU network"
    source = "arXiv:2601.11516"
    reads = "tokens"
    pool_ = "mean"

    hidden_size: int = 128
    weight_decay: float = 1e-2
    steps: int = 2000
    batch: int = 256
    patience: int = 20

    def _sizes(self) -> tuple[int, ...]:
        return (self.hidden_size,)


@dataclass(kw_only=True, eq=False, repr=False)
class AttentionProbe(SequenceEstimator):
    """Heads that attend over the tokens, with a slope over their position; queries start at 0.

    Args:
        heads: how many; their values are summed.
        position: learn a slope of the attention logits over the token's index.
        gate: pass values through tanh.
        mlp_size: width of a ReLU layer before the heads; 0 for none.
        dropout: share of attention weights dropped while training.
        optimizer: `adamw`, or `lbfgs` on all samples at once, for which `lr` is usually 1.0.
        lr: this and what follows is the training, as `SequenceEstimator` names it.

    Source:
        EleutherAI's attention-probes: softmax(q · x + w · position), sum of a_t (v · x_t) + b.

    Example:
        ```python
        from inspect_lens.train import ActivationSet, AttentionProbe

        train, test = (ActivationSet.load(f"acts/{name}.safetensors") for name in ("train", "test"))
        estimator = AttentionProbe(lr=1e-2, steps=100)  # few steps, to be quick
        estimator.fit(train.sequences(1), train.labels)  # per sample (tokens, hidden)
        assert estimator.score(test.sequences(1), test.labels) > 0.8
        ```
    """

    method = "attention over tokens"
    source = "EleutherAI attention-probes"
    starts = "zeros"

    heads: int = 8
    position: bool = True
    gate: bool = False
    mlp_size: int = 0
    dropout: float = 0.0
    optimizer: Literal["adamw", "lbfgs"] = "adamw"
    lr: float = 1e-4
    steps: int = 2000
    patience: int = 100

    def _spec(self, hidden: int) -> HeadSpec:
        return HeadSpec(gate=self.gate)

    def _sizes(self) -> tuple[int, ...]:
        return (self.mlp_size,) if self.mlp_size else ()


@dataclass(kw_only=True, eq=False, repr=False)
class AttentionLiteProbe(SequenceEstimator):
    """One head of scaled attention, softmax(q · x / sqrt(hidden)), over one linear score.

    Args:
        lr: this and what follows is the training, as `SequenceEstimator` names it.

    Source:
        arXiv:2506.10805 (models-under-pressure).

    Example:
        ```python
        from inspect_lens.train import ActivationSet, AttentionLiteProbe

        train, test = (ActivationSet.load(f"acts/{name}.safetensors") for name in ("train", "test"))
        estimator = AttentionLiteProbe(steps=100)  # few steps, to be quick
        estimator.fit(train.sequences(1), train.labels)  # per sample (tokens, hidden)
        assert estimator.score(test.sequences(1), test.labels) > 0.8
        ```
    """

    method = "one head of scaled attention"
    source = "arXiv:2506.10805"
    starts = "random"

    lr: float = 5e-3
    weight_decay: float = 1e-3

    def _spec(self, hidden: int) -> HeadSpec:
        return HeadSpec(temperature=1.0 / float(np.sqrt(hidden)))


@dataclass(kw_only=True, eq=False, repr=False)
class GDMAttentionProbe(SequenceEstimator):
    """Two ReLU layers on each token, then heads that attend over the tokens.

    Args:
        heads: how many.
        mlp_sizes: widths of the ReLU layers.
        lr: this and what follows is the training, as `SequenceEstimator` names it.

    Source:
        arXiv:2601.11516: 10 heads, 2 layers of 100 ReLU, AdamW 1e-4 with decay 3e-3, 1000 steps.

    Example:
        ```python
        from inspect_lens.train import ActivationSet, GDMAttentionProbe

        train, test = (ActivationSet.load(f"acts/{name}.safetensors") for name in ("train", "test"))
        estimator = GDMAttentionProbe(mlp_sizes=(16,), lr=1e-3, steps=100)  # few steps, to be quick
        estimator.fit(train.sequences(1), train.labels)  # per sample (tokens, hidden)
        assert estimator.score(test.sequences(1), test.labels) > 0.8
        ```
    """

    method = "attention over a ReLU network"
    source = "arXiv:2601.11516"
    starts: ClassVar[Literal["", "zeros", "random"]] = "random"

    heads: int = 10
    mlp_sizes: tuple[int, ...] = (100, 100)
    lr: float = 1e-4
    weight_decay: float = 3e-3

    def _sizes(self) -> tuple[int, ...]:
        return self.mlp_sizes


@dataclass(kw_only=True, eq=False, repr=False)
class MultiMaxProbe(GDMAttentionProbe):
    """Two ReLU layers on each token, then the largest value of each head.

    The maximum is smooth while training and hard afterwards.

    Args:
        heads: how many.
        mlp_sizes: widths of the ReLU layers.
        lr: this and what follows is the training, as `SequenceEstimator` names it.

    Source:
        arXiv:2601.11516.

    Example:
        ```python
        from inspect_lens.probe import auroc
        from inspect_lens.train import ActivationSet, MultiMaxProbe

        train, test = (ActivationSet.load(f"acts/{name}.safetensors") for name in ("train", "test"))
        estimator = MultiMaxProbe(heads=4, mlp_sizes=(16,), lr=3e-3, steps=150)  # few, to be quick
        estimator.fit(train.sequences(1), train.labels)  # per sample (tokens, hidden)
        assert auroc(test.labels, estimator.decision_function(test.sequences(1))) > 0.8
        ```
    """

    method = "largest value per head"
    pool_ = "multimax"
    starts = ""


@dataclass(kw_only=True, eq=False, repr=False)
class RollingAttentionProbe(GDMAttentionProbe):
    """Two ReLU layers on each token, then the largest attention value of a window.

    Args:
        window: tokens.
        heads: how many.
        mlp_sizes: widths of the ReLU layers.
        lr: this and what follows is the training, as `SequenceEstimator` names it.

    Source:
        arXiv:2601.11516: windows of 10 tokens.

    Example:
        ```python
        from inspect_lens.train import ActivationSet, RollingAttentionProbe

        train, test = (ActivationSet.load(f"acts/{name}.safetensors") for name in ("train", "test"))
        estimator = RollingAttentionProbe(
            window=3, mlp_sizes=(16,), lr=1e-3, steps=100
        )  # few steps, to be quick
        estimator.fit(train.sequences(1), train.labels)  # per sample (tokens, hidden)
        assert estimator.score(test.sequences(1), test.labels) > 0.8
        ```
    """

    method = "largest attention value of a window"
    pool_ = "rolling_attention"

    window: int = 10

    def _pool(self) -> str:
        return f"rolling_attention:{self.window}"
