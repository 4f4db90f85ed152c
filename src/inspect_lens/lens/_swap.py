"""Exchange two tokens in the stream, by coordinates that a clean run has."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from inspect_lens.errors import SpecError
from inspect_lens.spec import Add, Swap

from ._lens import Lens

__all__ = ["frozen_swap"]


def frozen_swap(
    lens: Lens,
    rows: ArrayLike,
    unembedding: ArrayLike,
    *,
    layers: Sequence[int],
    positions: Sequence[int],
    strength: float = 1.0,
) -> Add:
    """Make a steering vector that exchanges two tokens in captured rows.

    With the directions `V` of both tokens in a layer (`Lens.token_direction`), a row `h` of a clean
    run has the coordinates `c = V⁺ h`, and `strength · V (swapped c - c)` is added to it. The
    coordinates are those of the clean run in all layers: read again in a steered run, the second
    layer would undo what the first has done. So capture first, and run again with the result.

    Args:
        lens: whose directions count.
        rows: (layers, positions, hidden) of the clean run, behind these layers.
        unembedding: (2, hidden); rows of the unembedding of the two tokens, see `token_direction`.
        layers: of `rows`, ascending; the lens translates each.
        positions: of `rows`, absolute.
        strength: 1 exchanges the coordinates; 0 changes nothing.

    Returns:
        A vector for each layer and position.

    Raises:
        SpecError: shapes disagree, the lens lacks a layer, or the directions of both tokens are
            parallel.

    Source:
        "Verbalizable Representations Form a Global Workspace in Language Models" (Anthropic 2026).

    Example:
        ```python
        import numpy as np

        from inspect_lens.lens import Lens, LensCard, frozen_swap

        card = LensCard(name="mine/none", kind="jacobian", n_layers=6, layers=(2,), hidden=3)
        lens = Lens(matrix=np.eye(3)[None], card=card)
        row = np.array([[[5.0, 1.0, 7.0]]])  # of layer 2, at position 4
        steering = frozen_swap(lens, row, np.eye(3)[:2], layers=[2], positions=[4])
        assert (row + steering.vector.to_float32()).round(4).tolist() == [[[1.0, 5.0, 7.0]]]
        ```
    """
    clean, tokens = np.asarray(rows, dtype=np.float64), np.asarray(unembedding, dtype=np.float64)
    hidden = lens.card.hidden
    if clean.shape != (len(layers), len(positions), hidden) or tokens.shape != (2, hidden):
        raise SpecError(
            f"rows: shape {clean.shape}, unembedding: shape {tokens.shape}; needed are "
            f"{(len(layers), len(positions), hidden)} for these layers and positions, and "
            f"{(2, hidden)}"
        )
    directions = np.stack([lens.token_direction(tokens, layer) for layer in layers])
    for layer, both in zip(layers, directions, strict=True):
        sizes = np.linalg.norm(both.astype(np.float64), axis=1, keepdims=True)
        if not sizes.all() or np.linalg.matrix_rank(both / sizes, tol=1e-5) < 2:
            raise SpecError(
                f"unembedding: both tokens have the same direction in layer {layer}; choose others"
            )
    swap = Swap(
        first=directions[:, 0], second=directions[:, 1], strength=strength, layers=tuple(layers)
    )
    return swap.frozen(clean, positions=tuple(positions))
