"""What a sweep's own scorer said of each cell, beside the cells."""

from __future__ import annotations

from inspect_ai.util import StoreModel
from pydantic import Field

__all__ = ["CellScores"]


class CellScores(StoreModel):
    """Scores of the cells of a sweep for one sample, in its store."""

    values: list[float | None] = Field(default_factory=list)
    """One per cell, in their order; None where the scorer gave none. Empty without a scorer."""
