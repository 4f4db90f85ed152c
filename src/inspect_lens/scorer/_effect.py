"""The table of a sweep's sample: each cell's value, less that of the unsteered answer."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from inspect_lens.reading import SteeringCell

__all__ = ["effects_of"]


def effects_of(cells: Sequence[tuple[SteeringCell, float | None]]) -> dict[str, float | None]:
    """Differences from the unsteered answer, by vector, layer and scale.

    Args:
        cells: of one sample, each with its value; None where it has none.

    Returns:
        `baseline` is the value of the unsteered answer. Each cell has its difference from it under
        `<vector>@<layer>x<scale>`, with `random:` or `orthogonal:` in front for controls; several
        of one kind are averaged. `slope:<vector>@<layer>` is the least-squares slope over the
        scale, through the baseline. `beyond:<control>:<vector>@<layer>x<scale>` is what remains
        of a cell after the control of equal norm. None where a value is missing.
    """
    known = [(cell, math.nan if value is None else value) for cell, value in cells]
    base = float(np.mean([value for cell, value in known if cell.kind == "baseline"]))
    effects = [(cell, value - base) for cell, value in known if cell.kind != "baseline"]
    made = {"baseline": base, **_means(effects), **_slopes(effects), **_beyond(effects)}
    return {name: value if math.isfinite(value) else None for name, value in made.items()}


def _where(cell: SteeringCell) -> str:
    layer = "all" if cell.layer is None else str(cell.layer)
    return f"{cell.vector or 'vector'}@{layer}"


def _label(cell: SteeringCell) -> str:
    prefix = "" if cell.kind == "vector" else f"{cell.kind}:"
    return f"{prefix}{_where(cell)}x{cell.scale:g}"


def _means(effects: Sequence[tuple[SteeringCell, float]]) -> dict[str, float]:
    """Mean effect of each kind of cell."""
    found: dict[str, list[float]] = defaultdict(list)
    for cell, effect in effects:
        found[_label(cell)].append(effect)
    return {label: float(np.mean(values)) for label, values in found.items()}


def _slopes(effects: Sequence[tuple[SteeringCell, float]]) -> dict[str, float]:
    """Slope of the line through the baseline, by vector and layer."""
    found: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for cell, effect in effects:
        if cell.kind == "vector" and cell.scale:
            found[_where(cell)].append((cell.scale, effect))
    slopes = {}
    for where, points in found.items():
        x, y = np.array(points).T
        slopes[f"slope:{where}"] = float(x @ y / (x @ x))
    return slopes


def _beyond(effects: Sequence[tuple[SteeringCell, float]]) -> dict[str, float]:
    """Effect of the vector less that of each control beside it."""
    means = _means(effects)
    found = {}
    for cell, _ in effects:
        own = cell.model_copy(update={"kind": "vector"})
        if cell.kind in ("random", "orthogonal") and _label(own) in means:
            found[f"beyond:{_label(cell)}"] = means[_label(own)] - means[_label(cell)]
    return found
