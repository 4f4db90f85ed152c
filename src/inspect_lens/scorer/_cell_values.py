"""What another scorer says of each cell of a sweep, and how that stands in a log."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from inspect_ai.scorer import Scorer, Target, value_to_float
from inspect_ai.solver import TaskState

from inspect_lens.errors import ArtifactError
from inspect_lens.reading import CellScores, SteeringCell

from ._broken import is_broken
from ._cell_state import cell_state

__all__ = ["Valued", "cell_values", "rows_in_log"]

Valued = tuple[SteeringCell, float | None]
"""A cell and its value; None where it has none."""


async def cell_values(
    state: TaskState,
    target: Target,
    cells: Sequence[SteeringCell],
    scorer: Scorer | None,
    *,
    key: str | None,
    asker: str,
) -> list[Valued]:
    """Score each cell on the sample's prompt with that cell's completion.

    Args:
        state: of the sample.
        target: of the sample.
        cells: of the sample.
        scorer: of one answer; None takes the numbers of the sweep's own scorer.
        key: entry to take, of a scorer whose value is a dict.
        asker: name of the scorer that asks, for messages.

    Returns:
        The cells with their values, in order.

    Raises:
        ArtifactError: the sweep had no scorer of its own, or there is no such entry.
    """
    if scorer is not None:
        return [(cell, await _number(scorer, state, cell, target, key)) for cell in cells]
    values = list(CellScores(store=state.store).values)
    if len(values) != len(cells):
        raise ArtifactError(
            f"store: {len(values)} values for {len(cells)} cells; allowed is one each; pass a "
            f"scorer to {asker}, or to the solver that made the cells"
        )
    return list(zip(cells, values, strict=True))


def rows_in_log(valued: Sequence[Valued]) -> list[list[Any]]:
    """The form in which `rows_of` and `dose_curves` read cells.

    Args:
        valued: cells of one sample.

    Returns:
        One row per cell: kind, layer, scale, value, vector, whether the answer fell apart.
    """
    return [
        [c.kind, c.layer, c.scale, v, c.vector, v is None or is_broken(c.completion)]
        for c, v in valued
    ]


async def _number(
    scorer: Scorer, state: TaskState, cell: SteeringCell, target: Target, key: str | None
) -> float | None:
    """Value of one cell; None where the scorer gave none."""
    score = await scorer(cell_state(state, cell), target)
    value: Any = None if score is None else score.value
    if isinstance(value, Mapping):
        if key is None or key not in value:
            raise ArtifactError(
                f"key={key!r}: the scorer gives a dict with {sorted(value)}; pass one of these"
            )
        value = value[key]
    number = math.nan if value is None else float(value_to_float()(value))
    return number if math.isfinite(number) else None
