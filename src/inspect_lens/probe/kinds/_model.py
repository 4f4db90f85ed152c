"""Telling whether a checkpoint is the one that a probe was trained on."""

from __future__ import annotations

import hashlib
from pathlib import Path

from inspect_lens._shipped import model_path
from inspect_lens.errors import ArtifactError

from ._linear import Probe
from ._neural import NeuralProbe

__all__ = ["check_model", "fingerprint_model"]

_BLOCK_BYTES = 4096
_BLOCKS = 64


def fingerprint_model(path: str | Path) -> str | None:
    """Fingerprint of a local checkpoint: cheap, and different for any fine-tune.

    Hashes `config.json` and, of each safetensors file, name, size, header and 64 evenly
    spaced blocks of 4 KiB; small files are read whole. Training changes nearly every weight,
    so two checkpoints that differ agree in all blocks only if one was edited by hand.

    Args:
        path: checkpoint folder, or the name of the shipped model, `organism`.

    Returns:
        64 hex digits, or None when there is no such folder or it has no safetensors.

    Example:
        ```python
        from inspect_lens.probe import fingerprint_model, load_probe

        found = fingerprint_model("organism/checkpoint")
        assert found == load_probe("organism/deception-lr").card.model.sha256
        ```
    """
    folder = Path(model_path(str(path)))
    weights = sorted(folder.glob("*.safetensors")) if folder.is_dir() else []
    if not weights:
        return None
    digest = hashlib.sha256()
    config = folder / "config.json"
    digest.update(config.read_bytes() if config.is_file() else b"")
    for file in weights:
        size = file.stat().st_size
        digest.update(f"{file.name}:{size}:".encode())
        with file.open("rb") as stream:
            if size <= _BLOCKS * _BLOCK_BYTES:
                digest.update(stream.read())
                continue
            head = 8 + int.from_bytes(stream.read(8), "little")
            stream.seek(0)
            digest.update(stream.read(min(head, size)))
            last = max(size - head - _BLOCK_BYTES, 0)
            for i in range(_BLOCKS):
                stream.seek(head + last * i // (_BLOCKS - 1))
                digest.update(stream.read(_BLOCK_BYTES))
    return digest.hexdigest()


def check_model(probe: Probe | NeuralProbe, model: str) -> bool:
    """Raise an error if a probe was made for another model.

    Args:
        probe: with or without a fingerprint in its card.
        model: name or path that the engine was started with.

    Returns:
        True when the fingerprints agree, False when one of them is unknown.

    Raises:
        ArtifactError: both are known and differ.

    Example:
        ```python
        from inspect_lens.probe import check_model, load_probe

        assert check_model(load_probe("organism/deception-lr"), "organism/checkpoint")
        ```
    """
    expected = probe.card.model
    if expected is None or expected.sha256 is None:
        return False
    actual = fingerprint_model(model)
    if actual is None:
        return False
    if actual != expected.sha256:
        raise ArtifactError(
            f"model={model!r} has fingerprint {actual[:12]}; probe {probe.name!r} was trained on "
            f"{expected.name!r} with {expected.sha256[:12]}; allowed is that model; train the "
            "probe on this one, or pass check_model=False to measure transfer"
        )
    return True
