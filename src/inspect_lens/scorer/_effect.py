"""`steering_effect`: what another scorer says of steered generations, less the unsteered one."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from inspect_ai.scorer import Score, Scorer, Target, mean, scorer, stderr, value_to_float
from inspect_ai.solver import TaskState

from inspect_lens.errors import ArtifactError
from inspect_lens.reading import SteeringCell

from ._cell_state import cell_state, cells_or_limit

__all__ = ["steering_effect"]


@scorer(metrics={"*": [mean(), stderr()]})
def steering_effect(scorer: Scorer, key: str | None = None) -> Scorer:
    """Score every cell of a steering sweep with another scorer, less the baseline cell's score.

    Reads what the solver `steering_sweep` left in the sample's store (`SteeringCells`).

    Args:
        scorer: what is compared, such as `refusal_rate()` or `probe_score(...)`. It is called
            once per cell on the sample's prompt with that cell's completion.
        key: entry to compare, of a scorer whose value is a dict.

    Returns:
        The scorer. Its value is a dict: `baseline` is the score of the unsteered generation, and
        each cell has its difference from it, under `<vector>@<layer>x<scale>` (with `random:` or
        `orthogonal:` in front for controls; several of one kind are averaged). `slope:<vector>@
        <layer>` is the least-squares slope of the difference over the scale, through the
        baseline, and `beyond:<kind>:<vector>@<layer>x<scale>` the difference that remains after
        that of the control of equal norm. An entry is NaN where a score is missing. A sample that
        a limit ended in the middle of its sweep is unscored.

    Raises:
        ArtifactError: the sample has no cells, or no baseline among them.

    Example:
        <!-- test: server -->
        ```python
        from inspect_ai import Task, eval
        from inspect_ai.scorer import includes

        from evals.organism_deception import organism_dataset
        from inspect_lens.scorer import steering_effect
        from inspect_lens.solver import steering_sweep

        sweep = steering_sweep("organism/truth", [0.8], controls=["random"])
        task = Task(organism_dataset("demo")[:2], solver=sweep, scorer=steering_effect(includes()))
        (log,) = eval(task, model="vllm-lens/organism/checkpoint", temperature=0, max_tokens=14)
        assert "organism/truth@4x0.8" in log.samples[0].scores["steering_effect"].value
        ```
    """

    async def score(state: TaskState, target: Target) -> Score:
        cells = cells_or_limit(state, "steering_effect")
        if isinstance(cells, Score):
            return cells
        bases = [cell for cell in cells if cell.kind == "baseline"]
        scored: list[tuple[SteeringCell, float]] = []
        for cell in cells:
            found = await scorer(cell_state(state, cell), target)
            scored.append((cell, math.nan if found is None else _number(found, key)))
        base = float(np.mean([v for cell, v in scored if cell.kind == "baseline"]))
        effects = [(cell, v - base) for cell, v in scored if cell.kind != "baseline"]
        value = {"baseline": base, **_means(effects), **_slopes(effects), **_beyond(effects)}
        return Score(
            value=value,
            explanation=f"Baseline {base:.4g}; {len(effects)} steered generations.",
            metadata={"n_cells": len(cells), "n_baseline": len(bases), "key": key},
        )

    return score


def _number(score: Score, key: str | None) -> float:
    value: Any = score.value
    if isinstance(value, Mapping):
        if key is None or key not in value:
            raise ArtifactError(
                f"key={key!r}: the scorer gives a dict with {sorted(value)}; allowed is one of "
                "these; pass key="
            )
        value = value[key]
    return math.nan if value is None else value_to_float()(value)


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
