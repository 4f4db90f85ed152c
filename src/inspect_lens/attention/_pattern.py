"""Attention patterns from queries and keys, and what a call captured of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import index
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from inspect_lens._base.arguments import judged_arguments
from inspect_lens.errors import NotCapturedError, SpecError, UnsupportedError
from inspect_lens.spec import TensorData, as_array, as_indices, as_tensor_data, shown

__all__ = ["AttentionFacts", "Head", "QueriesKeys", "Span", "attention_patterns"]

_LATENT: Final = ("kv_lora_rank", "use_mla")
"""What a configuration with multi-head latent attention has."""


@dataclass(frozen=True, kw_only=True)
class AttentionFacts:
    """Settings of one attention layer that its pattern needs beside queries and keys."""

    scale: float
    """Factor of the products of queries and keys."""
    num_heads: int
    """Query heads, over all tensor-parallel ranks."""
    num_kv_heads: int
    """Key heads; each serves `num_heads // num_kv_heads` query heads."""
    head_size: int
    """Width of one head."""
    soft_cap: float = 0.0
    """Logits become `cap * tanh(logits / cap)`; 0 for no cap."""
    window: tuple[int, int] = (-1, -1)
    """Tokens to the left and right that a query sees besides its own; -1 for no limit."""
    chunk: int = 0
    """A query sees only keys of its own chunk of so many tokens; 0 for no chunks."""
    alibi_slopes: tuple[float, ...] | None = None
    """By query head: what the logit loses per token of distance."""
    alibi_sqrt: bool = False
    """The slope multiplies the root of the distance."""
    sinks: tuple[float, ...] | None = None
    """By query head: a logit that takes part in the softmax and belongs to no token."""

    @classmethod
    def of(cls, meta: Mapping[str, Any] | AttentionFacts) -> AttentionFacts:
        """Read one entry of `qk_meta`.

        Args:
            meta: as a capture of queries and keys brings it for each layer, or facts.

        Raises:
            UnsupportedError: the layer has multi-head latent attention.
            SpecError: a number is missing or out of range.
        """
        if isinstance(meta, AttentionFacts):
            return meta
        if any(meta.get(key) for key in _LATENT):
            raise UnsupportedError(
                "qk_meta: this layer has multi-head latent attention (MLA), which keeps no keys "
                "per head, so that queries and keys make no pattern; capture the stream instead"
            )
        needed = ("scale", "num_heads", "num_kv_heads", "head_size")
        if missing := [key for key in needed if key not in meta]:
            raise SpecError(
                f"qk_meta: has no {', '.join(missing)}; needed is an entry of `qk_meta` as "
                "output_qk returns it"
            )
        try:
            made = cls(
                scale=float(meta["scale"]),
                num_heads=int(meta["num_heads"]),
                num_kv_heads=int(meta["num_kv_heads"]),
                head_size=int(meta["head_size"]),
                soft_cap=float(meta.get("logits_soft_cap") or 0.0),
                window=_window(meta.get("sliding_window")),
                chunk=int(meta.get("attention_chunk_size") or 0),
                alibi_slopes=_numbers(meta.get("alibi_slopes")),
                alibi_sqrt=bool(meta.get("use_alibi_sqrt")),
                sinks=_numbers(meta.get("sinks")),
            )
        except (TypeError, ValueError) as error:
            raise SpecError(f"qk_meta: {error}; needed is what output_qk returns") from None
        made._check()
        return made

    def kv_head(self, head: int) -> int:
        """Number of the key head that a query head reads."""
        return head // (self.num_heads // self.num_kv_heads)

    def _check(self) -> None:
        if min(self.num_heads, self.num_kv_heads, self.head_size) < 1 or (
            self.num_heads % self.num_kv_heads
        ):
            raise SpecError(
                f"qk_meta: num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}, "
                f"head_size={self.head_size}; query heads have to be a multiple of key heads"
            )
        numbers = [self.scale, self.soft_cap]
        for name, values in (("alibi_slopes", self.alibi_slopes), ("sinks", self.sinks)):
            if values is not None and len(values) != self.num_heads:
                raise SpecError(
                    f"qk_meta: {len(values)} {name} for {self.num_heads} query heads; needed is "
                    "one per head"
                )
            numbers += values or ()
        if not all(map(math.isfinite, numbers)) or self.soft_cap < 0:
            raise SpecError("qk_meta: a number is NaN, infinite, or a soft-cap below 0")


def _window(value: Sequence[int] | None) -> tuple[int, int]:
    if value is None:
        return (-1, -1)
    left, right = (int(n) for n in value)
    return (left, right)


def _numbers(value: Sequence[float] | None) -> tuple[float, ...] | None:
    return None if value is None else tuple(float(n) for n in value)


_BLOCK_BYTES: Final = 64 << 20
"""What one block of queries may take while it is computed; one query is computed in any case."""
_CELL_BYTES: Final = 24
"""Of one query and key: logits, weights, distance, mask and a spare copy."""

Span = tuple[int, int]
"""A range of tokens as (first, end); `end` is the token after the last."""


@judged_arguments
def attention_patterns(
    q: NDArray[np.floating[Any]],
    k: NDArray[np.floating[Any]],
    meta: Mapping[str, Any] | AttentionFacts,
    *,
    heads: Sequence[int] | None = None,
    queries: Sequence[int] | None = None,
) -> NDArray[np.float32]:
    """Attention pattern of one layer, from its queries and keys after rotary embedding.

    Exact for grouped heads, sliding windows, chunks, soft-capped logits, ALiBi and sinks of causal
    attention.

    Args:
        q: (tokens, query heads, head size) of all tokens, from position 0.
        k: (tokens, key heads, head size) of the same tokens.
        meta: of the layer: an entry of `qk_meta`.
        heads: query heads to compute; all by default.
        queries: positions whose rows to compute, negative ones from the end; all by default. The
            result grows with them, so name few in a long prompt.

    Returns:
        (heads, queries, tokens) float32. Rows sum to 1, less what sinks take.

    Raises:
        SpecError: shapes do not fit, or a head or position does not exist.
        UnsupportedError: the layer has multi-head latent attention.

    Example:
        ```python
        import numpy as np

        from inspect_lens.attention import attention_patterns

        rng = np.random.default_rng(0)
        q = rng.standard_normal((5, 4, 8), dtype=np.float32)
        k = rng.standard_normal((5, 2, 8), dtype=np.float32)
        meta = {"scale": 8**-0.5, "num_heads": 4, "num_kv_heads": 2, "head_size": 8}
        last = attention_patterns(q, k, meta, heads=[0, 3], queries=[-1])
        assert last.shape == (2, 1, 5)
        assert np.allclose(last.sum(-1), 1.0)
        ```
    """
    q, k = as_array(q), as_array(k)
    asked = _asked(q, k, meta, heads, queries)
    found = np.zeros((len(asked.heads), len(asked.queries), len(k)), dtype=np.float32)
    for i, rows, weights in _blocks(q, k, asked):
        found[i, rows] = weights
    return found


def _pairs(name: str, given: Any) -> list[tuple[int, int]]:
    """Two whole numbers of each, which may be rows of an array."""
    try:
        return [(index(one), index(other)) for one, other in given]
    except (TypeError, ValueError):
        raise SpecError(
            f"{name}={shown(given)}; allowed are pairs of whole numbers, such as [(3, 0)]"
        ) from None


def check_span(span: Span, n_tokens: int) -> None:
    """Refuse a range that is empty or outside the tokens."""
    ((first, stop),) = _pairs("spans", [span])
    if not 0 <= first < stop <= n_tokens:
        raise SpecError(
            f"span={tuple(span)}; allowed are (first, behind the last) with 0 <= first < last <= "
            f"{n_tokens}, as there are {n_tokens} tokens"
        )


class _Asked(NamedTuple):
    facts: AttentionFacts
    heads: Sequence[int]
    queries: NDArray[np.int64]


def _asked(
    q: NDArray[Any],
    k: NDArray[Any],
    meta: Mapping[str, Any] | AttentionFacts,
    heads: Sequence[int] | None,
    queries: Sequence[int] | None,
) -> _Asked:
    facts = AttentionFacts.of(meta)
    n = len(k)
    size = facts.head_size
    if q.shape != (n, facts.num_heads, size) or k.shape != (n, facts.num_kv_heads, size):
        raise SpecError(
            f"q and k: shapes {q.shape} and {k.shape}; wanted are ({n}, {facts.num_heads}, {size}) "
            f"and ({n}, {facts.num_kv_heads}, {size}): tokens, heads, head size of one layer, of "
            "all tokens from position 0"
        )
    every = range(facts.num_heads)
    chosen = every if heads is None else as_indices("heads", heads, len(every)).tolist()
    at = np.arange(n) if queries is None else as_indices("queries", queries, n, low=-n)
    return _Asked(facts, chosen, np.where(at < 0, at + n, at))


def _blocks(
    q: NDArray[Any], k: NDArray[Any], asked: _Asked
) -> Iterator[tuple[int, slice, NDArray[np.float32]]]:
    """Index of the head, which of the queries, and their rows: (queries, keys)."""
    n = max(1, _BLOCK_BYTES // (_CELL_BYTES * max(1, len(k))))
    for i, head in enumerate(asked.heads):
        kv = asked.facts.kv_head(head)
        for start in range(0, len(asked.queries), n):
            rows = slice(start, start + n)
            at = asked.queries[rows]
            first, stop = _seen(at, asked.facts)
            weights = np.zeros((len(at), len(k)), dtype=np.float32)
            weights[:, first:stop] = _softmax(
                q[at, head].astype(np.float32, copy=False),
                k[first:stop, kv].astype(np.float32, copy=False),
                at[:, None],
                np.arange(first, stop),
                head,
                asked.facts,
            )
            yield i, rows, weights


def _seen(queries: NDArray[np.int64], facts: AttentionFacts) -> tuple[int, int]:
    """Range of keys outside of which none of the queries sees one."""
    first, low = 0, int(queries.min())
    if facts.window[0] >= 0:
        first = max(first, low - facts.window[0])
    if facts.chunk:
        first = max(first, low // facts.chunk * facts.chunk)
    return first, int(queries.max()) + 1


def _softmax(
    q: NDArray[np.float32],
    k: NDArray[np.float32],
    at: NDArray[np.int64],
    keys: NDArray[np.int64],
    head: int,
    facts: AttentionFacts,
) -> NDArray[np.float32]:
    """(queries, keys) of one head, at the positions (queries, 1) and (keys,)."""
    logits = (q @ k.T) * np.float32(facts.scale)
    if facts.soft_cap:
        np.tanh(logits / np.float32(facts.soft_cap), out=logits)
        logits *= np.float32(facts.soft_cap)
    distance = at - keys
    hidden = distance < 0
    if facts.window[0] >= 0:
        hidden |= distance > facts.window[0]
    if facts.chunk:
        hidden |= at // facts.chunk != keys // facts.chunk
    if facts.alibi_slopes is not None:
        away = np.sqrt(np.maximum(distance, 0)) if facts.alibi_sqrt else distance
        logits -= np.float32(facts.alibi_slopes[head]) * away.astype(np.float32)
    logits[hidden] = -np.inf
    peak = logits.max(axis=1, keepdims=True)
    sink = None if facts.sinks is None else np.float32(facts.sinks[head])
    if sink is not None:
        peak = np.maximum(peak, sink)
    logits -= peak
    np.exp(logits, out=logits)
    total = logits.sum(axis=1, keepdims=True)
    if sink is not None:
        total += np.exp(sink - peak)
    logits /= total
    return logits


_Rows = NDArray[np.float32]

Head = tuple[int, int]
"""An attention head as (layer, query head), both counted from 0."""


@dataclass(frozen=True, eq=False)
class QueriesKeys:
    """Queries and keys of some layers of one call: patterns of chosen heads and positions."""

    layers: tuple[int, ...]
    """Ascending."""
    q: TensorData
    """(layers, tokens, query heads, head size)."""
    k: TensorData
    """(layers, tokens, key heads, head size)."""
    facts: tuple[AttentionFacts, ...]
    """Of each layer."""
    heads: tuple[Head, ...] | None = None
    """Those that were captured, ascending; then `q` is (heads, tokens, head size). None for all."""
    key_heads: tuple[Head, ...] = ()
    """The key heads that they read; then `k` is (key heads, tokens, head size)."""

    @classmethod
    def of(cls, captured: Mapping[str, Any]) -> QueriesKeys:
        """Take what `output_qk` returned: `attn_q`, `attn_k`, `qk_layers` and `qk_meta`.

        With chosen heads there are `qk_heads` and `qk_key_heads`, too.

        Args:
            captured: `output.activations` of vLLM or of the client. Tensors may be of numpy or
                torch.

        Returns:
            The queries and keys; memory is shared with the tensors.

        Raises:
            NotCapturedError: the call captured none.
            SpecError: shapes, layers and facts do not fit.
            UnsupportedError: a layer has multi-head latent attention.
        """
        names = ("attn_q", "attn_k", "qk_layers", "qk_meta")
        if missing := [name for name in names if name not in captured]:
            raise NotCapturedError(
                f"queries and keys: this call has no {', '.join(missing)}; ask for them with "
                "output_qk, or lens_config(qk=[…]) in Inspect, of an engine with q and k in "
                "INSPECT_LENS_SITES"
            )
        q, k = (as_tensor_data(captured[name], field=name) for name in names[:2])
        layers = tuple(int(layer) for layer in captured["qk_layers"])
        facts = tuple(AttentionFacts.of(meta) for meta in captured["qk_meta"])
        n = len(layers)
        if captured.get("qk_heads") is not None:
            return cls._of_chosen(captured, layers, q, k, facts)
        if not n == len(facts) == q.shape[0] == k.shape[0] or {len(q.shape), len(k.shape)} != {4}:
            raise SpecError(
                f"queries and keys: attn_q {q.shape} and attn_k {k.shape} with {n} layers and "
                f"{len(facts)} facts; wanted are (layers, tokens, heads, head size) and one of "
                "the others per layer"
            )
        return cls(layers, q, k, facts)

    @classmethod
    def _of_chosen(
        cls,
        captured: Mapping[str, Any],
        layers: tuple[int, ...],
        q: TensorData,
        k: TensorData,
        facts: tuple[AttentionFacts, ...],
    ) -> QueriesKeys:
        """The same of a capture of chosen heads."""
        of = dict(zip(layers, facts, strict=False))
        heads, key_heads = (
            tuple((int(layer), int(head)) for layer, head in captured.get(name) or ())
            for name in ("qk_heads", "qk_key_heads")
        )
        wanted = {(n, of[n].kv_head(head)) for n, head in heads if n in of}
        is_whole = len(of) == len(facts) and {n for n, _ in heads} <= of.keys()
        shapes = [(len(q.shape), q.shape[0]), (len(k.shape), k.shape[0])]
        if (
            not is_whole
            or shapes != [(3, len(heads)), (3, len(key_heads))]
            or wanted != {*key_heads}
        ):
            raise SpecError(
                f"queries and keys: attn_q {q.shape} and attn_k {k.shape} with qk_heads "
                f"{list(heads)} and qk_key_heads {list(key_heads)}; wanted are (heads, tokens, "
                "head size), and the key head of each"
            )
        return cls(layers, q, k, facts, heads, key_heads)

    @property
    def n_tokens(self) -> int:
        """Tokens, from position 0."""
        return self.q.shape[1]

    @judged_arguments
    def patterns(
        self,
        layer: int,
        *,
        heads: Sequence[int] | None = None,
        queries: Sequence[int] | None = None,
    ) -> NDArray[np.float32]:
        """Attention pattern of one layer, as `attention_patterns` makes it.

        Args:
            layer: one of `layers`.
            heads: query heads; all that were captured by default.
            queries: positions; all by default.

        Returns:
            (heads, queries, tokens) float32.

        Raises:
            SpecError: a layer, head or position is not there.
        """
        if heads is None and self.heads is not None:
            heads = [head for at, head in self.heads if at == layer]
        return attention_patterns(
            *self._layer(layer, () if heads is None else heads), heads=heads, queries=queries
        )

    @judged_arguments
    def attention_to(
        self, heads: Sequence[Head], spans: Sequence[Span], *, queries: Sequence[int] | None = None
    ) -> NDArray[np.float32]:
        """How much attention chosen heads of any layers pay to ranges of tokens.

        Args:
            heads: (layer, head) of each.
            spans: (first, behind the last) token of each range.
            queries: positions; all by default.

        Returns:
            (heads, queries, spans) float32, in the order of `heads`.

        Raises:
            SpecError: a layer, head, position or range is not there.
        """
        spans = _pairs("spans", spans)
        for span in spans:
            check_span(span, self.n_tokens)

        def sums(q: _Rows, k: _Rows, asked: _Asked) -> _Rows:
            found = np.zeros((len(asked.heads), len(asked.queries), len(spans)), np.float32)
            for i, rows, weights in _blocks(q, k, asked):
                for j, (first, stop) in enumerate(spans):
                    found[i, rows, j] = weights[:, first:stop].sum(axis=1)
            return found

        return self._of_heads(heads, queries, sums)

    @judged_arguments
    def mean_attention(
        self, heads: Sequence[Head], *, queries: Sequence[int] | None = None
    ) -> NDArray[np.float32]:
        """How much attention each token gets from chosen heads, mean over queries.

        Args:
            heads: (layer, head) of each.
            queries: positions; all by default.

        Returns:
            (heads, tokens) float32, in the order of `heads`.

        Raises:
            SpecError: a layer, head or position is not there.
        """

        def mean(q: _Rows, k: _Rows, asked: _Asked) -> _Rows:
            if not len(asked.queries):
                raise SpecError("queries: none; a mean needs one at least")
            found = np.zeros((len(asked.heads), len(k)), dtype=np.float64)
            for i, _, weights in _blocks(q, k, asked):
                found[i] += weights.sum(axis=0, dtype=np.float64)
            return (found / len(asked.queries)).astype(np.float32)

        return self._of_heads(heads, queries, mean)

    def all_heads(self) -> tuple[Head, ...]:
        """List every captured (layer, head), in order."""
        if self.heads is not None:
            return self.heads
        pairs = zip(self.layers, self.facts, strict=True)
        return tuple((layer, head) for layer, facts in pairs for head in range(facts.num_heads))

    def _of_heads(
        self,
        heads: Sequence[Head],
        queries: Sequence[int] | None,
        compute: Callable[[_Rows, _Rows, _Asked], _Rows],
    ) -> _Rows:
        """One computation per layer, with the results in the order of the heads."""
        heads = _pairs("heads", heads)
        if not heads:
            raise SpecError("heads: none; name (layer, head) pairs")
        by_layer: dict[int, list[int]] = {}
        for layer, head in heads:
            own = by_layer.setdefault(layer, [])
            if head not in own:
                own.append(head)
        found = {}
        for layer, own in by_layer.items():
            q, k, facts = self._layer(layer, own)
            found[layer] = compute(q, k, _asked(q, k, facts, own, queries))
        return np.stack([found[layer][by_layer[layer].index(head)] for layer, head in heads])

    def _layer(
        self, layer: int, heads: Sequence[int]
    ) -> tuple[NDArray[np.float32], NDArray[np.float32], AttentionFacts]:
        """Queries and keys of a layer, (tokens, heads, head size); those not captured are zero."""
        if layer not in self.layers:
            raise SpecError(
                f"layer {layer}: queries and keys are of the layers {list(self.layers)}; capture "
                "it too"
            )
        i = self.layers.index(layer)
        if self.heads is not None:
            if missing := [(layer, head) for head in heads if (layer, head) not in self.heads]:
                raise SpecError(
                    f"heads: {missing}; queries and keys are of the heads {list(self.heads)}; "
                    "capture them too"
                )
            facts, n = self.facts[i], self.n_tokens
            q = np.zeros((n, facts.num_heads, facts.head_size), dtype=np.float32)
            k = np.zeros((n, facts.num_kv_heads, facts.head_size), dtype=np.float32)
            for whole, held, of in ((q, self.q, self.heads), (k, self.k, self.key_heads)):
                for j, (at, head) in enumerate(of):
                    if at == layer:
                        whole[:, head] = TensorData(held.storage[j], held.dtype).to_float32()
            return q, k, facts
        q, k = (TensorData(t.storage[i], t.dtype).to_float32() for t in (self.q, self.k))
        return q, k, self.facts[i]
