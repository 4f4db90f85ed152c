"""Finding a probe by name."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Final, TypeAlias

from inspect_lens._base.artifact import find_artifact, from_files, read_artifact
from inspect_lens._base.shipped import model_path
from inspect_lens.errors import ArtifactError
from inspect_lens.probe.card._card import ProbeCard
from inspect_lens.probe.card._files import PROBE, decode_probe

from ._linear import Probe
from ._neural import NeuralProbe

__all__ = ["AnyProbe", "check_model", "fingerprint_model", "load_probe", "register_probe_dir"]

AnyProbe: TypeAlias = Probe | NeuralProbe
"""What `load_probe` returns; both score arrays the same way."""

_registered: Final[list[Path]] = []


def register_probe_dir(folder: str | Path) -> None:
    """Add a folder to look for named probes in, before any other.

    A package that ships probes calls this when it is imported.

    Args:
        folder: has `<model>/<name>/` below it.

    Example:
        ```python
        from inspect_lens.probe import load_probe, register_probe_dir

        load_probe("organism/deception-lr").save("my-probes/mine/lr")
        register_probe_dir("my-probes")
        assert load_probe("mine/lr").sha256 == load_probe("organism/deception-lr").sha256
        ```
    """
    path = Path(folder).resolve()
    if path in _registered:
        _registered.remove(path)
    _registered.insert(0, path)


def load_probe(probe: str | Path | AnyProbe) -> AnyProbe:
    """Load a probe by name, by path or from the Hugging Face hub.

    `hf://owner/repository/folder@revision` (folder and revision may be left out) is downloaded
    into the hub's cache.

    A path that exists wins. Else it is looked up in the registered folders, then in the working
    directory and each folder above it, as a name below `probes/` and as a path, and in `probes/` of
    the source tree that this package was installed from. The last part alone of a name such as
    `organism/deception-lr` is enough when it is unique.

    Args:
        probe: a folder, its `probe.safetensors`, a name, an `hf://` address, or a probe, which
            is returned.

    Raises:
        ArtifactError: nothing is found, a name is ambiguous, or the files are wrong.

    Example:
        ```python
        import numpy as np

        from inspect_lens.probe import load_probe

        probe = load_probe("organism/deception-lr")
        assert probe.layers == (4,)
        acts = np.random.default_rng(0).standard_normal(
            (1, 12, probe.hidden)
        )  # (layers, tokens, hidden)
        assert probe.score_tokens(acts).shape == (12,)
        print(probe.score(acts) > probe.threshold.value)
        ```
    """
    if isinstance(probe, AnyProbe):
        return probe
    path = find_artifact(PROBE, probe, _registered)
    folder, content, card = read_artifact(PROBE, path, ProbeCard.model_validate)
    tensors = decode_probe(content, card, folder)
    if card.kind == "linear":
        return from_files(Probe, folder, **tensors, card=card)
    return from_files(NeuralProbe, folder, tensors=tensors, card=card)


_BLOCK_BYTES = 4096
_BLOCKS = 64


def fingerprint_model(path: str | Path) -> str | None:
    """Fingerprint (64 hex digits) of a local checkpoint, other for any fine-tune; None for none.

    Hashes `config.json` and, of each safetensors file, name, size, header and 64 evenly spaced
    blocks of 4 KiB: training changes nearly every weight. Small files are read whole.

    Args:
        path: checkpoint folder, or the name of the shipped model, `organism`.

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
    """Raise an error if a probe was made for another model; False where that cannot be told.

    Args:
        probe: with or without a fingerprint in its card.
        model: name or path that the engine was started with.

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
