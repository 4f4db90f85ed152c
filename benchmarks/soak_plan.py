"""What the soak asks for: prompts, vectors, and the order of requests, all from one seed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

__all__ = ["N_PROMPTS", "Item", "Kind", "Prompt", "draw_items", "draw_prompts", "draw_vector"]

Kind = Literal["plain", "steered", "captured", "steered-captured", "aborted"]
SHARES: dict[Kind, float] = {
    "plain": 0.4,
    "steered": 0.2,
    "captured": 0.15,
    "steered-captured": 0.1,
    "aborted": 0.15,
}
N_PROMPTS = 48
N_VECTORS = 2
"""Ways in which each prompt may be steered."""


@dataclass(frozen=True)
class Prompt:
    """One prompt of the pool and the number of tokens that every request samples after it."""

    tokens: tuple[int, ...]
    max_tokens: int


@dataclass(frozen=True)
class Item:
    """One request of the mix."""

    kind: Kind
    prompt: int
    vector: int | None
    """Which of the prompt's vectors; None is not steered."""
    is_captured: bool
    leave_after: int | None
    """Outputs after which the client goes away; None stays to the end."""


def draw_prompts(seed: int, vocab: int = 8192) -> list[Prompt]:
    """Prompts of 5 to 150 tokens; a third of them share a prefix of 64 tokens in pairs."""
    rng = np.random.default_rng([seed, 0])
    prompts: list[Prompt] = []
    for i in range(N_PROMPTS):
        tokens = [int(t) for t in rng.integers(3, vocab, int(rng.integers(5, 150)))]
        if i % 3 == 2:
            before = prompts[-1].tokens
            shared = (before * (64 // len(before) + 1))[:64]
            tokens = [*shared, *tokens[:40]]
            prompts[-1] = Prompt((*shared, *before[:17]), prompts[-1].max_tokens)
        prompts.append(Prompt(tuple(tokens), int(rng.integers(4, 25))))
    return prompts


def draw_vector(prompt: int, which: int, *, layers: int, hidden: int) -> dict[str, object]:
    """Fields of a steering vector, strong enough to change what is said; each is another.

    Args:
        prompt: index of the prompt.
        which: 0 adds at every token, 1 matches norms or names positions.
        layers: of the model.
        hidden: width of the model.
    """
    rng = np.random.default_rng([prompt, which])
    by_position = which == 1 and prompt % 2 == 0
    positions = [0, 2, 3] if by_position else None
    shape = (1, 3, hidden) if by_position else (1, hidden)
    return {
        "activations": rng.standard_normal(shape).astype(np.float32),
        "layer_indices": [int(rng.integers(layers))],
        "scale": 1.5,
        "norm_match": which == 1 and not by_position,
        "position_indices": positions,
    }


def draw_items(seed: int, n: int) -> list[Item]:
    """The requests of the mix in the order in which they are sent."""
    rng = np.random.default_rng([seed, 1])
    kinds = list(SHARES)
    items = []
    for kind in rng.choice(kinds, n, p=list(SHARES.values())):
        prompt = int(rng.integers(N_PROMPTS))
        # Those that go away had asked for anything.
        wanted = kinds[int(rng.integers(4))] if kind == "aborted" else kind
        vector = int(rng.integers(N_VECTORS)) if "steered" in wanted else None
        leave = int(rng.integers(1, 4)) if kind == "aborted" else None
        items.append(Item(str(kind), prompt, vector, "captured" in wanted, leave))  # type: ignore[arg-type]
    return items
