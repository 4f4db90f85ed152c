"""What a vector's direction tells of samples that it was not found on."""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np

from inspect_lens.errors import SpecError
from inspect_lens.probe import auroc
from inspect_lens.train.judging._select import separation
from inspect_lens.train.sets._dataset import ActivationSet
from inspect_lens.vector import Vector

from ._vectors import VectorRows, rows_at

__all__ = ["VectorScore", "evaluate_vector"]

_CONTROLS: Final = 20


class VectorScore(NamedTuple):
    """AUROC of one layer of a steering vector on a labelled set."""

    layer: int
    auroc: float
    """Of the projection on the direction."""
    separation: float
    """Distance of the class means in pooled standard deviations."""
    length: float
    """Distance of the class means along the direction, in units of the residual stream."""
    random_auroc: float
    """Largest AUROC, on either side of 0.5, of 20 random directions: what chance reaches."""


def evaluate_vector(
    vector: Vector, data: ActivationSet, *, rows: VectorRows = "mean", seed: int = 0
) -> tuple[VectorScore, ...]:
    """Measure how well the directions of a vector separate the classes of a set.

    A direction that separates need not steer: see `dose_response` for what it does to a model.

    Args:
        vector: with a direction at one of the set's layers at least.
        data: with both classes; label 1 is what a positive scale moves to.
        rows: what one row of a sample is.
        seed: of the random directions.

    Returns:
        One score for each layer that both have.

    Raises:
        SpecError: no common layer, another width, or a class is missing.

    Example:
        ```python
        from inspect_lens.train import ActivationSet, evaluate_vector, extract_vector

        train, test = (ActivationSet.load(f"acts/{name}.safetensors") for name in ("train", "test"))
        vector = extract_vector(train, name="mine/planted", rows="mean")
        best = max(evaluate_vector(vector, test), key=lambda score: score.auroc)
        assert best.layer == 1
        assert best.auroc > best.random_auroc
        ```
    """
    shared = [n for n in vector.layers if n in data.layers]
    if not shared or vector.card.hidden != data.hidden or not (data.n_positive and data.n_negative):
        raise SpecError(
            f"{data.name}: layers {list(data.layers)} of width {data.hidden}, {data.n_positive} "
            f"positive and {data.n_negative} negative; vector {vector.name!r} allows layers "
            f"{list(vector.layers)} of width {vector.card.hidden}, and both classes"
        )
    rng = np.random.default_rng(seed)
    made = []
    for layer in shared:
        found = rows_at(data, layer, rows)
        x = found.x.astype(np.float64)
        along = x @ vector.direction[vector.layers.index(layer)].astype(np.float64)
        chance = [
            auroc(found.positive, x @ rng.standard_normal(data.hidden)) for _ in range(_CONTROLS)
        ]
        made.append(
            VectorScore(
                layer=layer,
                auroc=auroc(found.positive, along),
                separation=separation(along, found.positive),
                length=float(along[found.positive].mean() - along[~found.positive].mean()),
                random_auroc=max(max(a, 1.0 - a) for a in chance),
            )
        )
    return tuple(made)
