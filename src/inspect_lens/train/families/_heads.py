"""The neural families: what each starts from, and how its source trains it."""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

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

Weights = dict[str, NDArray[np.float32]]


def _relu_layers(hidden: int, sizes: tuple[int, ...], rng: np.random.Generator) -> Weights:
    made: Weights = {}
    for i, size in enumerate(sizes):
        bound = np.sqrt(6.0 / hidden)
        made[f"w{i}"] = rng.uniform(-bound, bound, (size, hidden)).astype(np.float32)
        made[f"b{i}"] = np.zeros(size, dtype=np.float32)
        hidden = size
    return made


def _heads(width: int, heads: int, rng: np.random.Generator) -> NDArray[np.float32]:
    return np.asarray(rng.normal(size=(heads, width)) / np.sqrt(width), dtype=np.float32)


def _bias() -> NDArray[np.float32]:
    return np.zeros(1, dtype=np.float32)


class MLPProbe(SequenceEstimator):
    """Two-layer ReLU network on single tokens; token scores are pooled afterwards.

    Args:
        hidden_size: width of the ReLU layer.
        lr: learning rate of AdamW.
        weight_decay: of AdamW.
        steps: at most.
        batch: tokens per step.
        patience: looks without a better validation loss before it stops.
        device: where torch computes.
        random_state: of weights, batches and the split.

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
    reads: Literal["tokens", "sequences"] = "tokens"
    pool_ = "mean"

    def __init__(
        self,
        *,
        hidden_size: int = 128,
        lr: float = 1e-3,
        weight_decay: float = 1e-2,
        steps: int = 2000,
        batch: int = 256,
        patience: int = 20,
        device: str = "cpu",
        random_state: int = 0,
    ) -> None:
        self.hidden_size = hidden_size
        self.lr = lr
        self.weight_decay = weight_decay
        self.steps = steps
        self.batch = batch
        self.patience = patience
        self.device = device
        self.random_state = random_state

    def _start(self, hidden: int, rng: np.random.Generator) -> Weights:
        layers = _relu_layers(hidden, (self.hidden_size,), rng)
        return layers | {"value": _heads(self.hidden_size, 1, rng), "bias": _bias()}


class AttentionProbe(SequenceEstimator):
    """Heads that attend over the tokens, with a slope over their position; queries start at 0.

    Args:
        heads: how many; their values are summed.
        position: learn a slope of the attention logits over the token's index.
        gate: pass values through tanh.
        mlp_size: width of a ReLU layer before the heads; 0 for none.
        dropout: share of attention weights dropped while training.
        optimizer: `adamw`, or `lbfgs` on all samples at once.
        lr: learning rate; 1.0 is usual for LBFGS.
        weight_decay: of the optimiser.
        steps: at most.
        batch: samples per step.
        patience: looks without a better validation loss before it stops.
        device: where torch computes.
        random_state: of weights, batches and the split.

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

    def __init__(
        self,
        *,
        heads: int = 8,
        position: bool = True,
        gate: bool = False,
        mlp_size: int = 0,
        dropout: float = 0.0,
        optimizer: Literal["adamw", "lbfgs"] = "adamw",
        lr: float = 1e-4,
        weight_decay: float = 0.0,
        steps: int = 2000,
        batch: int = 64,
        patience: int = 100,
        device: str = "cpu",
        random_state: int = 0,
    ) -> None:
        self.heads = heads
        self.position = position
        self.gate = gate
        self.mlp_size = mlp_size
        self.dropout = dropout
        self.optimizer = optimizer
        self.lr = lr
        self.weight_decay = weight_decay
        self.steps = steps
        self.batch = batch
        self.patience = patience
        self.device = device
        self.random_state = random_state

    def _spec(self, hidden: int) -> HeadSpec:
        return HeadSpec(gate=self.gate)

    def _start(self, hidden: int, rng: np.random.Generator) -> Weights:
        layers = _relu_layers(hidden, (self.mlp_size,) if self.mlp_size else (), rng)
        width = self.mlp_size or hidden
        made = layers | {
            "query": np.zeros((self.heads, width), dtype=np.float32),
            "value": _heads(width, self.heads, rng),
            "bias": _bias(),
        }
        if self.position:
            made["position"] = np.zeros(self.heads, dtype=np.float32)
        return made


class AttentionLiteProbe(SequenceEstimator):
    """One head of scaled attention, softmax(q · x / sqrt(hidden)), over one linear score.

    Args:
        lr: learning rate of AdamW.
        weight_decay: of AdamW.
        steps: at most.
        batch: samples per step.
        patience: looks without a better validation loss before it stops.
        device: where torch computes.
        random_state: of weights, batches and the split.

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

    def __init__(
        self,
        *,
        lr: float = 5e-3,
        weight_decay: float = 1e-3,
        steps: int = 1000,
        batch: int = 64,
        patience: int = 50,
        device: str = "cpu",
        random_state: int = 0,
    ) -> None:
        self.lr = lr
        self.weight_decay = weight_decay
        self.steps = steps
        self.batch = batch
        self.patience = patience
        self.device = device
        self.random_state = random_state

    def _spec(self, hidden: int) -> HeadSpec:
        return HeadSpec(temperature=1.0 / float(np.sqrt(hidden)))

    def _start(self, hidden: int, rng: np.random.Generator) -> Weights:
        return {
            "query": _heads(hidden, 1, rng), "value": _heads(hidden, 1, rng), "bias": _bias()
        }  # fmt: skip


class GDMAttentionProbe(SequenceEstimator):
    """Two ReLU layers on each token, then heads that attend over the tokens.

    Args:
        heads: how many.
        mlp_sizes: widths of the ReLU layers.
        lr: learning rate of AdamW.
        weight_decay: of AdamW.
        steps: at most.
        batch: samples per step.
        patience: looks without a better validation loss before it stops.
        device: where torch computes.
        random_state: of weights, batches and the split.

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

    def __init__(
        self,
        *,
        heads: int = 10,
        mlp_sizes: tuple[int, ...] = (100, 100),
        lr: float = 1e-4,
        weight_decay: float = 3e-3,
        steps: int = 1000,
        batch: int = 64,
        patience: int = 50,
        device: str = "cpu",
        random_state: int = 0,
    ) -> None:
        self.heads = heads
        self.mlp_sizes = mlp_sizes
        self.lr = lr
        self.weight_decay = weight_decay
        self.steps = steps
        self.batch = batch
        self.patience = patience
        self.device = device
        self.random_state = random_state

    def _start(self, hidden: int, rng: np.random.Generator) -> Weights:
        width = self.mlp_sizes[-1] if self.mlp_sizes else hidden
        made = _relu_layers(hidden, self.mlp_sizes, rng)
        made |= {"value": _heads(width, self.heads, rng), "bias": _bias()}
        return (
            made if self.pool_ == "multimax" else made | {"query": _heads(width, self.heads, rng)}
        )


class MultiMaxProbe(GDMAttentionProbe):
    """Two ReLU layers on each token, then the largest value of each head.

    The maximum is smooth while training and hard afterwards.

    Args:
        heads: how many.
        mlp_sizes: widths of the ReLU layers.
        lr: learning rate of AdamW.
        weight_decay: of AdamW.
        steps: at most.
        batch: samples per step.
        patience: looks without a better validation loss before it stops.
        device: where torch computes.
        random_state: of weights, batches and the split.

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


class RollingAttentionProbe(GDMAttentionProbe):
    """Two ReLU layers on each token, then the largest attention value of a window.

    Args:
        window: tokens.
        heads: how many.
        mlp_sizes: widths of the ReLU layers.
        lr: learning rate of AdamW.
        weight_decay: of AdamW.
        steps: at most.
        batch: samples per step.
        patience: looks without a better validation loss before it stops.
        device: where torch computes.
        random_state: of weights, batches and the split.

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

    def __init__(
        self,
        *,
        window: int = 10,
        heads: int = 10,
        mlp_sizes: tuple[int, ...] = (100, 100),
        lr: float = 1e-4,
        weight_decay: float = 3e-3,
        steps: int = 1000,
        batch: int = 64,
        patience: int = 50,
        device: str = "cpu",
        random_state: int = 0,
    ) -> None:
        super().__init__(
            heads=heads, mlp_sizes=mlp_sizes, lr=lr, weight_decay=weight_decay, steps=steps,
            batch=batch, patience=patience, device=device, random_state=random_state,
        )  # fmt: skip
        self.window = window

    def _pool(self) -> str:
        return f"rolling_attention:{self.window}"
