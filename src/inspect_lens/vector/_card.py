"""The card of a vector: what it is, where it comes from, and how long the stream is."""

from __future__ import annotations

from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from inspect_lens.probe import ModelRef
from inspect_lens.spec import RESID_POST, Site

__all__ = ["VectorCard", "VectorTraining"]


def _package_version() -> str:
    try:
        return version("inspect-lens")
    except PackageNotFoundError:
        return "unknown"


class VectorTraining(BaseModel):
    """Facts about the samples that a steering vector was found on."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    dataset: str
    sha256: str = ""
    """Hash of the activation set, labels and groups included; empty for bare arrays."""
    n_positive: int
    """Rows of the side that a positive scale moves to."""
    n_negative: int
    n_groups: int = 0
    on_policy: bool = True
    """Whether the model itself wrote the text that was read."""


class VectorCard(BaseModel):
    """Facts about a vector; saved as `card.json`, rendered as `card.md`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(min_length=1)
    """`<model>/<name>`, its folder below `vectors/`."""
    description: str = ""
    """What a positive scale does."""
    method: str = ""
    """How the direction was found, with its settings."""
    source: str = ""
    """Paper or code that the method comes from."""

    layers: Annotated[tuple[int, ...], Field(min_length=1)]
    """Layers that the vector has a direction for, ascending."""
    layer: int | None = None
    """The layer to steer at when nobody says; None where the vector has several and none was
    chosen."""
    hidden: int = Field(gt=0)
    """Width of the residual stream."""
    site: Site = RESID_POST
    """Where in the block the rows were captured, and where the vector is added."""
    positions: str = ""
    """The tokens whose rows were compared, in words."""
    residual_norms: tuple[float, ...] = ()
    """Mean norm of those rows at each layer, the unit to judge a scale by: at the card's layer,
    a vector of this length doubles what it is added to."""

    model: ModelRef | None = None
    training: VectorTraining | None = None
    separation: tuple[float, ...] = ()
    """AUROC of the direction at each layer on samples that it was not found on."""

    notes: tuple[str, ...] = ()
    inspect_lens_version: str = Field(default_factory=_package_version)
    command: str = ""
    """Command that made the vector."""
    created: datetime = Field(default_factory=lambda: datetime.now(UTC).replace(microsecond=0))

    @model_validator(mode="after")
    def _check(self) -> Self:
        if list(self.layers) != sorted(set(self.layers)) or self.layers[0] < 0:
            raise ValueError(
                f"layers {self.layers} are not ascending, unique and 0-based; sort the layers"
            )
        if self.layer is not None and self.layer not in self.layers:
            raise ValueError(f"layer {self.layer} is none of {self.layers}; choose one of these")
        for name in ("residual_norms", "separation"):
            values = getattr(self, name)
            if values and len(values) != len(self.layers):
                raise ValueError(
                    f"{name} has {len(values)} values for {len(self.layers)} layers; give one each"
                )
        return self
