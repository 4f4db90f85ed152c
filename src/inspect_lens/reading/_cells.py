"""`SteeringCells`: what a steering sweep generated for one sample, for scorers to compare."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

from inspect_ai.scorer import Score, value_to_float
from inspect_ai.util import Store, StoreModel
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from inspect_lens.errors import ArtifactError

_KEY = "SteeringCells:cells"

CellKind = Literal["vector", "random", "orthogonal", "baseline"]
"""What steered a cell: the vector, a random or orthogonal control, or nothing.
Of edits and latents, `vector` is the one that is meant, and `random` its control."""


class SteeringCell(BaseModel):
    """One answer of a sweep, with the vector, layer and scale that steered it."""

    model_config = ConfigDict(frozen=True)

    vector: str | None = None
    """Name, path or hash of the vector, or name of the edit or latent; a control names the one that
    it stands beside."""
    layer: int | None = None
    """Layer that was steered; None for the baseline, for all layers of the vector at once, and for
    edits."""
    scale: float = 0.0
    """Factor of the vector, with its sign, dose of the edit, or value of the latent; 0 for the
    baseline."""
    kind: CellKind
    completion: str
    """Text of the generation."""
    message_id: str | None = None
    """Of its assistant message; `activations_for` finds what it captured."""


class SteeringCells(StoreModel):
    """The cells of one sample, in its store: `state.store_as(SteeringCells).cells`."""

    cells: list[SteeringCell] = Field(default_factory=list)
    """In the order in which they were generated."""


_CELLS = TypeAdapter(list[SteeringCell])


def read_cells(store: Store) -> list[SteeringCell]:
    """Read the cells of a sample, live or out of a log.

    Args:
        store: `state.store`.

    Returns:
        The cells; an empty list where no sweep ran.

    Raises:
        ArtifactError: what stands in the store does not have the form of cells.

    Example:
        <!-- test: server -->
        ```python
        from inspect_ai import Task, eval
        from inspect_ai.util import Store

        from evals.organism_deception import organism_dataset
        from inspect_lens.reading import read_cells
        from inspect_lens.solver import steering_sweep

        sweep = steering_sweep("organism/truth", [0.8], controls=[])
        (log,) = eval(
            Task(dataset=organism_dataset("demo")[:1], solver=sweep),
            model="vllm-lens/organism/checkpoint",
            max_tokens=14,
        )
        cells = read_cells(Store(log.samples[0].store))
        assert [(cell.kind, cell.scale) for cell in cells] == [("baseline", 0.0), ("vector", 0.8)]
        ```
    """
    try:
        # SteeringCells and Store.get write their defaults into the store that they read.
        return _CELLS.validate_python(dict(store.items()).get(_KEY, []))
    except ValueError as error:
        raise ArtifactError(
            f"store: SteeringCells of this sample cannot be read ({error}); allowed is what "
            "steering_sweep writes"
        ) from None


def number_of(score: Score | None, key: str | None = None) -> float | None:
    """The finite number that a score is; None where it has none."""
    value: Any = None if score is None else score.value
    if isinstance(value, Mapping):
        if key is None or key not in value:
            raise ArtifactError(
                f"key={key!r}: the scorer gives a dict with {sorted(value)}; pass one of these"
            )
        value = value[key]
    number = math.nan if value is None else float(value_to_float()(value))
    return number if math.isfinite(number) else None


class CellScores(StoreModel):
    """Scores of the cells of a sweep for one sample, in its store."""

    values: list[float | None] = Field(default_factory=list)
    """One per cell, in their order; None where the scorer gave none. Empty without a scorer."""
