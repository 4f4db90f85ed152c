"""Control latents: others that are as active as the one that is meant."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from inspect_lens.errors import SpecError

from ._encoder import SparseEncoder

__all__ = ["MatchedLatents", "matched_latents"]


class MatchedLatents(NamedTuple):
    """Control latents of one latent."""

    latents: tuple[int, ...]
    """Their numbers."""
    means: tuple[float, ...]
    """Their mean activations on the rows."""
    mean: float
    """That of the latent itself."""


def matched_latents(
    encoder: SparseEncoder,
    rows: ArrayLike,
    latent: int,
    *,
    n: int = 3,
    pool: int = 512,
    seed: int = 0,
    exclude: Sequence[int] = (),
) -> MatchedLatents:
    """Choose random latents that are about as active on some rows as a given one.

    What an edit of a latent does to a behaviour is told from what any edit of that size does by
    the same edit of such controls. Some latents are drawn at random, and of these the ones are
    taken whose mean activation is nearest.

    Args:
        encoder: of the autoencoder.
        rows: (rows, hidden) float, at least one.
        latent: number of the latent that is meant.
        n: how many controls.
        pool: how many are drawn to choose from; more are nearer, and take longer.
        seed: of the draw.
        exclude: latents that are no controls, such as others that are edited too.

    Returns:
        The controls, the nearest first; equally near ones in the order of the draw.

    Raises:
        SpecError: no rows, another width, no such latent, or fewer others than `n`.

    Example:
        ```python
        import numpy as np

        from inspect_lens.sae import SparseEncoder, matched_latents

        eye, zeros = np.eye(4, dtype=np.float32), np.zeros(4, dtype=np.float32)
        encoder = SparseEncoder(weight=eye, bias=zeros)
        found = matched_latents(encoder, [[2.0, 0.0, 1.9, 7.0]], 0, n=1)
        assert found.latents == (2,)
        ```
    """
    x = np.asarray(rows)
    if x.ndim != 2 or not len(x):
        raise SpecError(f"rows: shape {x.shape}; allowed is (rows, hidden) with at least one row")
    others = np.setdiff1d(np.arange(len(encoder.weight)), [latent, *exclude])
    if not 1 <= n <= len(others):
        raise SpecError(
            f"n={n}; allowed are 1 to {len(others)}: as many latents are left of "
            f"{len(encoder.weight)}"
        )
    drawn = np.random.default_rng(seed).permutation(others)[: max(pool, n)]
    means = encoder.activations(x, [latent, *drawn.tolist()]).mean(axis=0)
    order = np.argsort(np.abs(means[1:] - means[0]), kind="stable")[:n]
    return MatchedLatents(
        tuple(int(drawn[i]) for i in order),
        tuple(float(means[1 + i]) for i in order),
        float(means[0]),
    )
