"""Finding a probe by name."""

from __future__ import annotations

from pathlib import Path
from typing import Final, TypeAlias

from inspect_lens._artifact import find_artifact
from inspect_lens.errors import ArtifactError, SpecError
from inspect_lens.probe.card._files import PROBE, decode_probe, read_probe_files

from ._linear import Probe
from ._neural import NeuralProbe

__all__ = ["AnyProbe", "load_probe", "register_probe_dir"]

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
    directory and each folder above it (Inspect loads a task in the task's own folder), as a name
    below `probes/` and as a path, and in `probes/` of the source tree that this package was
    installed from. The last part alone of a name such as `organism/deception-lr` is enough when
    it is unique, which is all that Inspect logs of a `Path`.

    Args:
        probe: a folder, its `probe.safetensors`, a name, an `hf://` address, or a probe, which
            is returned.

    Returns:
        A `Probe` (linear) or a `NeuralProbe`, as its card says.

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
    if not isinstance(probe, str | Path):
        raise ArtifactError(
            f"probe={probe!r}: a {type(probe).__name__}; allowed are a name, a path or a Probe; a "
            "log that shows this used a probe that was never saved: save it and pass its path"
        )
    return _read(find_artifact(PROBE, probe, _registered))


def _read(path: Path) -> AnyProbe:
    folder, content, card = read_probe_files(path)
    if card.kind == "linear":
        return Probe.load(folder)
    try:
        return NeuralProbe(tensors=decode_probe(content, card, folder), card=card, path=folder)
    except SpecError as error:
        raise ArtifactError(f"{folder}: {error}") from None
