"""The three files of a probe: tensors, card, and the card for people.

`probe.safetensors` is complete in itself: its one metadata entry repeats all of the card that
decides a score, so its sha256 (which any shell can compute) identifies the probe.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.numpy import load as load_tensors
from safetensors.numpy import save as save_tensors

from inspect_lens.errors import ArtifactError

from ._card import ProbeCard
from ._render import render_card

__all__ = [
    "CARD_FILE",
    "PROBE_FILE",
    "decode_probe",
    "encode_probe",
    "read_probe_files",
    "write_atomic",
    "write_probe_files",
]

PROBE_FILE = "probe.safetensors"
CARD_FILE = "card.json"
_FORMAT = "inspect_lens.probe/1"
_KEY = "inspect_lens"
_LINEAR = frozenset({"weight", "bias", "mean", "scale"})
_NEURAL = frozenset({"value", "bias", "mean", "scale"})


def write_atomic(path: Path, content: bytes) -> None:
    """Write a file so that readers see the old or the new content, never a part.

    Args:
        path: its folder has to exist.
        content: all of it.
    """
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    temporary = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        # mkstemp makes it private; an artefact is as readable as its folder says.
        temporary.chmod(0o644)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def encode_probe(tensors: dict[str, NDArray[np.float32]], card: ProbeCard) -> bytes:
    """Content of `probe.safetensors`.

    Args:
        tensors: float32, by name.
        card: of the same probe.

    Returns:
        The bytes; one metadata entry only, as safetensors orders several at random.
    """
    contiguous = {name: np.ascontiguousarray(array) for name, array in tensors.items()}
    header = json.dumps(_header(card), sort_keys=True)
    content: bytes = save_tensors(contiguous, metadata={_KEY: header})
    return content


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
    file = folder / PROBE_FILE
    try:
        tensors: dict[str, NDArray[np.float32]] = load_tensors(content)
        length = int.from_bytes(content[:8], "little")
        metadata = json.loads(content[8 : 8 + length]).get("__metadata__", {})
        header = dict(json.loads(metadata[_KEY]))
    except (SafetensorError, ValueError, TypeError, KeyError) as error:
        raise ArtifactError(
            f"{file}: not a probe of inspect_lens ({type(error).__name__}: {error}); allowed is "
            "what Probe.save writes; restore the file or train the probe again"
        ) from None
    linear = card.kind == "linear"
    fits = set(tensors) == _LINEAR if linear else set(tensors) >= _NEURAL
    if not fits or any(t.dtype != np.float32 for t in tensors.values()):
        held = {name: str(t.dtype) for name, t in sorted(tensors.items())}
        raise ArtifactError(
            f"{file}: holds {held}; allowed for a {card.kind} probe are "
            f"{sorted(_LINEAR if linear else _NEURAL)}, all float32; restore the file or train "
            "the probe again"
        )
    for key, expected in _header(card).items():
        if header.get(key) != expected:
            raise ArtifactError(
                f"{folder / CARD_FILE}: {key} is {expected!r} and the tensors were saved with "
                f"{header.get(key)!r}; both have to agree; undo the edit, or make the probe anew"
            )
    return tensors


def write_probe_files(folder: Path, content: bytes, card: ProbeCard) -> Path:
    """Write the three files; the card comes last among those that are read back."""
    folder.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256(content).hexdigest()
    stored = {"format": _FORMAT, "sha256": digest, "card": card.model_dump(mode="json")}
    # A crash between two writes over an older probe leaves a hash that does not fit, which
    # loading reports; it never leaves a mixture that loads.
    write_atomic(folder / PROBE_FILE, content)
    write_atomic(
        folder / CARD_FILE, (json.dumps(stored, indent=2, allow_nan=False) + "\n").encode()
    )
    write_atomic(folder / "card.md", render_card(card, sha256=digest).encode())
    return folder


def read_probe_files(path: Path) -> tuple[Path, bytes, ProbeCard]:
    """Read tensors and card and compare the hash.

    Args:
        path: the folder, or `probe.safetensors` inside it.

    Returns:
        Folder, content of `probe.safetensors`, card.

    Raises:
        ArtifactError: a file is missing, the card does not parse, or the hash differs.
    """
    folder = path.parent if path.is_file() else path
    try:
        content = (folder / PROBE_FILE).read_bytes()
        text = (folder / CARD_FILE).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ArtifactError(
            f"{folder}: cannot be read as a probe ({error}); allowed is a folder with {PROBE_FILE} "
            f"and {CARD_FILE}; check the path"
        ) from None
    try:
        stored: Any = json.loads(text)
        if stored["format"] != _FORMAT:
            raise ValueError(f"format {stored['format']!r}, this release reads {_FORMAT!r}")
        digest, card = stored["sha256"], ProbeCard.model_validate(stored["card"])
    except (ValueError, KeyError, TypeError, ValidationError) as error:
        raise ArtifactError(
            f"{folder / CARD_FILE}: not a card ({type(error).__name__}: {error}); allowed is what "
            "Probe.save writes; restore the file, or update inspect_lens if a newer one wrote it"
        ) from None
    actual = hashlib.sha256(content).hexdigest()
    if actual != digest:
        raise ArtifactError(
            f"{folder / PROBE_FILE}: sha256 {actual}, the card says {digest}; the file was damaged "
            "or replaced; restore both files, or train the probe again"
        )
    return folder, content, card


def _header(card: ProbeCard) -> dict[str, Any]:
    """What decides a score or a verdict, as JSON values."""
    card_json = card.model_dump(mode="json")
    kept = ("name", "layers", "hidden", "site", "positions", "pool", "model")
    header = {key: card_json[key] for key in kept}
    header["thresholds"] = [[t.fpr, t.value] for t in card.thresholds]
    if card.kind != "linear" or card.selection:
        header |= {key: card_json[key] for key in ("kind", "head", "selection")}
    return {"format": _FORMAT} | header
