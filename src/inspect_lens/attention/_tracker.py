"""Attention Tracker: a few heads look away from the instruction when a prompt is injected."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from inspect_lens.errors import SpecError

from ._captured import Head, QueriesKeys
from ._heads import AttentionHeads, HeadsFound
from ._pattern import Span

_EPSILON: Final = 1e-8


def instruction_shares(
    captured: QueriesKeys,
    heads: Sequence[Head],
    instruction: Sequence[Span],
    data: Sequence[Span],
    *,
    query: int = -1,
) -> NDArray[np.float64]:
    """Attention to the instruction, as a share of that to instruction and data, for each head.

    Args:
        captured: queries and keys of the call.
        heads: (layer, head) of each.
        instruction: token ranges of the instruction.
        data: token ranges of the data, which may hold an injected instruction.
        query: position that looks; the last token of the prompt, which is the last of all where
            one token was sampled.

    Returns:
        (heads,) float64 in [0, 1]; the paper's focus score is their mean over the chosen heads,
        and is low where the data draws the model away.

    Raises:
        SpecError: no range, an empty one, ranges that overlap, one behind the query, or a head
            that was not captured.

    Source:
        Hung et al. 2024, arXiv:2411.00348.

    Example:
        ```python
        import numpy as np

        from inspect_lens.attention import QueriesKeys, instruction_shares

        rng = np.random.default_rng(0)
        meta = {"scale": 0.35, "num_heads": 2, "num_kv_heads": 2, "head_size": 8}
        q, k = (rng.standard_normal((1, 9, 2, 8), dtype=np.float32) for _ in range(2))
        names = {"attn_q": q, "attn_k": k, "qk_layers": [5], "qk_meta": [meta]}
        shares = instruction_shares(QueriesKeys.of(names), [(5, 0), (5, 1)], [(1, 4)], [(4, 8)])
        assert shares.shape == (2,)
        ```
    """
    at = query + captured.n_tokens if query < 0 else query
    spans = [*instruction, *data]
    if not instruction or not data:
        raise SpecError("instruction and data: one token range of each is needed at least")
    ordered = sorted(spans)
    for (_, stop), (first, _) in itertools.pairwise(ordered):
        if first < stop:
            raise SpecError(f"instruction and data: ranges overlap in {ordered}")
    if ordered[-1][1] > at + 1:
        raise SpecError(
            f"instruction and data: {ordered[-1]} reaches behind the query at position {at}, which "
            "cannot see it"
        )
    to = captured.attention_to(heads, spans, queries=[at])[:, 0].astype(np.float64)
    to_instruction = to[:, : len(instruction)].sum(axis=1)
    return np.asarray(to_instruction / (to.sum(axis=1) + _EPSILON))


def find_tracker_heads(
    normal: ArrayLike,
    attack: ArrayLike,
    heads: Sequence[Head],
    *,
    n_std: float = 4.0,
    model: str = "",
    data: str = "",
) -> AttentionHeads:
    """Find the important heads: those whose share falls in attacked prompts by more than it varies.

    A head is taken where mean(normal) - mean(attack) exceeds `n_std` times the sum of both standard
    deviations.

    Args:
        normal: (prompts, heads) `instruction_shares` of prompts without an injection.
        attack: (prompts, heads) of prompts with one.
        heads: (layer, head) of each column.
        n_std: how many standard deviations; the paper takes 4.
        model: name of the model.
        data: name of the prompts.

    Returns:
        The heads, the one with the largest margin first, without a threshold.

    Raises:
        SpecError: fewer than two prompts of a kind, shapes that do not fit, or no head whose
            margin is positive.

    Source:
        Hung et al. 2024, arXiv:2411.00348.

    Example:
        ```python
        import numpy as np

        from inspect_lens.attention import find_tracker_heads

        rng = np.random.default_rng(0)
        normal, attack = (0.6 + 0.02 * rng.standard_normal((10, 3)) for _ in range(2))
        attack[:, 1] -= 0.4  # this head is drawn away
        found = find_tracker_heads(normal, attack, [(0, 0), (0, 1), (1, 0)])
        assert found.heads == ((0, 1),)
        ```
    """
    a, b = (np.asarray(x, dtype=np.float64) for x in (normal, attack))
    for name, values in (("normal", a), ("attack", b)):
        if values.ndim != 2 or len(values) < 2 or values.shape[1] != len(heads):
            raise SpecError(
                f"{name}: shape {values.shape}; wanted are two or more prompts and "
                f"{len(heads)} heads"
            )
        if not np.isfinite(values).all():
            raise SpecError(f"{name}: holds NaN or infinite shares; leave such prompts out")
    margin = a.mean(axis=0) - b.mean(axis=0) - n_std * (a.std(axis=0) + b.std(axis=0))
    chosen = [int(i) for i in np.argsort(-margin, kind="stable") if margin[i] > 0]
    if not chosen:
        best = int(margin.argmax())
        fall = a[:, best].mean() - b[:, best].mean()
        fits = fall / max(float(a[:, best].std() + b[:, best].std()), _EPSILON)
        raise SpecError(
            f"n_std={n_std:g}: no head's share falls by so much more than it varies; the closest "
            f"is {tuple(heads[best])}, whose share falls by {fall:.3f}, {fits:.2f} standard "
            "deviations; take a smaller n_std, or this model has no such heads for these attacks"
        )
    return AttentionHeads(
        method="attention_tracker",
        model=model,
        heads=tuple((int(heads[i][0]), int(heads[i][1])) for i in chosen),
        head_scores=tuple(float(margin[i]) for i in chosen),
        found=HeadsFound(
            data=data,
            n_samples={"normal": len(a), "attack": len(b)},
            rule="mean(normal) - mean(attack) > n_std * (std(normal) + std(attack))",
            settings={"n_std": n_std},
            n_heads=len(heads),
            source="arXiv:2411.00348",
        ),
    )
