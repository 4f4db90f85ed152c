"""What a neural probe computes: per-token queries and values, then a learned pool.

Written once, for numpy, which scores, and for torch, which trains: both have the functions that are
used here, under the same names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pydantic import BaseModel, ConfigDict, Field

from inspect_lens.errors import SpecError
from inspect_lens.spec import POOLS, Pool, parse_pool

from ._pool import pool_scores

LEARNED_POOLS: Final = ("attention", "multimax", "rolling_attention")
"""Pools that need the queries and values of a neural probe; the last takes a window."""

_WINDOW: Final = 10
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


def head_outputs(
    tensors: Mapping[str, Any], spec: HeadSpec, x: Any, *, xp: Any = np
) -> HeadOutputs:
    """Queries and values of tokens.

    Args:
        tensors: `mean`, `scale` (hidden,), both missing for rows that are standardised already;
            any layers `w0`, `b0`, `w1`, … of a ReLU network (width, previous width), with `t0`,
            `t1`, … (width,) what a unit has to exceed not to be 0 (JumpReLU), `value` (heads,
            width), and for attention `query` of the same shape.
        spec: temperature, gate, and how many units are kept.
        x: (…, tokens, hidden) residual stream.
        xp: numpy, or torch for tensors, which cannot keep the largest units (`HeadSpec.top_k`).

    Returns:
        (…, tokens, heads) each; queries are 0 where the probe has none.

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
    layer = 0
    while f"w{layer}" in tensors:
        inner = z @ tensors[f"w{layer}"].T + tensors[f"b{layer}"]
        z = xp.clip(inner, 0.0, None)
        if f"t{layer}" in tensors:
            z = xp.where(inner > tensors[f"t{layer}"], z, 0.0)
        layer += 1
    if layer and 0 < spec.top_k < z.shape[-1]:
        least = np.partition(z, z.shape[-1] - spec.top_k, axis=-1)[..., -spec.top_k, None]
        z = np.where(z >= least, z, 0.0)
    value = z @ tensors["value"].T
    query = z @ tensors["query"].T * spec.temperature if "query" in tensors else 0.0 * value
    return HeadOutputs(query, xp.tanh(value) if spec.gate else value)


def pool_heads(
    out: HeadOutputs,
    pool: Pool,
    position: Any | None,
    bias: Any,
    mask: Any,
    *,
    xp: Any = np,
    sharpness: float | None = None,
    drop: Callable[[Any], Any] | None = None,
) -> Any:
    """Scores of samples by a learned pool, or the mean.

    Args:
        out: (samples, tokens, heads) each.
        pool: the rule.
        position: (heads,) slope of the attention logits over the token's index, or None.
        bias: added in the end.
        mask: (samples, tokens) bool, True where there is a token; they come first.
        xp: numpy, or torch for tensors.
        sharpness: of a smooth maximum for `multimax`, whose gradient reaches all tokens; None
            takes the maximum.
        drop: what is done to attention weights while training.

    Returns:
        (samples,) scores.

    Example:
        ```python
        import numpy as np

        from inspect_lens.probe import HeadOutputs, parse_head_pool, pool_heads

        values = np.array([[[1.0], [3.0], [9.0]]])  # one sample, three tokens, one head
        out = HeadOutputs(query=np.zeros((1, 3, 1)), value=values)
        there = np.array([[True, True, False]])  # the third is padding
        assert pool_heads(out, parse_head_pool("multimax"), None, 0.5, there).tolist() == [3.5]
        ```
    """
    real, value = mask[..., None], out.value
    if pool.name == "multimax":
        if sharpness is None:
            top = xp.amax(xp.where(real, value, _NEVER), axis=-2)
            return top.sum(axis=-1) + bias
        return _attend(xp.where(real, sharpness * value, _NEVER), value, xp).sum(axis=-1) + bias
    if pool.name == "mean":
        kept = xp.where(real, value, 0.0).sum(axis=-1).sum(axis=-1)
        return kept / mask.sum(axis=-1) + bias
    query = xp.where(real, _with_position(out.query, position), _NEVER)
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
    if not is_learned(pool):
        return pool_scores(out.value.sum(axis=1) + bias, pool, ends=ends)
    whole = np.ones((1, len(out.value)), dtype=bool)
    one = HeadOutputs(out.query[None], out.value[None])
    return float(pool_heads(one, pool, position, bias, whole)[0])


def _windows(values: Any, width: int) -> Any:
    """All windows (…, windows, heads, width) of tokens (…, tokens, heads)."""
    if isinstance(values, np.ndarray):
        return np.lib.stride_tricks.sliding_window_view(values, width, axis=-2)
    return values.unfold(-2, width, 1)


def _range(first: int, end: int, like: Any) -> Any:
    """Whole numbers (end - first,), where the values are."""
    made = np.arange(first, end)
    return made if isinstance(like, np.ndarray) else like.new_tensor(made)


def _with_position(query: Any, position: Any | None) -> Any:
    if position is None:
        return query
    return query + _range(0, query.shape[-2], query)[:, None] * position


def _attend(
    query: Any, value: Any, xp: Any = np, drop: Callable[[Any], Any] | None = None, axis: int = -2
) -> Any:
    """Softmax-weighted mean over tokens: (…, heads) of (…, tokens, heads)."""
    weights = xp.exp(query - xp.amax(query, axis=axis, keepdims=True))
    share = weights / weights.sum(axis=axis, keepdims=True)
    return ((share if drop is None else drop(share)) * value).sum(axis=axis)
