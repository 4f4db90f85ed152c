"""Finding a lens by name."""

from __future__ import annotations

from pathlib import Path

from inspect_lens._base.artifact import CARD_FILE, find_artifact

from ._files import LENS, read_lens_files
from ._lens import Lens

__all__ = ["is_lens", "load_lens"]


def is_lens(path: str | Path) -> bool:
    """Whether a path is the folder of a lens, or its `lens.safetensors`.

    Args:
        path: a path that need not exist.

    Example:
        ```python
        from inspect_lens.lens import is_lens

        assert not is_lens("organism/deception-lr")  # a probe
        ```
    """
    path = Path(path)
    folder = path.parent if path.name == LENS.tensors else path
    return (folder / LENS.tensors).is_file() and (folder / CARD_FILE).is_file()


def load_lens(lens: str | Path | Lens) -> Lens:
    """Load a lens by name, by path or from the Hugging Face hub.

    Names are found below `lenses/` as those of probes below `probes/`, see
    `inspect_lens.probe.load_probe`.

    Args:
        lens: a folder, its `lens.safetensors`, a name, an `hf://` address, or a lens, which is
            returned.

    Returns:
        The lens.

    Raises:
        ArtifactError: nothing is found, or the files are damaged or disagree.

    Example:
        ```python
        import numpy as np

        from inspect_lens.lens import Lens, LensCard, load_lens

        card = LensCard(name="mine/copy", kind="jacobian", n_layers=6, layers=(2,), hidden=256)
        Lens(matrix=np.eye(256)[None], card=card).save("my-lens")
        assert load_lens("my-lens").layers == (2,)
        ```
    """
    if isinstance(lens, Lens):
        return lens
    folder, tensors, card = read_lens_files(find_artifact(LENS, lens))
    return Lens(matrix=tensors["matrix"], bias=tensors.get("bias"), card=card, path=folder)
