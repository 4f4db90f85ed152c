"""What activations a request wants back."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from ._positions import Positions, parse_positions
from ._sites import RESID_POST, SITES, Site, in_site_order

__all__ = ["CaptureSpec", "Layers", "SiteChoice"]

Layers = Literal["all"] | tuple[int, ...]
"""`all`, or 0-based global layer numbers."""

SiteChoice = Site | tuple[Site, ...]
"""One site, or several in the order of `SITES`."""


class CaptureSpec(BaseModel):
    """Capture of one or more sites at some layers for some tokens."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    layers: Layers = "all"
    """`all`, or layer numbers; results are stacked in ascending order."""

    positions: Positions = "all"
    """Tokens to keep. `all` means every token that is fed to the model: prompt plus
    completion without the last sampled token."""

    site: SiteChoice = RESID_POST
    """Place in the block, or a list of places: the same layers and tokens are kept of each.
    The result of `resid_post` is named `residual_stream`, the others as their site."""

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

    @field_validator("site", mode="before")
    @classmethod
    def _site(cls, value: Any) -> Any:
        sites = [value] if isinstance(value, str) else value
        if not isinstance(sites, list | tuple) or not sites:
            raise ValueError(f"{value!r}; allowed are {', '.join(SITES)}, or a list of these")
        for site in sites:
            if site not in SITES:
                raise ValueError(f"{site!r}; allowed are {', '.join(SITES)}")
        ordered = in_site_order(sites)
        return ordered[0] if len(ordered) == 1 else ordered

    @property
    def sites(self) -> tuple[Site, ...]:
        """The sites as a tuple."""
        return (self.site,) if isinstance(self.site, str) else self.site

    @field_validator("positions", mode="before")
    @classmethod
    def _positions(cls, value: Any) -> Any:
        return parse_positions(value, field="positions")
