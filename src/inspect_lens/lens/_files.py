"""The three files of a lens: tensors, card, and the card for people."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from numpy.typing import NDArray

from inspect_lens._artifact import (
    ArtifactKind,
    decode_tensors,
    encode_tensors,
    read_artifact,
    write_artifact,
)

from ._card import LensCard

__all__ = ["LENS", "read_lens_files", "write_lens_files"]

LENS: Final = ArtifactKind(
    name="lens",
    folder="lenses",
    tensors="lens.safetensors",
    format="inspect_lens.lens/1",
    writer="Lens.save",
    example="organism/tuned",
)


def read_lens_files(path: Path) -> tuple[Path, dict[str, Any], LensCard]:
    """Folder, tensors and card, checked against each other.

    Raises:
        ArtifactError: a file is missing or damaged, or they disagree.
    """
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
    rows = [("kind", card.kind), ("source", card.source), ("hidden", str(card.hidden))]
    if card.model:
        rows += [("model", card.model.name), ("model sha256", card.model.sha256 or "not recorded")]
    if card.training:
        t = card.training
        rows += [
            ("method", t.method),
            ("data", f"{t.dataset} ({t.n_prompts} prompts, {t.n_tokens} tokens)".strip()),
            ("settings", ", ".join(f"{k}={v}" for k, v in t.settings.items())),
        ]
    rows += [
        ("lens sha256", digest),
        ("inspect_lens", card.inspect_lens_version),
        ("command", f"`{card.command}`" if card.command else ""),
        ("created", card.created.isoformat()),
    ]
    parts = [f"# {card.name}", _table(["fact", "value"], [[k, v] for k, v in rows if v])]
    if card.quality:
        head = ["layer", "KL (nats)", "logit lens", "same best token", "logit lens"]
        table = [
            [str(q.layer), f"{q.kl:.3f}", f"{q.logit_kl:.3f}", f"{q.agreement:.3f}",
             f"{q.logit_agreement:.3f}"]
            for q in card.quality
        ]  # fmt: skip
        told = f"Against the model's own predictions, on {card.n_held_out} held-out rows a layer."
        parts += ["## Quality", told, _table(head, table)]
    if card.notes:
        parts += ["## Notes", "\n".join(f"- {note}" for note in card.notes)]
    return "\n\n".join(parts) + "\n"


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(c.replace("|", "\\|") for c in r) + " |" for r in lines)
