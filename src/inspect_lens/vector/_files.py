"""The three files of a vector."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, model_validator

from inspect_lens._base.artifact import (
    ArtifactCard,
    ArtifactKind,
    decode_tensors,
    encode_tensors,
    markdown_table,
    read_artifact,
    write_artifact,
)
from inspect_lens.probe import ModelRef
from inspect_lens.spec import RESID_POST, Site


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


class VectorCard(ArtifactCard):
    """Facts about a vector; saved as `card.json`, rendered as `card.md`."""

    description: str = ""
    """What a positive scale does."""
    method: str = ""
    """How the direction was found, with its settings."""

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


VECTOR: Final = ArtifactKind(
    name="vector",
    folder="vectors",
    tensors="vector.safetensors",
    format="inspect_lens.vector/1",
    writer="Vector.save",
    example="organism/truth",
)


def encode_vector(tensors: dict[str, NDArray[np.float32]], card: VectorCard) -> bytes:
    """Content of `vector.safetensors`."""
    return encode_tensors(VECTOR, tensors, _header(card))


def read_vector_files(path: Path) -> tuple[Path, dict[str, NDArray[np.float32]], VectorCard]:
    """Folder, tensors and card, checked against each other."""
    folder, content, card = read_artifact(VECTOR, path, VectorCard.model_validate)
    tensors = decode_tensors(
        VECTOR,
        content,
        _header(card),
        folder,
        allowed=("direction", "norm"),
        exact=True,
        what="a vector",
    )
    return folder, tensors, card


def write_vector_files(
    folder: Path, content: bytes, card: VectorCard, norms: Sequence[float]
) -> Path:
    """Write the three files; the card comes last among those that are read back."""
    return write_artifact(
        VECTOR, folder, content, card, render=lambda digest: _render(card, digest, norms)
    )


def _header(card: VectorCard) -> dict[str, Any]:
    """What decides where and how the tensors are added, as JSON values."""
    card_json = card.model_dump(mode="json")
    return {key: card_json[key] for key in ("name", "layers", "layer", "hidden", "site", "model")}


def _render(card: VectorCard, digest: str, norms: Sequence[float]) -> str:
    facts = [("method", card.method), ("site", card.site), ("hidden", str(card.hidden))]
    facts += [("layer", "" if card.layer is None else str(card.layer))]
    facts += [("positions", card.positions)]
    if card.training:
        t = card.training
        facts += [
            ("data", f"{t.dataset}{f' (sha256 {t.sha256})' if t.sha256 else ''}"),
            ("rows", f"{t.n_positive} positive, {t.n_negative} negative, {t.n_groups} groups"),
            ("on-policy", "yes" if t.on_policy else "no"),
        ]
    blank = [""] * len(card.layers)
    units = [f"{n:.4g}" for n in card.residual_norms] or blank
    areas = [f"{a:.4f}" for a in card.separation] or blank
    layers = [
        [f"**{layer}**" if layer == card.layer else str(layer), f"{norm:.4g}", unit, area]
        for layer, norm, unit, area in zip(card.layers, norms, units, areas, strict=True)
    ]
    head = ["layer", "length at scale 1", "mean norm of the rows", "held-out AUROC"]
    sections = ["## Layers", markdown_table(head, layers)]
    return card.render(facts, sections, digest=("vector sha256", digest))
