"""What an engine can know by name."""

from __future__ import annotations

from typing import TypeAlias

from inspect_lens.spec.asks._engine_lens import EngineLens
from inspect_lens.spec.asks._probe import EngineProbe
from inspect_lens.spec.asks._steer import SteeringVector
from inspect_lens.spec.edits import EngineEdits

__all__ = ["Registrable"]

Registrable: TypeAlias = EngineProbe | SteeringVector | EngineEdits | EngineLens
"""A probe, a vector, edits or a lens, as `inspect_lens.engine.register` takes it."""
