"""What activations a request wants back."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from ._positions import Positions, parse_positions
from ._sites import RESID_POST, Site

__all__ = ["CaptureSpec", "Layers"]

Layers = Literal["all"] | tuple[int, ...]
"""`all`, or 0-based global layer numbers."""


class CaptureSpec(BaseModel):
    """Capture of one site at some layers for some tokens."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    layers: Layers = "all"
    """`all`, or layer numbers; results are stacked in ascending order."""

    positions: Positions = "all"
    """Tokens to keep. `all` means every token that is fed to the model: prompt plus
    completion without the last sampled token."""

    site: Site = RESID_POST
    """Place in the block."""

    transport: Literal["inline", "binary"] = Field(default="inline")
    """`inline`: base64 in the response; `binary`: a handle to fetch over HTTP."""

    @field_validator("layers", mode="before")
    @classmethod
    def _layers(cls, value: Any) -> Any:
        if value is True:
            return "all"
        if isinstance(value, int) and not isinstance(value, bool):
            return (value,)
        if isinstance(value, list | tuple):
            if not value:
                raise ValueError("is empty; name at least one layer, or 'all'")
            if any(isinstance(v, bool) or not isinstance(v, int) for v in value):
                raise ValueError(f"{value!r} holds something that is not an integer")
            return tuple(sorted(set(value)))
        return value

    @field_validator("positions", mode="before")
    @classmethod
    def _positions(cls, value: Any) -> Any:
        return parse_positions(value, field="positions")
