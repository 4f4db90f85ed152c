"""CoRe heads: a few heads whose attention from the query ranks documents of a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from inspect_lens.errors import SpecError

from ._captured import Head, QueriesKeys
from ._heads import AttentionHeads, HeadsFound
from ._pattern import Span, check_span

_KEPT_STD: Final = 2.0
"""Tokens of a document this many standard deviations below its mean are left out."""


def document_scores(
    captured: QueriesKeys,
    without_query: QueriesKeys,
    heads: AttentionHeads | Sequence[Head],
    documents: Sequence[Span],
    *,
    query: Span,
    empty_query: Span,
) -> NDArray[np.float64]:
    """How relevant each document of a prompt is to the query at its end, by attention.

    A token's score is the attention that it gets from the query, summed over heads. That of an
    empty query, which knows nothing, is subtracted. Tokens far below the mean of their document
    are left out, and the others are summed.

    Args:
        captured: queries and keys of the prompt: documents first, then the query.
        without_query: of the same prompt with `N/A` in the place of the query.
        heads: CoRe heads.
        documents: token range of each document, the same in both prompts.
        query: token range of the query.
        empty_query: token range of `N/A` in the other prompt.

    Returns:
        (documents,) float64; `np.argsort(-scores)` ranks them.

    Raises:
        SpecError: a range that is empty, outside the tokens, or a document behind the query.

    Source:
        Calibration: Chen et al. 2024, arXiv:2410.02642. Heads: Tran et al. 2025, arXiv:2510.02219.

    Example:
        ```python
        import numpy as np

        from inspect_lens.attention import QueriesKeys, document_scores

        meta = {"scale": 1.0, "num_heads": 1, "num_kv_heads": 1, "head_size": 4}
        k = np.eye(4, dtype=np.float32)[[0, 0, 1, 1, 2]].reshape(1, 5, 1, 4)


        def ask(direction: int) -> QueriesKeys:
            q = np.broadcast_to(5 * np.eye(4, dtype=np.float32)[direction], (1, 5, 1, 4))
            return QueriesKeys.of({"attn_q": q, "attn_k": k, "qk_layers": [0], "qk_meta": [meta]})


        spans = {"query": (4, 5), "empty_query": (4, 5)}
        scores = document_scores(ask(1), ask(3), [(0, 0)], [(0, 2), (2, 4)], **spans)
        assert scores[1] > 0 > scores[0]  # the query looks for what the second document has
        ```
    """
    pairs = heads.heads if isinstance(heads, AttentionHeads) else heads
    asked = _token_scores(captured, pairs, documents, query)
    base = _token_scores(without_query, pairs, documents, empty_query)
    return np.array([_pooled(asked[i:j] - base[i:j]) for i, j in documents], dtype=np.float64)


def contrastive_scores(
    captured: QueriesKeys,
    heads: Sequence[Head],
    positive: Span,
    negatives: Sequence[Span],
    *,
    query: Span,
    temperature: float = 0.001,
) -> NDArray[np.float64]:
    """How well each head tells the relevant document of one prompt from others.

    Args:
        captured: queries and keys of the prompt: documents first, then the query.
        heads: (layer, head) of each.
        positive: token range of the relevant document.
        negatives: token ranges of others, best of hard ones.
        query: token range of the query.
        temperature: of the softmax; the paper takes 0.001.

    Returns:
        (heads,) float64 in [0, 1]: the softmax over documents, at the relevant one, of the
        attention that the query pays to each, summed over tokens and divided by the temperature.

    Raises:
        SpecError: no negative, a temperature that is not positive, or as for `document_scores`.

    Source:
        Tran et al. 2025, arXiv:2510.02219.

    Example:
        ```python
        import numpy as np

        from inspect_lens.attention import QueriesKeys, contrastive_scores

        meta = {"scale": 1.0, "num_heads": 2, "num_kv_heads": 2, "head_size": 4}
        k = np.eye(4, dtype=np.float32)[[0, 1, 2]][None, :, None].repeat(2, axis=2)
        q = np.zeros((1, 3, 2, 4), np.float32)
        q[0, 2, 0, 1] = q[0, 2, 1, 0] = (
            5  # head 0 looks at the second document, head 1 at the first
        )
        names = {"attn_q": q, "attn_k": k, "qk_layers": [7], "qk_meta": [meta]}
        found = contrastive_scores(
            QueriesKeys.of(names), [(7, 0), (7, 1)], (1, 2), [(0, 1)], query=(2, 3)
        )
        assert found.round(3).tolist() == [1.0, 0.0]
        ```
    """
    if not negatives:
        raise SpecError("negatives: none; a head is judged by documents that are not relevant")
    if not temperature > 0:
        raise SpecError(f"temperature={temperature}; allowed is a positive number")
    spans = [positive, *negatives]
    _check(captured, spans, query)
    to = captured.attention_to(heads, spans, queries=range(*query)).astype(np.float64)
    # On use: whatever reads a log imports this folder, and scipy takes a second.
    from scipy.special import softmax

    found: NDArray[np.float64] = softmax(to.mean(axis=1) / temperature, axis=1)[:, 0]
    return found


def find_core_heads(
    scores: ArrayLike,
    heads: Sequence[Head],
    *,
    top: int = 8,
    model: str = "",
    data: str = "",
) -> AttentionHeads:
    """Choose the heads that tell relevant documents best.

    Args:
        scores: (prompts, heads) `contrastive_scores` of prompts with known relevant documents.
        heads: (layer, head) of each column.
        top: how many to take; the paper takes 8.
        model: name of the model.
        data: name of the prompts.

    Returns:
        The heads, the best first.

    Raises:
        SpecError: shapes that do not fit, NaN, or another number of heads than there are.

    Source:
        Tran et al. 2025, arXiv:2510.02219.

    Example:
        ```python
        from inspect_lens.attention import find_core_heads

        found = find_core_heads([[0.2, 0.9], [0.1, 0.8]], [(3, 0), (3, 1)], top=1)
        assert found.heads == ((3, 1),)
        ```
    """
    values = np.asarray(scores, dtype=np.float64)
    if values.ndim != 2 or not len(values) or values.shape[1] != len(heads):
        raise SpecError(f"scores: shape {values.shape}; wanted are prompts and {len(heads)} heads")
    if not np.isfinite(values).all():
        raise SpecError("scores: hold NaN or infinite numbers; leave such prompts out")
    if not 1 <= top <= len(heads):
        raise SpecError(f"top={top}; allowed are 1 to {len(heads)}, as many as heads were scored")
    mean = values.mean(axis=0)
    best = [int(i) for i in np.argsort(-mean, kind="stable")[:top]]
    return AttentionHeads(
        method="core",
        model=model,
        heads=tuple((int(heads[i][0]), int(heads[i][1])) for i in best),
        head_scores=tuple(float(mean[i]) for i in best),
        found=HeadsFound(
            data=data,
            n_samples={"prompts": len(values)},
            rule="largest mean contrastive score",
            settings={"top": top},
            n_heads=len(heads),
            source="arXiv:2510.02219",
        ),
    )


def _token_scores(
    captured: QueriesKeys, heads: Sequence[Head], documents: Sequence[Span], query: Span
) -> NDArray[np.float64]:
    """(tokens,) attention from the query, mean over its tokens and summed over heads."""
    if not documents:
        raise SpecError("documents: none; name the token range of each")
    _check(captured, documents, query)
    found = captured.mean_attention(heads, queries=range(*query))
    return np.asarray(found.sum(axis=0, dtype=np.float64))


def _check(captured: QueriesKeys, documents: Sequence[Span], query: Span) -> None:
    for span in (*documents, query):
        check_span(span, captured.n_tokens)
    if behind := [span for span in documents if span[1] > query[0]]:
        raise SpecError(
            f"documents: {behind} end behind the first token of the query at {query[0]}, which "
            "cannot see all of them; put documents first"
        )


def _pooled(scores: NDArray[np.float64]) -> float:
    """Sum over the tokens that are not far below the mean."""
    spread = float(scores.std(ddof=1)) if len(scores) > 1 else 0.0
    return float(scores[scores >= scores.mean() - _KEPT_STD * spread].sum())
