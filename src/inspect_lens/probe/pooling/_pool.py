"""How the scores of many tokens become one number: by a rule, or by what a neural probe learned.

The rules are classes in `spec`, which judges requests by them. What a neural probe computes is
written once, for numpy, which scores, and for torch, which trains: both have the functions that are
used here, under the same names.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from itertools import repeat
from typing import Any, Final, Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pydantic import Field

from inspect_lens.errors import SpecError
from inspect_lens.spec import POOLS, SENTENCE_POOL, Pool, Value, parse_pool

__all__ = [
    "LEARNED_POOLS",
    "POOLS",
    "SENTENCE_POOL",
    "HeadOutputs",
    "HeadSpec",
    "Pool",
    "StreamingPool",
    "first_crossing",
    "head_outputs",
    "is_learned",
    "parse_head_pool",
    "parse_pool",
    "pool_head",
    "pool_heads",
    "pool_scores",
    "running_pool",
    "sentence_ends",
    "token_values",
]

_SENTENCE_END = re.compile(r"[.!?](?:[\"')\]]*)\s*$|\n\s*$")


def _checked(scores: ArrayLike) -> NDArray[np.float64]:
    values = np.asarray(scores, dtype=np.float64)
    if values.ndim != 1 or values.size == 0:
        raise SpecError(
            f"scores: shape {values.shape}; allowed is (tokens,) with at least one token; choose "
            "positions that exist in this sample, or leave it unscored"
        )
    if math.isnan(values.min()):  # as it is if one of them is
        raise SpecError(
            f"scores: {int(np.isnan(values).sum())} of {values.size} tokens are NaN; allowed are "
            "numbers; the activations are damaged"
        )
    return values


def _marks(values: NDArray[np.float64], pool: Pool, ends: ArrayLike | None) -> Iterable[bool]:
    """Of each score, whether a sentence ends with its token."""
    if pool.name != SENTENCE_POOL:
        return repeat(False)
    marks = None if ends is None else np.asarray(ends, dtype=bool)
    if marks is None or marks.shape != values.shape:
        raise SpecError(
            f"ends: {'not given' if marks is None else f'shape {marks.shape}'} for {values.size} "
            f"tokens; {SENTENCE_POOL} allows one bool per token; make them with "
            "sentence_ends(pieces)"
        )
    found: list[bool] = marks.tolist()
    return found


def pool_scores(
    scores: ArrayLike, pool: str | Pool = "mean", *, ends: ArrayLike | None = None
) -> float:
    """Make one score of the token scores of a sample, bit-equal to that of `StreamingPool`.

    A width larger than the number of tokens is cut to it.

    Args:
        scores: (tokens,) float, in the order of the tokens.
        pool: the rule.
        ends: (tokens,) bool, whether a sentence ends with the token, as `sentence_ends` tells;
            needed by `sentence_mean_max` only.

    Raises:
        SpecError: no token, a NaN, an unknown rule, or no sentence ends where they are needed.

    Example:
        ```python
        from inspect_lens.probe import pool_scores

        assert pool_scores([1.0, 2.0, 6.0]) == 3.0
        assert pool_scores([1.0, 2.0, 6.0], "max") == 6.0
        assert pool_scores([1.0, 2.0, 6.0], "top_k_mean:2") == 4.0
        ```
    """
    if pool == "mean":
        # The usual case, in the order of the tokens: what adding one by one makes, bit by bit.
        values = _checked(scores)
        return float(np.cumsum(values)[-1]) / len(values)
    if np.size(scores) == 0:
        _checked(scores)
    return StreamingPool(pool).update(scores, ends=ends).value


class StreamingPool:
    """Pools token scores while tokens arrive; memory does not grow.

    Args:
        pool: the rule.

    Raises:
        SpecError: an unknown rule.

    Example:
        ```python
        from inspect_lens.probe import StreamingPool, pool_scores

        stream = StreamingPool("top_k_mean:2")
        for score in (0.1, 2.0, -1.0, 1.0):
            stream.update([score])
        assert stream.value == pool_scores([0.1, 2.0, -1.0, 1.0], "top_k_mean:2") == 1.5
        ```
    """

    def __init__(self, pool: str | Pool = "mean") -> None:
        self.pool = pool if isinstance(pool, Pool) else parse_pool(pool)
        self.n = 0
        self._rule = self.pool.begin()

    def update(self, scores: ArrayLike, *, ends: ArrayLike | None = None) -> StreamingPool:
        """Take the next tokens.

        Args:
            scores: (tokens,) float; any number of them, also none.
            ends: (tokens,) bool, sentence ends; for `sentence_mean_max` only.

        Raises:
            SpecError: a NaN, or no sentence ends where they are needed.
        """
        if np.size(scores) == 0:
            return self
        values = _checked(scores)
        self._rule.add_all(values.tolist(), _marks(values, self.pool, ends))
        self.n += values.size
        return self

    @property
    def value(self) -> float:
        """The pooled score of all tokens so far; SpecError where there was none yet."""
        if self.n == 0:
            raise SpecError(
                "StreamingPool: no token yet; allowed is a value after at least one; call update "
                "with scores first"
            )
        return self._rule.value


def running_pool(
    scores: ArrayLike, pool: str | Pool = "mean", *, ends: ArrayLike | None = None
) -> NDArray[np.float64]:
    """The pooled score (tokens,) after each token: what a monitor sees while the model writes.

    Args:
        scores: (tokens,) float.
        pool: the rule; `last` gives the scores themselves.
        ends: (tokens,) bool, sentence ends; for `sentence_mean_max` only.

    Raises:
        SpecError: as `pool_scores`.

    Example:
        ```python
        from inspect_lens.probe import running_pool

        assert running_pool([1.0, 3.0, 2.0], "mean").tolist() == [1.0, 2.0, 2.0]
        assert running_pool([1.0, 3.0, 2.0], "max").tolist() == [1.0, 3.0, 3.0]
        ```
    """
    values = _checked(scores)
    rule = pool if isinstance(pool, Pool) else parse_pool(pool)
    state, made = rule.begin(), np.empty(values.size)
    marks = _marks(values, rule, ends)
    for i, (score, end) in enumerate(zip(values.tolist(), marks, strict=False)):
        state.add(score, end)
        made[i] = state.value
    return made


def first_crossing(
    scores: ArrayLike, threshold: float, *, pool: str | Pool = "last", ends: ArrayLike | None = None
) -> int | None:
    """The token, from 0, at which a monitor first raises the alarm; None where there is none.

    Args:
        scores: (tokens,) float.
        threshold: the alarm is raised strictly above it.
        pool: what the monitor compares: `last` the token's own score, `ema` a smoothed one,
            or any other rule over the tokens so far.
        ends: (tokens,) bool, sentence ends; for `sentence_mean_max` only.

    Raises:
        SpecError: as `pool_scores`.

    Example:
        ```python
        from inspect_lens.probe import first_crossing

        assert first_crossing([0.0, 0.4, 2.0, 0.1], threshold=1.0) == 2
        assert first_crossing([0.0, 0.4, 2.0, 0.1], threshold=1.0, pool="mean") is None
        ```
    """
    above = np.flatnonzero(running_pool(scores, pool, ends=ends) > threshold)
    return int(above[0]) if above.size else None


def sentence_ends(pieces: list[str] | tuple[str, ...]) -> NDArray[np.bool_]:
    """Tell with which tokens (tokens,) a sentence ends.

    A sentence ends with a token that ends in `.`, `!` or `?` (closing quotes and brackets may
    follow) when the next token begins with white space or there is none, and with a line break.

    Args:
        pieces: text of each token, in order.

    Example:
        ```python
        from inspect_lens.probe import sentence_ends

        assert sentence_ends(["It", " is", ".", " Yes", "!"]).tolist() == [0, 0, 1, 0, 1]
        ```
    """
    following = [*pieces[1:], " "]
    return np.array(
        [
            bool(_SENTENCE_END.search(piece))
            and (piece[-1:].isspace() or after[:1].isspace() or not after)
            for piece, after in zip(pieces, following, strict=True)
        ],
        dtype=bool,
    )


LEARNED_POOLS: Final = ("attention", "multimax", "rolling_attention", "bipolar")
"""Pools that need what a neural probe makes of tokens; `rolling_attention` takes a window."""

_WINDOW: Final = 10
_NORM_EPSILON: Final = 1e-5  # as torch's LayerNorm has it
_NEVER: Final = -1e9  # instead of -inf: a window may hold no token at all
Floats = NDArray[np.float64]


def is_learned(pool: str | Pool) -> bool:
    """Whether a pool needs the queries and values of a neural probe.

    Args:
        pool: a rule, or how it is written.

    Example:
        ```python
        from inspect_lens.probe import is_learned

        assert is_learned("rolling_attention:10")
        assert not is_learned("top_k_mean:3")
        ```
    """
    return str(pool).partition(":")[0] in LEARNED_POOLS


class HeadSpec(Value):
    """Settings of a neural probe apart from weights and pool."""

    temperature: float = 1.0
    """Queries are multiplied by it; 1/sqrt(hidden) for scaled attention."""
    gate: bool = False
    """Whether values pass through tanh."""
    top_k: int = Field(default=0, ge=0)
    """Units of the last ReLU layer that a token keeps, the largest ones (TopK); 0 keeps all."""
    activation: Literal["relu", "square"] = "relu"
    """What layers before the heads end with; the square of a product makes a bilinear form."""
    layer_norm: bool = False
    """Whether each token is brought to mean 0 and variance 1 over its dimensions first."""


class HeadOutputs(NamedTuple):
    """Queries and values of a neural probe, (tokens, heads) float64, which its pool reads."""

    query: Floats
    """Attention logits, without the positional part."""
    value: Floats


def parse_head_pool(value: str) -> Pool:
    """Read the pool of a neural probe; a window is filled in.

    Args:
        value: `attention` (softmax over the tokens), `multimax` (largest value per head),
            `rolling_attention:10` (largest attention value of a window), `bipolar` (largest and
            smallest value per head, each with a weight), or a pool that `parse_pool` reads, over
            token scores.

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
        f"pool={value!r}; allowed are {', '.join(LEARNED_POOLS)}, one also with a window as in "
        f"rolling_attention:10, and {', '.join(POOLS)}; correct the name"
    )


def head_outputs(
    tensors: Mapping[str, Any], spec: HeadSpec, x: Any, *, xp: Any = np
) -> HeadOutputs:
    """Queries and values (…, tokens, heads) of tokens; queries are 0 where the probe has none.

    Args:
        tensors: `mean`, `scale` (hidden,), both missing for rows that are standardised already;
            any layers `w0`, `b0`, `w1`, … of a network (width, previous width), with `t0`, `t1`, …
            (width,) what a unit has to exceed not to be 0 (JumpReLU); `value` (heads, width) and
            `value_bias` (heads,), if any; for attention `query` of the shape of `value`; and for
            gated values `gate` of that shape and `gate_bias` (heads,), whose softplus multiplies
            them.
        spec: temperature, gate, activation, and how many units are kept.
        x: (…, tokens, hidden) residual stream.
        xp: numpy, or torch for tensors, which cannot keep the largest units (`HeadSpec.top_k`).

    Example:
        ```python
        import numpy as np

        from inspect_lens.probe import HeadSpec, head_outputs

        weights = {"mean": np.zeros(4), "scale": np.ones(4), "value": np.ones((2, 4))}  # two heads
        out = head_outputs(weights, HeadSpec(), np.ones((3, 4)))  # three tokens, hidden 4
        assert out.value.tolist() == [[4.0, 4.0]] * 3
        ```
    """
    z = (x - tensors["mean"]) / tensors["scale"] if "mean" in tensors else x
    if spec.layer_norm:
        centred = z - z.mean(-1)[..., None]
        z = centred / xp.sqrt((centred**2).mean(-1)[..., None] + _NORM_EPSILON)
    layer = 0
    while f"w{layer}" in tensors:
        inner = z @ tensors[f"w{layer}"].T + tensors[f"b{layer}"]
        z = inner * inner if spec.activation == "square" else xp.clip(inner, 0.0, None)
        if f"t{layer}" in tensors:
            z = xp.where(inner > tensors[f"t{layer}"], z, 0.0)
        layer += 1
    if layer and 0 < spec.top_k < z.shape[-1]:
        least = np.partition(z, z.shape[-1] - spec.top_k, axis=-1)[..., -spec.top_k, None]
        z = np.where(z >= least, z, 0.0)
    value = z @ tensors["value"].T
    query = z @ tensors["query"].T * spec.temperature if "query" in tensors else 0.0 * value
    if "value_bias" in tensors:
        value = value + tensors["value_bias"]
    if "gate" in tensors:
        opening = z @ tensors["gate"].T + tensors["gate_bias"]
        value = value * xp.logaddexp(0.0 * opening, opening)
    return HeadOutputs(query, xp.tanh(value) if spec.gate else value)


def token_values(out: HeadOutputs, tensors: Mapping[str, Any]) -> Any:
    """Scores of tokens (…, tokens): what a learned pool makes of each alone.

    Args:
        out: (…, tokens, heads) each.
        tensors: of the probe: `bias`, and `output` for the pool `bipolar`.

    Example:
        ```python
        import numpy as np

        from inspect_lens.probe import HeadOutputs, token_values

        out = HeadOutputs(query=np.zeros((2, 1)), value=np.array([[1.0], [3.0]]))
        assert token_values(out, {"bias": np.array([0.5])}).tolist() == [1.5, 3.5]
        ```
    """
    value = out.value
    if "output" in tensors:
        value = value * (tensors["output"][0] - tensors["output"][1])
    return value.sum(-1) + tensors["bias"][0]


def pool_heads(
    out: HeadOutputs,
    pool: Pool,
    tensors: Mapping[str, Any],
    mask: Any,
    *,
    xp: Any = np,
    sharpness: float | None = None,
    drop: Callable[[Any], Any] | None = None,
) -> Any:
    """Scores (samples,) by a learned pool, or the mean.

    Args:
        out: (samples, tokens, heads) each.
        pool: the rule.
        tensors: of the probe: `bias` (1,), added in the end; `position` (heads,), if any, slope of
            the attention logits over the token's index; and for `bipolar` the `output` (2, heads),
            weights of the largest values and of the smallest ones with their sign turned.
        mask: (samples, tokens) bool, True where there is a token; they come first.
        xp: numpy, or torch for tensors.
        sharpness: of a smooth maximum for `multimax`, whose gradient reaches all tokens; None
            takes the maximum.
        drop: what is done to attention weights while training.

    Example:
        ```python
        import numpy as np

        from inspect_lens.probe import HeadOutputs, parse_head_pool, pool_heads

        values = np.array([[[1.0], [3.0], [9.0]]])  # one sample, three tokens, one head
        out = HeadOutputs(query=np.zeros((1, 3, 1)), value=values)
        there = np.array([[True, True, False]])  # the third is padding
        rule = parse_head_pool("multimax")
        assert pool_heads(out, rule, {"bias": np.array([0.5])}, there).tolist() == [3.5]
        ```
    """
    real, value, bias = mask[..., None], out.value, tensors["bias"][0]
    if pool.name == "multimax" and sharpness is not None:
        return _attend(xp.where(real, sharpness * value, _NEVER), value, xp).sum(axis=-1) + bias
    if pool.name == "multimax":
        return xp.amax(xp.where(real, value, _NEVER), axis=-2).sum(axis=-1) + bias
    if pool.name == "bipolar":
        top, low = (
            xp.amax(xp.where(real, sign * value, _NEVER), axis=-2) * weight
            for sign, weight in zip((1.0, -1.0), tensors["output"], strict=True)
        )
        return (top + low).sum(axis=-1) + bias
    if pool.name == "mean":
        kept = xp.where(real, value, 0.0).sum(axis=-1).sum(axis=-1)
        return kept / mask.sum(axis=-1) + bias
    query = out.query
    if "position" in tensors:
        query = query + _range(0, query.shape[-2], query)[:, None] * tensors["position"]
    query = xp.where(real, query, _NEVER)
    if pool.name == "attention":
        return _attend(query, value, xp, drop).sum(axis=-1) + bias
    width = min(pool.width, value.shape[-2])
    mixed = _attend(_windows(query, width), _windows(value, width), xp, axis=-1)
    # A window that reaches into the padding has not come yet; a sample shorter than one has one.
    length = xp.clip(mask.sum(axis=-1), width, None)
    ends = _range(width, value.shape[-2] + 1, value)
    best = xp.where(ends[None] <= length[:, None], mixed.sum(axis=-1), _NEVER)
    return xp.amax(best, axis=-1) + bias


def pool_head(
    out: HeadOutputs, pool: Pool, tensors: Mapping[str, Any], *, ends: ArrayLike | None = None
) -> float:
    """The score of a sample.

    Args:
        out: of all tokens, at least one.
        pool: the rule.
        tensors: of the probe, as `pool_heads` takes them.
        ends: (tokens,) bool, sentence ends, where the pool needs them.

    Example:
        ```python
        import numpy as np

        from inspect_lens.probe import HeadOutputs, parse_head_pool, pool_head

        values = np.array([[1.0], [3.0]])  # two tokens, one head
        out = HeadOutputs(query=np.zeros((2, 1)), value=values)
        rule = parse_head_pool("attention")
        assert pool_head(out, rule, {"bias": np.array([0.5])}) == 2.5
        ```
    """
    if not is_learned(pool):
        return pool_scores(token_values(out, tensors), pool, ends=ends)
    whole = np.ones((1, len(out.value)), dtype=bool)
    one = HeadOutputs(out.query[None], out.value[None])
    return float(pool_heads(one, pool, tensors, whole)[0])


def _windows(values: Any, width: int) -> Any:
    """All windows (…, windows, heads, width) of tokens (…, tokens, heads)."""
    if isinstance(values, np.ndarray):
        return np.lib.stride_tricks.sliding_window_view(values, width, axis=-2)
    return values.unfold(-2, width, 1)


def _range(first: int, end: int, like: Any) -> Any:
    """Whole numbers (end - first,), where the values are."""
    made = np.arange(first, end)
    return made if isinstance(like, np.ndarray) else like.new_tensor(made)


def _attend(
    query: Any, value: Any, xp: Any = np, drop: Callable[[Any], Any] | None = None, axis: int = -2
) -> Any:
    """Softmax-weighted mean over tokens: (…, heads) of (…, tokens, heads)."""
    weights = xp.exp(query - xp.amax(query, axis=axis, keepdims=True))
    share = weights / weights.sum(axis=axis, keepdims=True)
    return ((share if drop is None else drop(share)) * value).sum(axis=axis)
