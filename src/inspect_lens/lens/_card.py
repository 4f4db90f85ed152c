"""The card of a lens: what it is, what it was fitted on, and how well it predicts."""

from __future__ import annotations

from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from inspect_lens.probe import ModelRef
from inspect_lens.spec import LensKind

__all__ = ["LensCard", "LensQuality", "LensTraining"]


def _package_version() -> str:
    try:
        return version("inspect-lens")
    except PackageNotFoundError:
        return "unknown"


class LensTraining(BaseModel):
    """What a lens was fitted on, and how."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    method: str
    """How it was fitted, in words."""
    dataset: str = ""
    """Which texts."""
    n_prompts: int = Field(gt=0)
    """Texts that it was fitted on."""
    n_tokens: int = Field(gt=0)
    """Rows of each layer that it was fitted on."""
    settings: dict[str, int | float | str] = {}
    """Arguments that decide the result."""


class LensQuality(BaseModel):
    """How far the predictions of one layer are from the model's own, on held-out texts."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    layer: int
    """Which layer."""
    kl: float
    """Mean KL divergence in nats from the model's own next-token distribution to the lens's."""
    logit_kl: float
    """The same of the logit lens."""
    agreement: float
    """Share of rows whose most likely token is that of the model."""
    logit_agreement: float
    """The same of the logit lens."""


class LensCard(BaseModel):
    """Facts about a lens; saved as `card.json`, rendered as `card.md`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(min_length=1)
    """`<model>/<name>`, or any text."""
    kind: LensKind
    """`tuned`: `h + A h + b`; `jacobian`: `J h`."""
    n_layers: int = Field(gt=0)
    """Decoder layers of the model."""
    layers: Annotated[tuple[int, ...], Field(min_length=1)]
    """Layers that it translates, ascending, 0-based."""
    hidden: int = Field(gt=0)
    """Width of the residual stream."""
    source: str = ""
    """Paper or code that the method comes from."""
    model: ModelRef | None = None
    training: LensTraining | None = None
    quality: tuple[LensQuality, ...] = ()
    """On held-out texts, by layer."""
    n_held_out: int = 0
    """Rows of each layer that `quality` was measured on."""
    notes: tuple[str, ...] = ()
    inspect_lens_version: str = Field(default_factory=_package_version)
    command: str = ""
    """Command that made the lens."""
    created: datetime = Field(default_factory=lambda: datetime.now(UTC).replace(microsecond=0))

    @model_validator(mode="after")
    def _check(self) -> Self:
        layers = self.layers
        if list(layers) != sorted(set(layers)) or layers[0] < 0 or layers[-1] >= self.n_layers:
            raise ValueError(
                f"layers {layers} of {self.n_layers}; allowed are 0 to {self.n_layers - 1}, "
                "ascending and each once"
            )
        if unknown := {one.layer for one in self.quality} - set(layers):
            raise ValueError(f"quality names layers {sorted(unknown)}, which are none of {layers}")
        return self
