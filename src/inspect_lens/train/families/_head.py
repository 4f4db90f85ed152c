"""The neural family: one head over tokens, whose settings make the probes of several sources.

What a head computes is in `probe/pooling/_pool.py`, for numpy and torch alike; here it is trained.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Final, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from sklearn.model_selection import GroupShuffleSplit, StratifiedShuffleSplit
from sklearn.utils.validation import check_X_y
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

from inspect_lens._base.arguments import judged_value
from inspect_lens.errors import SpecError
from inspect_lens.probe import (
    HeadSpec,
    NeuralProbe,
    ProbeCard,
    head_outputs,
    is_learned,
    parse_head_pool,
    pool_head,
    pool_heads,
    token_values,
)
from inspect_lens.spec import check_word

from ._binary import BinaryEstimator, Targets

__all__ = ["HeadProbe"]

Sequences = Sequence[NDArray[np.floating[Any]]]
Tensors = dict[str, NDArray[np.float32]]
_VALIDATE_FROM: Final = 40  # fewer samples are all needed for the fit
_SHARPNESS: Final = 1.0  # of the smooth maximum that stands for MultiMax while training
_SPREAD_TEMPERATURE: Final = 2.0  # of the weights of windows in their variance, arXiv:2604.14865


@dataclass(kw_only=True, eq=False, repr=False)
class HeadProbe(BinaryEstimator):
    """Small network on the tokens of a sample, trained by torch: ReLU layers, heads, a pool.

    `make_estimator` makes one with the settings of a source, by name:

    | name | what it is | source |
    |---|---|---|
    | `mlp` | a ReLU layer on single tokens, whose scores are pooled afterwards | arXiv:2601.11516 |
    | `attention` | heads that attend, with a slope over positions | EleutherAI attention-probes |
    | `attention-lite` | one head of scaled attention over one linear score | arXiv:2506.10805 |
    | `attention-gdm` | two ReLU layers of 100, then 10 heads that attend | arXiv:2601.11516 |
    | `multimax` | the same, then the largest value of each head | arXiv:2601.11516 |
    | `rolling-attention` | the same, then the largest value of 10 tokens | arXiv:2601.11516 |
    | `gated-bipolar` | gated values, of each the largest and the smallest | arXiv:2601.11516 |
    | `bilinear` | a quadratic form on single tokens, of rank 32 | arXiv:2509.26238 |
    | `segment-coherence` | a score per token, trained on the 8 best windows | arXiv:2604.14865 |

    The last is used as the largest moving average of its token scores (`ema_max:0.1`). `bilinear`
    has no linear part, as in the package probelab. `fit` takes sequences, and a 2-D `X` (rows,
    hidden) as sequences of one token. It holds a fifth of 40 or more samples back for early
    stopping, whole groups where groups are given.

    Args:
        pool: `attention`, `multimax`, `bipolar`, `rolling_attention:10` or `mean`, and with
            `segment` one that is not learned; empty learns single tokens, whose scores the pool of
            the card puts together.
        mlp_sizes: widths of layers before the heads.
        activation: what these layers end with: `relu`, or `square`, without a bias.
        layer_norm: bring each token to mean 0 and variance 1, in place of scaling by the data.
        heads: how many; their values are summed.
        queries: what the queries of attention are at first, `zeros` or `random`.
        scaled: divide the logits of attention by the root of the width.
        position: learn a slope of the attention logits over the token's index.
        gate: pass values through tanh.
        softplus_gate: multiply values by the softplus of a gate that is learned beside them.
        l1: penalty on the absolute weights of values.
        orthogonal: penalty on the squared difference of their products from the identity.
        segment: tokens of a window, over which token scores are averaged while training; the
            `n_segments` windows with the highest means make the score of a sample, so that one
            token alone decides nothing. A shorter sample counts with its mean. 0: no windows.
        n_segments: windows that make the score.
        segment_variance: penalty on the variance of window means in samples of the lower class.
        dropout: share of attention weights dropped while training.
        lr: learning rate of AdamW.
        weight_decay: of AdamW.
        steps: at most.
        batch: sequences per step.
        patience: looks without a better validation loss before training stops.
        device: where torch computes, such as `cpu` or `cuda`.
        random_state: of weights, batches and the split for early stopping.
        origin: paper or code, for the card.

    Attributes:
        tensors_: weights, as of a `NeuralProbe`.
        losses_: (looks,) that early stopping looked at.

    Example:
        ```python
        from inspect_lens.train import ActivationSet, HeadProbe, make_estimator

        train, test = (ActivationSet.load(f"acts/{name}.safetensors") for name in ("train", "test"))
        estimator = make_estimator("attention", lr=1e-2, steps=100)  # few steps, to be quick
        estimator.fit(train.sequences(1), train.labels)  # per sample (tokens, hidden)
        assert estimator.score(test.sequences(1), test.labels) > 0.8

        own = HeadProbe(pool="multimax", heads=4, mlp_sizes=(16,), lr=3e-3, steps=150)
        own.fit(train.sequences(1), train.labels)
        assert own.decision_function(test.sequences(1)).shape == (len(test),)
        ```
    """

    tensors_: Tensors = field(init=False)
    losses_: NDArray[np.float64] = field(init=False)

    pool: str = "attention"
    mlp_sizes: tuple[int, ...] = ()
    heads: int = 1
    queries: Literal["zeros", "random"] = "random"
    scaled: bool = False
    position: bool = False
    gate: bool = False
    activation: Literal["relu", "square"] = "relu"
    layer_norm: bool = False
    softplus_gate: bool = False
    l1: float = 0.0
    orthogonal: float = 0.0
    segment: int = 0
    n_segments: int = 8
    segment_variance: float = 0.0
    dropout: float = 0.0
    lr: float = 1e-3
    weight_decay: float = 0.0
    steps: int = 1000
    batch: int = 64
    patience: int = 50
    device: str = "cpu"
    random_state: int = 0
    origin: str = ""

    @property
    def reads(self) -> Literal["tokens", "sequences"]:  # type: ignore[override]
        """Whether `fit` takes one row per token or one sequence per sample."""
        return "sequences" if self.pool else "tokens"

    @property
    def source(self) -> str:  # type: ignore[override]
        """Where the method comes from, for the card."""
        return self.origin

    @property
    def method(self) -> str:  # type: ignore[override]
        """How the probe is found, for the card."""
        heads = f"{self.heads} heads" if self.heads > 1 else "one head"
        kind = "ReLU" if self.activation == "relu" else "squared"
        before = f" on {len(self.mlp_sizes)} {kind} layers" if self.mlp_sizes else ""
        if self.segment:
            before += f", trained on the {self.n_segments} highest windows of {self.segment} tokens"
        return f"{heads}{before}, pooled by {self.pool}" if self.pool else f"network{before}"

    def _fit(self, x: Sequences, target: Targets) -> None:
        self._check_settings()
        positive, groups, weight = target
        each = np.ones(len(positive)) if weight is None else weight / weight.mean()
        data, width = _Labelled(x, positive, each), self.n_features_in_
        plain = {"mean": np.zeros(width, np.float32), "scale": np.ones(width, np.float32)}
        fixed = plain if self.layer_norm else _scaler(data)
        if self.activation == "square":
            fixed |= {f"b{i}": np.zeros(n, np.float32) for i, n in enumerate(self.mlp_sizes)}
        kept, held = _hold_back(positive, groups, seed=self.random_state)
        validation = data.part(held) if len(held) else None
        trained, self.losses_ = _train(self, data.part(kept), validation, fixed)
        self.tensors_ = trained | fixed

    def _check_settings(self) -> None:
        """Refuse settings that nothing would act on: the card lists them all."""
        check_word("queries", self.queries, ("zeros", "random"))
        sizes = self.mlp_sizes
        if not isinstance(sizes, tuple | list) or not all(
            judged_value("mlp_sizes", size, int) > 0 for size in sizes
        ):
            raise SpecError(f"mlp_sizes={sizes!r}; allowed are widths above 0, such as (16,)")
        check_word("activation", self.activation, ("relu", "square"))
        if self.activation == "square" and not sizes:
            raise SpecError(
                "activation='square': needs the widths of layers; give mlp_sizes, such as (16,)"
            )
        for name in ("heads", "steps", "batch", "n_segments"):
            if getattr(self, name) < 1:
                raise SpecError(f"{name}={getattr(self, name)}; allowed is 1 or more")
        idle = [name for name in ("position", "scaled", "dropout") if getattr(self, name)]
        idle += ["queries"] if self.queries != "random" else []
        if idle and "attention" not in self.pool:
            raise SpecError(
                f"{', '.join(idle)}: of attention alone, and pool={self.pool!r}; leave them out, "
                "or pool by attention"
            )
        if not self.segment and (self.segment_variance or self.n_segments != 8):
            raise SpecError("n_segments, segment_variance: of windows; give segment, their length")
        plain = bool(self.pool) and not is_learned(parse_head_pool(self.pool))
        if self.segment < 0 or (plain != bool(self.segment) and self.pool != "mean"):
            raise SpecError(
                f"segment={self.segment}, pool={self.pool!r}; allowed is a window from 1 token on "
                "with a pool of token scores, such as ema_max:0.1, and none with a learned pool"
            )

    def _decide(self, x: Sequences) -> NDArray[np.float64]:
        wide = {name: t.astype(np.float64) for name, t in self.tensors_.items()}
        spec, rule = self.spec, parse_head_pool(self.pool or "mean")
        if all(len(s) == 1 for s in x):
            # One-token sequences, all in one product; every pool of one token is its value.
            out = head_outputs(wide, spec, np.concatenate(x).astype(np.float64))
            return np.asarray(token_values(out, wide))
        outputs = (head_outputs(wide, spec, s.astype(np.float64)) for s in x)
        return np.array([pool_head(out, rule, wide) for out in outputs])

    def _freeze(self, card: ProbeCard) -> NeuralProbe:
        facts = {"kind": "neural", "head": self.spec, "pool": self.pool or card.pool}
        return NeuralProbe(tensors=self.tensors_, card=card.model_copy(update=facts))

    @property
    def spec(self) -> HeadSpec:
        """Settings of the probe apart from weights and pool, once the width is known."""
        temperature = 1.0 / float(np.sqrt(self.n_features_in_)) if self.scaled else 1.0
        kept = {name: getattr(self, name) for name in ("gate", "activation", "layer_norm")}
        return HeadSpec(temperature=temperature, **kept)

    def start(self) -> Tensors:
        """Weights before the first step: layers, then what heads read of the last of them."""
        rng, width = np.random.default_rng(self.random_state), self.n_features_in_
        made: Tensors = {}
        for i, size in enumerate(self.mlp_sizes):
            bound = np.sqrt(6.0 / width)
            made[f"w{i}"] = rng.uniform(-bound, bound, (size, width)).astype(np.float32)
            if self.activation == "relu":
                made[f"b{i}"] = np.zeros(size, dtype=np.float32)
            width = size
        attends, heads = "attention" in self.pool, self.heads
        wanted = {"value": True, "query": attends, "gate": self.softplus_gate}
        for name in (name for name, is_wanted in wanted.items() if is_wanted):
            made[name] = (rng.normal(size=(heads, width)) / np.sqrt(width)).astype(np.float32)
        if self.softplus_gate:
            made["gate_bias"] = np.zeros(heads, dtype=np.float32)
        if self.pool == "bipolar":
            made["value_bias"] = np.zeros(heads, dtype=np.float32)
            made["output"] = (rng.normal(size=(2, heads)) / np.sqrt(heads)).astype(np.float32)
        if attends and self.queries == "zeros":
            made["query"] = np.zeros_like(made["query"])
        if attends and self.position:
            made["position"] = np.zeros(self.heads, dtype=np.float32)
        return made | {"bias": np.zeros(1, dtype=np.float32)}

    def describe(self) -> str:
        """Method and settings, for the card."""
        return super().describe().replace(f"origin={self.origin}, ", "")

    def _read(self, X: Any) -> Sequences:
        if not _is_ragged(X):
            return [row[None] for row in super()._read(X)]
        sequences = _sequences(X)
        width = sequences[0].shape[1]
        if width != self.n_features_in_:
            raise SpecError(
                f"X has {width} features, but {type(self).__name__} is expecting "
                f"{self.n_features_in_} features as input"
            )
        return sequences

    def _read_both(self, X: Any, y: ArrayLike) -> tuple[Sequences, NDArray[Any]]:
        if not _is_ragged(X):
            rows, labels = super()._read_both(X, y)
            return [row[None] for row in rows.astype(np.float32)], labels
        sequences = _sequences(X)
        self.n_features_in_ = sequences[0].shape[1]
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


def _sequences(X: Any) -> Sequences:
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
    return sequences


class _Labelled(NamedTuple):
    """Sequences (tokens, hidden), and for each its class and how much it counts."""

    sequences: Sequences
    positive: NDArray[np.bool_]
    weight: NDArray[np.float64]

    def part(self, picks: NDArray[np.int64]) -> _Labelled:
        return _Labelled(
            [self.sequences[i] for i in picks], self.positive[picks], self.weight[picks]
        )


def _scaler(data: _Labelled) -> Tensors:
    """Mean and standard deviation of all tokens, (hidden,) each; 1 for a constant column."""
    counted = list(zip(data.sequences, data.weight, strict=True))
    n = sum(w * len(s) for s, w in counted)
    mean = sum(w * s.sum(axis=0, dtype=np.float64) for s, w in counted) / n
    spread = np.sqrt(sum(w * ((s - mean) ** 2).sum(axis=0) for s, w in counted) / n)
    # What spreads less leaves the range of float32 when it is divided by its spread.
    scale = np.where(spread > 1e-12 * np.maximum(1.0, np.abs(mean)), spread, 1.0)
    return {"mean": mean.astype(np.float32), "scale": scale.astype(np.float32)}


def _hold_back(
    positive: NDArray[np.bool_], groups: NDArray[Any] | None, *, seed: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Indices to fit and to stop by; none of the latter when samples or groups are few."""
    n = positive.size
    everything = np.arange(n), np.arange(0)
    if n < _VALIDATE_FROM or min(positive.sum(), n - positive.sum()) < 5:
        return everything
    if groups is not None and len(set(groups.tolist())) < 5:
        return everything
    kind = StratifiedShuffleSplit if groups is None else GroupShuffleSplit
    splitter = kind(n_splits=1, test_size=0.2, random_state=seed)
    kept, held = next(splitter.split(np.zeros(n), positive, groups))
    both = all(0 < positive[side].sum() < len(side) for side in (kept, held))
    return (kept, held) if both else everything


Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def _train(
    how: HeadProbe, data: _Labelled, validation: _Labelled | None, constant: Tensors
) -> tuple[Tensors, NDArray[np.float64]]:
    """Weights that did best on the validation set, and the losses there."""
    spec, rule = how.spec, parse_head_pool(how.pool or "mean")
    fixed = {k: torch.from_numpy(v.copy()).to(how.device) for k, v in constant.items()}
    weights = {
        k: torch.from_numpy(v.copy()).to(how.device).requires_grad_()
        for k, v in how.start().items()
    }

    def drop(share: torch.Tensor) -> torch.Tensor:
        return functional.dropout(share, how.dropout)

    def loss_of(batch: Batch, train: bool) -> Any:
        x, mask, target, weight = batch
        tensors = weights | fixed
        out = head_outputs(tensors, spec, x, xp=torch)
        extra: Any = 0.0
        if how.segment:
            logits, spread = _coherent(token_values(out, tensors), mask, how)
            extra = how.segment_variance * (weight * (1.0 - target) * spread).mean()
        else:
            logits = pool_heads(
                out, rule, tensors, mask, xp=torch, sharpness=_SHARPNESS if train else None,
                drop=drop if train and how.dropout else None,
            )  # fmt: skip
        if train and (how.l1 or how.orthogonal):
            value = weights["value"]
            off = value @ value.T - torch.eye(how.heads, device=value.device)
            extra = extra + how.l1 * value.abs().sum() + how.orthogonal * (off**2).sum()
        return functional.binary_cross_entropy_with_logits(logits, target, weight) + extra

    optimiser = torch.optim.AdamW(list(weights.values()), lr=how.lr, weight_decay=how.weight_decay)
    rng, n_sequences = np.random.default_rng(how.random_state), len(data.sequences)
    # Random batches without end; each pass shows every sequence once.
    orders = (rng.permutation(n_sequences) for _ in count())
    endless = (b for order in orders for b in _batches(data, order, how.batch, how.device))
    look = max(1, min(how.steps // 50, 10))
    best, kept, since, losses = np.inf, {k: v.detach().clone() for k, v in weights.items()}, 0, []
    with torch.random.fork_rng():  # the caller's numbers stay the caller's
        torch.manual_seed(how.random_state)  # dropout only; all else draws from numpy
        for number in range(how.steps):
            optimiser.zero_grad()
            step_loss = loss_of(next(endless), True)
            step_loss.backward()
            optimiser.step()
            if number % look and number != how.steps - 1:
                continue
            loss = float(step_loss.detach())
            if validation:
                n = len(validation.sequences)
                with torch.no_grad():
                    parts = _batches(validation, np.arange(n), how.batch, how.device)
                    loss = float(sum(loss_of(b, False).cpu() * len(b[0]) for b in parts)) / n
            losses.append(loss)
            if loss < best - 1e-6 or validation is None:
                best, since = loss, 0
                kept = {k: v.detach().clone() for k, v in weights.items()}
            else:
                since += 1
                if since >= how.patience:
                    break
    if not np.isfinite(best):
        raise SpecError(
            f"lr={how.lr:g}: training diverged (loss {losses[-1]}); allowed is a rate at which the "
            "loss stays finite; use a smaller lr, or look for outliers in the activations"
        )
    return {k: v.cpu().numpy() for k, v in kept.items()}, np.array(losses)


def _coherent(
    tokens: torch.Tensor, mask: torch.Tensor, how: HeadProbe
) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean of the highest window means of each sample, and how much all of them vary."""
    length = mask.sum(dim=1)
    whole = torch.where(mask, tokens, 0.0).sum(dim=1) / length
    if tokens.shape[1] < how.segment:
        return whole, torch.zeros_like(whole)
    means = tokens.unfold(1, how.segment, 1).mean(dim=-1)
    last = torch.arange(how.segment, tokens.shape[1] + 1, device=tokens.device)
    there = last <= length[:, None]
    highest = torch.where(there, means, -torch.inf).sort(dim=1, descending=True).values
    highest, n = highest[:, : how.n_segments], there.sum(dim=1).clamp(max=how.n_segments)
    picked = torch.arange(highest.shape[1], device=tokens.device) < n[:, None]
    score = torch.where(picked, highest, 0.0).sum(dim=1) / n.clamp(min=1)
    share = torch.sigmoid(means / _SPREAD_TEMPERATURE) * there
    total = share.sum(dim=1).clamp(min=1e-8)
    centre = (share * means).sum(dim=1) / total
    spread = (share * (means - centre[:, None]) ** 2).sum(dim=1) / total
    return torch.where(n > 0, score, whole), spread


def _batches(data: _Labelled, order: NDArray[np.int64], size: int, device: str) -> Iterator[Batch]:
    """Sequences in an order: padded rows, which of them are tokens, class and weight."""
    for first in range(0, len(order), size):
        part = data.part(order[first : first + size])
        rows = pad_sequence([torch.tensor(s) for s in part.sequences], batch_first=True)
        lengths = torch.tensor([len(s) for s in part.sequences])
        mask = torch.arange(rows.shape[1]) < lengths[:, None]
        target, weight = (
            torch.from_numpy(v.astype(np.float32)) for v in (part.positive, part.weight)
        )
        yield rows.to(device), mask.to(device), target.to(device), weight.to(device)
