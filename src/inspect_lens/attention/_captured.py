"""Queries and keys of one model call, as a capture brings them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from inspect_lens.errors import NotCapturedError, SpecError
from inspect_lens.spec import TensorData, as_tensor_data

from ._pattern import (
    AttentionFacts,
    Span,
    attention_patterns,
    check_span,
    mean_over,
    sums_over,
)

_Compute = Callable[
    [NDArray[np.float32], NDArray[np.float32], AttentionFacts, list[int]], NDArray[np.float32]
]

Head = tuple[int, int]
"""An attention head as (layer, query head), both counted from 0."""


@dataclass(frozen=True, eq=False)
class QueriesKeys:
    """Queries and keys of some layers of one call: patterns of chosen heads and positions.

    Example:
        ```python
        import numpy as np

        from inspect_lens.attention import QueriesKeys

        rng = np.random.default_rng(0)
        made = QueriesKeys.of(
            {
                "attn_q": rng.standard_normal((2, 6, 4, 8), dtype=np.float32),
                "attn_k": rng.standard_normal((2, 6, 2, 8), dtype=np.float32),
                "qk_layers": [3, 7],
                "qk_meta": [{"scale": 0.35, "num_heads": 4, "num_kv_heads": 2, "head_size": 8}] * 2,
            }
        )
        assert made.patterns(7, heads=[1], queries=[-1]).shape == (1, 1, 6)
        assert made.attention_to([(3, 0), (7, 1)], [(0, 2)], queries=[-1]).shape == (2, 1, 1)
        ```
    """

    layers: tuple[int, ...]
    """Ascending."""
    q: TensorData
    """(layers, tokens, query heads, head size)."""
    k: TensorData
    """(layers, tokens, key heads, head size)."""
    facts: tuple[AttentionFacts, ...]
    """Of each layer."""

    @classmethod
    def of(cls, captured: Mapping[str, Any]) -> QueriesKeys:
        """Take what `output_qk` returned: `attn_q`, `attn_k`, `qk_layers` and `qk_meta`.

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
        if not n == len(facts) == q.shape[0] == k.shape[0] or len(q.shape) != 4 != len(k.shape):
            raise SpecError(
                f"queries and keys: attn_q {q.shape} and attn_k {k.shape} with {n} layers and "
                f"{len(facts)} facts; wanted are (layers, tokens, heads, head size) and one of "
                "the others per layer"
            )
        return cls(layers, q, k, facts)

    @property
    def n_tokens(self) -> int:
        """Tokens, from position 0."""
        return self.q.shape[1]

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
            heads: query heads; all by default.
            queries: positions; all by default.

        Returns:
            (heads, queries, tokens) float32.

        Raises:
            SpecError: a layer, head or position is not there.
        """
        return attention_patterns(*self._layer(layer), heads=heads, queries=queries)

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
        for span in spans:
            check_span(span, self.n_tokens)
        return self._of_heads(
            heads, lambda q, k, facts, own: sums_over(q, k, facts, own, queries, spans)
        )

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
        return self._of_heads(heads, lambda q, k, facts, own: mean_over(q, k, facts, own, queries))

    def all_heads(self) -> tuple[Head, ...]:
        """List every captured (layer, head), in order."""
        pairs = zip(self.layers, self.facts, strict=True)
        return tuple((layer, head) for layer, facts in pairs for head in range(facts.num_heads))

    def _of_heads(self, heads: Sequence[Head], compute: _Compute) -> NDArray[np.float32]:
        """One computation per layer, with the results in the order of the heads."""
        if not heads:
            raise SpecError("heads: none; name (layer, head) pairs")
        by_layer: dict[int, list[int]] = {}
        for layer, head in heads:
            own = by_layer.setdefault(layer, [])
            if head not in own:
                own.append(head)
        found = {layer: compute(*self._layer(layer), own) for layer, own in by_layer.items()}
        rows: NDArray[np.float32] = np.stack(
            [found[layer][by_layer[layer].index(head)] for layer, head in heads]
        )
        return rows

    def _layer(self, layer: int) -> tuple[NDArray[np.float32], NDArray[np.float32], AttentionFacts]:
        if layer not in self.layers:
            raise SpecError(
                f"layer {layer}: queries and keys are of the layers {list(self.layers)}; capture "
                "it too"
            )
        i = self.layers.index(layer)
        q, k = (TensorData(t.storage[i], t.dtype).to_float32() for t in (self.q, self.k))
        return q, k, self.facts[i]
