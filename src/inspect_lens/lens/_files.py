"""The three files of a lens: tensors, card, and the card for people."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Final, Self

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
from inspect_lens.spec import LensKind


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


class LensCard(ArtifactCard):
    """Facts about a lens; saved as `card.json`, rendered as `card.md`."""

    kind: LensKind
    """`tuned`: `h + A h + b`; `jacobian`: `J h`."""
    n_layers: int = Field(gt=0)
    """Decoder layers of the model."""
    layers: Annotated[tuple[int, ...], Field(min_length=1)]
    """Layers that it translates, ascending, 0-based."""
    hidden: int = Field(gt=0)
    """Width of the residual stream."""
    model: ModelRef | None = None
    training: LensTraining | None = None
    quality: tuple[LensQuality, ...] = ()
    """On held-out texts, by layer."""
    n_held_out: int = 0
    """Rows of each layer that `quality` was measured on."""

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


LENS: Final = ArtifactKind(
    name="lens",
    folder="lenses",
    tensors="lens.safetensors",
    format="inspect_lens.lens/1",
    writer="Lens.save",
    example="organism/tuned",
)


def read_lens_files(path: Path) -> tuple[Path, dict[str, Any], LensCard]:
    """Folder, tensors and card, checked against each other."""
    folder, content, card = read_artifact(LENS, path, LensCard.model_validate)
    tensors: dict[str, Any] = decode_tensors(
        LENS,
        content,
        _header(card),
        folder,
        allowed=("matrix", "bias") if card.kind == "tuned" else ("matrix",),
        exact=True,
        what=f"a {card.kind} lens",
        dtypes=("float32", "float16"),
    )
    return folder, tensors, card


def write_lens_files(folder: Path, tensors: dict[str, NDArray[Any]], card: LensCard) -> Path:
    """Write the three files; the card comes last among those that are read back."""
    content = encode_tensors(LENS, tensors, _header(card))
    return write_artifact(LENS, folder, content, card, render=lambda digest: _render(card, digest))


def _header(card: LensCard) -> dict[str, Any]:
    """What decides what the tensors mean, as JSON values."""
    values = card.model_dump(mode="json")
    return {key: values[key] for key in ("name", "kind", "n_layers", "layers", "hidden", "model")}


def _render(card: LensCard, digest: str) -> str:
    facts: list[tuple[str, str]] = [("kind", card.kind), ("hidden", str(card.hidden))]
    if card.training:
        t = card.training
        facts += [
            ("method", t.method),
            ("data", f"{t.dataset} ({t.n_prompts} prompts, {t.n_tokens} tokens)".strip()),
            ("settings", ", ".join(f"{k}={v}" for k, v in t.settings.items())),
        ]
    sections: list[str] = []
    if card.quality:
        head = ["layer", "KL (nats)", "logit lens", "same best token", "logit lens"]
        table = [
            [str(q.layer), f"{q.kl:.3f}", f"{q.logit_kl:.3f}", f"{q.agreement:.3f}",
             f"{q.logit_agreement:.3f}"]
            for q in card.quality
        ]  # fmt: skip
        told = f"Against the model's own predictions, on {card.n_held_out} held-out rows a layer."
        sections = ["## Quality", told, markdown_table(head, table)]
    return card.render(facts, sections, digest=("lens sha256", digest))
