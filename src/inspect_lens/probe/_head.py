"""What a neural probe computes, in numpy: per-token queries and values, then a learned pool.

This is the definition; `train/_torch_head.py` is its differentiable twin, and `StreamingHead`
computes the same from tokens that arrive in pieces.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pydantic import BaseModel, ConfigDict, Field

from inspect_lens.errors import SpecError

from ._pool import POOLS, Pool, parse_pool, pool_scores
from ._streaming import StreamingPool

__all__ = [
    "LEARNED_POOLS",
    "HeadSpec",
    "StreamingHead",
    "head_outputs",
    "parse_head_pool",
    "pool_head",
]

LEARNED_POOLS: Final = ("attention", "multimax", "rolling_attention")
"""Pools that need the queries and values of a neural probe; the last takes a window."""

_WINDOW: Final = 10
Floats = NDArray[np.float64]


class HeadSpec(BaseModel):
    """Settings of a neural probe apart from weights and pool: temperature, gate, top-k units."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    temperature: float = 1.0
    """Queries are multiplied by it; 1/sqrt(hidden) for scaled attention."""
    gate: bool = False
    """Whether values pass through tanh."""
    top_k: int = Field(default=0, ge=0)
    """Units of the last ReLU layer that a token keeps, the largest ones (TopK); 0 keeps all."""


class HeadOutputs(NamedTuple):
    """Queries and values of a neural probe, (tokens, heads) float64, which its pool reads."""

    query: Floats
    """Attention logits, without the positional part."""
    value: Floats


def parse_head_pool(value: str) -> Pool:
    """Read the pool of a neural probe.

    Args:
        value: `attention` (softmax over the tokens), `multimax` (largest value per head),
            `rolling_attention:10` (largest attention value of a window), or a pool that
            `parse_pool` reads, over token scores.

    Returns:
        The rule, its window filled in.

    Raises:
        SpecError: anything else.

    Example:
        ```python
        from inspect_lens.probe import parse_head_pool

        assert str(parse_head_pool("rolling_attention:5")) == "rolling_attention:5"
        ```
    """
    name, colon, width = str(value).partition(":")
    if name not in LEARNED_POOLS:
        return parse_pool(value)
    if name != "rolling_attention" and not colon:
        return Pool(name)
    if name == "rolling_attention" and (not colon or (width.isdecimal() and int(width) > 0)):
        return Pool(name, int(width) if colon else _WINDOW)
    raise SpecError(
        f"pool={value!r}; allowed are {', '.join(LEARNED_POOLS)}, the last also with a window as "
        f"in rolling_attention:10, and {', '.join(POOLS)}; correct the name"
    )


def head_outputs(tensors: Mapping[str, Floats], spec: HeadSpec, x: Floats) -> HeadOutputs:
    """Queries and values of tokens.

    Args:
        tensors: `mean`, `scale` (hidden,), any layers `w0`, `b0`, `w1`, … of a ReLU network
            (width, previous width), with `t0`, `t1`, … (width,) what a unit has to exceed not to
            be 0 (JumpReLU), `value` (heads, width), and for attention `query` of the
            same shape.
        spec: temperature, gate, and how many units are kept.
        x: (tokens, hidden) raw residual stream.

    Returns:
        (tokens, heads) each; queries are 0 where the probe has none.

    Example:
        ```python
        import numpy as np

        from inspect_lens.probe import HeadSpec, head_outputs

        weights = {"mean": np.zeros(4), "scale": np.ones(4), "value": np.ones((2, 4))}  # two heads
        out = head_outputs(weights, HeadSpec(), np.ones((3, 4)))  # three tokens, hidden 4
        assert out.value.tolist() == [[4.0, 4.0]] * 3
        ```
    """
    z = (x - tensors["mean"]) / tensors["scale"]
    layer = 0
    while f"w{layer}" in tensors:
        inner = z @ tensors[f"w{layer}"].T + tensors[f"b{layer}"]
        z = np.maximum(inner, 0.0)
        if f"t{layer}" in tensors:
            z = np.where(inner > tensors[f"t{layer}"], z, 0.0)
        layer += 1
    if layer and 0 < spec.top_k < z.shape[1]:
        least = np.partition(z, z.shape[1] - spec.top_k, axis=1)[:, -spec.top_k, None]
        z = np.where(z >= least, z, 0.0)
    value = z @ tensors["value"].T
    query = z @ tensors["query"].T * spec.temperature if "query" in tensors else 0.0 * value
    return HeadOutputs(query, np.tanh(value) if spec.gate else value)


def pool_head(
    out: HeadOutputs,
    pool: Pool,
    position: Floats | None,
    bias: float,
    *,
    ends: ArrayLike | None = None,
) -> float:
    """The score of a sample.

    Args:
        out: of all tokens, at least one.
        pool: the rule.
        position: (heads,) slope of the attention logits over the token's index, or None.
        bias: added in the end.
        ends: (tokens,) bool, sentence ends, where the pool needs them.

    Returns:
        One number.

    Example:
        ```python
        import numpy as np

        from inspect_lens.probe import HeadOutputs, parse_head_pool, pool_head

        values = np.array([[1.0], [3.0]])  # two tokens, one head
        out = HeadOutputs(query=np.zeros((2, 1)), value=values)
        assert pool_head(out, parse_head_pool("attention"), position=None, bias=0.5) == 2.5
        ```
    """
    query = _with_position(out.query, position, 0)
    if pool.name == "attention":
        return float(_attend(query, out.value).sum()) + bias
    if pool.name == "multimax":
        return float(out.value.max(axis=0).sum()) + bias
    if pool.name == "rolling_attention":
        width = min(pool.width, len(query))
        # One window after the other: a thousand tokens are a thousand small softmaxes.
        ends = range(width, len(query) + 1)
        values = [_attend(query[e - width : e], out.value[e - width : e]).sum() for e in ends]
        return float(max(values)) + bias
    return pool_scores(out.value.sum(axis=1) + bias, pool, ends=ends)


def _with_position(query: Floats, position: Floats | None, first: int) -> Floats:
    if position is None:
        return query
    index = np.arange(first, first + len(query), dtype=np.float64)
    return query + index[:, None] * position


def _attend(query: Floats, value: Floats) -> Floats:
    """Softmax-weighted mean over tokens, (heads,)."""
    weights = np.exp(query - query.max(axis=0))
    mixed: Floats = (weights * value).sum(axis=0) / weights.sum(axis=0)
    return mixed


class StreamingHead:
    """The pool of a neural probe for tokens that arrive in pieces, in a state of fixed size.

    Args:
        pool: the rule.
        position: (heads,) slope over the token's index, or None.
        bias: added in the end.

    Example:
        ```python
        import numpy as np

        from inspect_lens.probe import ProbeCard
        from inspect_lens.train import ActivationSet, AttentionLiteProbe, fit_on

        train = ActivationSet.load("acts/train.safetensors")
        fitted = fit_on(AttentionLiteProbe(steps=20), train, 1)
        probe = fitted.to_probe(ProbeCard(name="mine/lite", layers=(1,), hidden=32, kind="neural"))
        acts = train.acts[0][1:2]  # (1, tokens, hidden)
        stream = probe.stream()
        for token in range(acts.shape[1]):  # as the text is written
            stream.update(probe.outputs(acts[:, token : token + 1]))
        assert np.isclose(stream.value, probe.score(acts))
        ```
    """

    def __init__(self, pool: Pool, position: Floats | None, bias: float) -> None:
        self.pool, self.position, self.bias, self.n = pool, position, bias, 0
        self._top = self._weight = self._total = np.zeros(0)
        self._best = -np.inf
        self._window: deque[tuple[Floats, Floats]] = deque(maxlen=pool.width)
        self._plain = None if pool.name in LEARNED_POOLS else StreamingPool(pool)

    def update(self, out: HeadOutputs, *, ends: ArrayLike | None = None) -> StreamingHead:
        """Take the outputs of the next tokens.

        Args:
            out: (tokens, heads) each; any number of tokens, also none.
            ends: (tokens,) bool, sentence ends, where the pool needs them.

        Returns:
            self.
        """
        if self._plain is not None:
            self._plain.update(out.value.sum(axis=1) + self.bias, ends=ends)
        elif len(out.value):
            query = _with_position(out.query, self.position, self.n)
            getattr(self, f"_{self.pool.name}")(query, out.value)
        self.n += len(out.value)
        return self

    @property
    def value(self) -> float:
        """The score of all tokens so far.

        Raises:
            SpecError: there was no token yet.
        """
        if self._plain is not None:
            return self._plain.value
        if self.n == 0:
            raise SpecError(
                "StreamingHead: no token yet; allowed is a value after at least one; call update "
                "first"
            )
        if self.pool.name == "attention":
            return float((self._total / self._weight).sum()) + self.bias
        if self.pool.name == "multimax":
            return float(self._top.sum()) + self.bias
        full = len(self._window) == self._window.maxlen
        return (self._best if full else self._window_value()) + self.bias

    def _attention(self, query: Floats, value: Floats) -> None:
        top = query.max(axis=0)
        if self.n:
            top = np.maximum(top, self._top)
            shrink = np.exp(self._top - top)
            self._weight, self._total = self._weight * shrink, self._total * shrink
        else:
            self._weight = self._total = np.zeros_like(top)
        weights = np.exp(query - top)
        self._top = top
        self._weight = self._weight + weights.sum(axis=0)
        self._total = self._total + (weights * value).sum(axis=0)

    def _multimax(self, query: Floats, value: Floats) -> None:
        top = value.max(axis=0)
        self._top = np.maximum(top, self._top) if self.n else top

    def _rolling_attention(self, query: Floats, value: Floats) -> None:
        for q, v in zip(query, value, strict=True):
            self._window.append((q, v))
            if len(self._window) == self._window.maxlen:
                self._best = max(self._best, self._window_value())

    def _window_value(self) -> float:
        query, value = (np.stack(side) for side in zip(*self._window, strict=True))
        return float(_attend(query, value).sum())
