"""Requests of each load: how many, how long, and which tokens; the same in every arm."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

__all__ = ["LOADS", "Load", "requests"]


@dataclass(frozen=True)
class Load:
    """One load: fixed sampled lengths, or lengths drawn as those of the Alpaca instructions."""

    n: int
    sampled: int | None
    """Sampled tokens of each request; None draws them."""
    prompt: tuple[int, int] = (16, 48)
    """Prompt lengths are uniform from the first to below the second; unused where drawn."""
    is_shared: bool = False
    """Whether all requests have the first one's prompt."""


LOADS = {
    "8x256": Load(8, 256),
    "64x128": Load(64, 128),
    "256x128": Load(256, 128),
    "512x128": Load(512, 128),
    "1000x128": Load(1000, 128),
    "alpaca": Load(1000, None),
    "sweep": Load(20, 14, prompt=(3000, 3001), is_shared=True),
    "smoke": Load(6, 8),
}
"""`alpaca`: 1000 prompts of mean 13 tokens and answers of mean 315, see `_alpaca`. `sweep`: one
prompt, as often as a steering sweep has scales."""


def _alpaca(rng: np.random.Generator, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Lengths like those of the first 1000 Alpaca instructions and of greedy answers to them."""
    # Prompts: log-normal, median 12, shape 0.4, clipped to 4 to 60 (mean 13). Answers: log-normal,
    # median 262, shape 0.65, clipped to 8 to 1024 (mean 315). Random weights almost never sample
    # the end of a text, so lengths are imposed.
    prompts = np.clip(rng.lognormal(np.log(12), 0.4, n), 4, 60).round().astype(int)
    answers = np.clip(rng.lognormal(np.log(262), 0.65, n), 8, 1024).round().astype(int)
    return prompts, answers


def requests(load: Load, *, vocab: int, seed: int) -> list[tuple[list[int], int]]:
    """Draw the requests of one repetition.

    Args:
        load: which.
        vocab: number of token ids; the lowest three are not used.
        seed: of lengths and tokens.

    Returns:
        (prompt token ids, tokens to sample) by request.
    """
    rng = np.random.default_rng(seed)
    if load.sampled is None:
        prompts, answers = _alpaca(rng, load.n)
    else:
        prompts = rng.integers(*load.prompt, load.n)
        answers = np.full(load.n, load.sampled)
    drawn = [
        ([int(t) for t in rng.integers(3, vocab, n)], int(m))
        for n, m in zip(prompts, answers, strict=True)
    ]
    return [(drawn[0][0], m) for _, m in drawn] if load.is_shared else drawn
