"""The three files of a probe: tensors, card, and the card for people."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from inspect_lens._artifact import (
    ArtifactKind,
    decode_tensors,
    encode_tensors,
    read_artifact,
    write_artifact,
    write_atomic,
)

from ._card import ProbeCard
from ._render import render_card

__all__ = [
    "PROBE",
    "decode_probe",
    "encode_probe",
    "read_probe_files",
    "write_atomic",
    "write_probe_files",
]

PROBE: Final = ArtifactKind(
    name="probe",
    folder="probes",
    tensors="probe.safetensors",
    format="inspect_lens.probe/1",
    writer="Probe.save",
    example="organism/deception-lr",
)
_LINEAR = ("weight", "bias", "mean", "scale")
_NEURAL = ("value", "bias", "mean", "scale")


def encode_probe(tensors: dict[str, NDArray[np.float32]], card: ProbeCard) -> bytes:
    """Content of `probe.safetensors`.

    Args:
        tensors: float32, by name.
        card: of the same probe.

    Returns:
        The bytes.
    """
    return encode_tensors(PROBE, tensors, _header(card))


def decode_probe(content: bytes, card: ProbeCard, folder: Path) -> dict[str, NDArray[np.float32]]:
    """Read `probe.safetensors` and compare it with the card.

    Args:
        content: of the file.
        card: of the same folder.
        folder: for error messages.

    Returns:
        Tensors by name, float32.

    Raises:
        ArtifactError: damaged, of another format, or not the probe of this card.
    """
    linear = card.kind == "linear"
    return decode_tensors(
        PROBE,
        content,
        _header(card),
        folder,
        allowed=_LINEAR if linear else _NEURAL,
        exact=linear,
        what=f"a {card.kind} probe",
    )


def write_probe_files(folder: Path, content: bytes, card: ProbeCard) -> Path:
    """Write the three files; the card comes last among those that are read back."""
    return write_artifact(
        PROBE, folder, content, card, render=lambda digest: render_card(card, sha256=digest)
    )


def read_probe_files(path: Path) -> tuple[Path, bytes, ProbeCard]:
    """Read tensors and card and compare the hash.

    Args:
        path: the folder, or `probe.safetensors` inside it.

    Returns:
        Folder, content of `probe.safetensors`, card.

    Raises:
        ArtifactError: a file is missing, the card does not parse, or the hash differs.
    """
    folder, content, card = read_artifact(PROBE, path, ProbeCard.model_validate)
    return folder, content, card


def _header(card: ProbeCard) -> dict[str, Any]:
    """What decides a score or a verdict, as JSON values."""
    card_json = card.model_dump(mode="json")
    kept = ("name", "layers", "hidden", "site", "positions", "pool", "model")
    header = {key: card_json[key] for key in kept}
    header["thresholds"] = [[t.fpr, t.value] for t in card.thresholds]
    if card.kind != "linear" or card.selection:
        header |= {key: card_json[key] for key in ("kind", "head", "selection")}
    return header
