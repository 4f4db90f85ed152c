"""Edits of sampled tokens with some ids, against the same edits at the places of these tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from inspect_lens import LensRequest
from inspect_lens.spec import Ablate, Add, EditBase, TokenMatch
from tests.kit.edit_cases import random_rows
from tests.kit.reference import ids_of, rows_of

N = 16
"""Tokens that are sampled."""


def ask(*edits: EditBase) -> dict[str, Any]:
    """Every layer, and edits."""
    return {"inspect_lens": LensRequest(capture={"layers": "all"}, edits=edits)}


def sampled(ids: list[int], *, exclude: bool = False) -> TokenMatch:
    """Sampled tokens with these ids, or all others."""
    return TokenMatch(token_ids=ids, among="completion", exclude=exclude)


def edits(positions: Any, seed: int, hidden: int, layers: tuple[int, ...]) -> list[EditBase]:
    """An addition at all layers but the last, and an ablation there."""
    v, w = random_rows(seed, 2, hidden)
    return [
        Add(vector=v, scale=0.3, layers=list(layers[:-1]), positions=positions),
        Ablate(direction=w, layers=[layers[-1]], positions=positions),
    ]


def some_ids(plain: list[Any], prompts: list[list[int]]) -> list[list[int]]:
    """For each prompt ids that it samples, and ids of the prompt, where nothing may happen."""
    return [sorted({*ids_of(o)[2:9:3], *p[:4]}) for o, p in zip(plain, prompts, strict=True)]


def places_of(
    found: list[Any], prompts: list[list[int]], chosen: list[list[int]], *, exclude: bool
) -> list[list[int]]:
    """For each prompt the positions of sampled tokens with its ids; the last one is never fed."""
    return [
        [len(p) + k for k, token in enumerate(ids_of(out)[:-1]) if (token in ids) != exclude]
        for p, out, ids in zip(prompts, found, chosen, strict=True)
    ]


def check_sampled_edits(
    run: Any,
    prompts: list[list[int]],
    hidden: int,
    layers: tuple[int, ...],
    compare: Callable[[torch.Tensor, torch.Tensor], None],
) -> None:
    """Edits by id equal the same edits at the positions that a first run shows, on every stage.

    Args:
        run: `run(prompts, extra_args, max_tokens=...)` generates.
        prompts: more than one.
        hidden: width of the model.
        layers: that are edited, at least two.
        compare: `compare(found, wanted)` fails where rows of two runs of one batch differ.
    """
    plain = run(prompts, max_tokens=N)
    chosen = some_ids(plain, prompts)
    for exclude in (False, True):
        by_id = [
            ask(*edits(sampled(ids, exclude=exclude), 50 + i, hidden, layers))
            for i, ids in enumerate(chosen)
        ]
        found = run(prompts, by_id, max_tokens=N)
        places = places_of(found, prompts, chosen, exclude=exclude)
        assert all(places), "the first of the ids is sampled before anything is edited"
        assert sum(map(len, places)) < (N - 1) * len(prompts)
        listed = [ask(*edits(p, 50 + i, hidden, layers)) for i, p in enumerate(places)]
        wanted = run(prompts, listed, max_tokens=N)
        for out, same in zip(found, wanted, strict=True):
            assert ids_of(out) == ids_of(same)
            compare(rows_of(out), rows_of(same))
