"""What the collector hands on."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from inspect_lens.spec import TensorData

__all__ = ["Collected"]


@dataclass(frozen=True)
class Collected:
    """What arrived for one request."""

    tensors: dict[int, TensorData]
    """(rows of a token, or shares of workers, positions, width or columns) of each result."""
    n_steered: int
    """Tokens that the worker steered; one that was computed twice counts once."""
    paths: tuple[str, ...]
    fired: dict[int, int] = field(default_factory=dict)
    """By gate that lasts, the position at which it fired."""
    attention: dict[int, dict[str, Any]] = field(default_factory=dict)
    """By layer, what the pattern of its attention depends on."""
    open_at: dict[int, int] = field(default_factory=dict)
    """By running gate, its note; see `gate_history.open_among`."""
