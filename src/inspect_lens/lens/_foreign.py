"""Jacobian lenses that others fitted: the file of `jlens`, which neuronpedia publishes.

A file is a torch archive with `J` (a matrix for each layer, whose rows are outputs), `n_prompts`,
`source_layers` and `d_model`; TransformerLens adds `metadata`. A layer is a block, counted from 0,
whose output is translated.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Final

import numpy as np

from inspect_lens._base.arguments import judged_arguments
from inspect_lens._base.artifact import download
from inspect_lens._base.untrusted import load_torch, read_regular
from inspect_lens.errors import ArtifactError, SpecError
from inspect_lens.probe import ModelRef

from ._lens import Lens, LensCard

__all__ = ["import_lens"]

_BYTES: Final = 64 << 30
_SOURCE: Final = (
    "jlens; Verbalizable Representations Form a Global Workspace in Language Models "
    "(Anthropic 2026)"
)


@judged_arguments
def import_lens(
    path: str | Path, *, name: str, n_layers: int | None = None, model: ModelRef | None = None
) -> Lens:
    """Read a Jacobian lens that `jlens` or TransformerLens fitted.

    The file is a pickle; only tensors and plain values are read from it. It does not say how many
    layers the model has. Published lenses translate all but the last, so that is assumed.

    Args:
        path: of the `.pt` file, or `hf://owner/repository/folder/file.pt[@revision]`.
        name: `<model>/<name>`, for the card and the folder.
        n_layers: decoder layers of the model; by default those up to the file's last, and one more.
        model: the model that it was fitted on; by default what the file's metadata says.

    Returns:
        A lens of kind `jacobian`; float16 matrices stay float16.

    Raises:
        ArtifactError: missing, damaged, of another format, or a pickle of code; or the fit had not
            ended, or had another target than the last layer.
        SpecError: the model has fewer layers than the file.

    Example:
        ```python
        import torch

        from inspect_lens.lens import import_lens

        content = {
            "J": {0: torch.eye(8).half(), 1: torch.eye(8).half()},
            "n_prompts": 100,
            "source_layers": [0, 1],
            "d_model": 8,
        }
        torch.save(content, "lens.pt")
        lens = import_lens("lens.pt", name="mine/jacobian")
        assert lens.layers == (0, 1) and lens.card.n_layers == 3
        ```
    """
    file = _find(str(path))
    try:
        content = read_regular(file, most=_BYTES)
    except (OSError, ValueError) as error:
        raise ArtifactError(f"{file}: cannot be read ({error}); check the path") from None
    loaded = load_torch(content, str(file))
    del content
    if isinstance(loaded, Mapping) and "jacobian_sum" in loaded:
        raise ArtifactError(
            f"{file}: a checkpoint of a fit that had not ended; allowed is the lens that the fit "
            "saved (it has J)"
        )
    try:
        matrices = {int(layer): value.detach() for layer, value in loaded["J"].items()}
        layers = tuple(sorted(matrices))
        half = all(str(value.dtype) == "torch.float16" for value in matrices.values())
        matrix = np.stack(
            [(m if half else m.float()).numpy() for m in (matrices[n] for n in layers)]
        )
        hidden = int(loaded["d_model"])
        if matrix.shape != (len(layers), hidden, hidden):
            raise ValueError(f"matrices of shape {matrix.shape[1:]} for d_model {hidden}")
        stated = dict(loaded.get("metadata") or {})
        n_prompts = int(loaded["n_prompts"]) if "n_prompts" in loaded else None
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ArtifactError(
            f"{file}: not a Jacobian lens ({type(error).__name__}: {error}); allowed are files of "
            "jlens and TransformerLens, with J and d_model"
        ) from None
    count = layers[-1] + 2 if n_layers is None else n_layers
    if count <= layers[-1]:
        raise SpecError(f"n_layers={count}; {file} translates layers up to {layers[-1]}")
    target = stated.get("target_layer", -1)
    if target not in (-1, count - 1):
        raise ArtifactError(
            f"{file}: leads to layer {target!r}, and not to the last one, {count - 1}, whose rows "
            "the final norm reads; pass n_layers= if that is wrong"
        )
    known = stated.get("model_name")
    if model is None and isinstance(known, str) and known:
        model = ModelRef(name=known, revision=_text(stated.get("model_revision")))
    notes: list[str] = []
    if n_prompts is not None:
        notes.append(f"Stated in the file: fitted on {n_prompts} prompts.")
    notes += [f"Stated in the file: {key} {value}." for key, value in sorted(stated.items())
              if isinstance(value, str | int | float)]  # fmt: skip
    if n_layers is None:
        notes.append(f"Assumed: the model has {count} layers, as the file translates all others.")
    notes.append("Its quality was not measured here; `inspect-lens lens evaluate` does.")
    try:
        card = LensCard(
            name=name, kind="jacobian", n_layers=count, layers=layers, hidden=hidden,
            source=_SOURCE, model=model, notes=tuple(notes),
        )  # fmt: skip
        return Lens(matrix=matrix, card=card)
    except (SpecError, ValueError) as error:
        raise ArtifactError(f"{file}: {error}") from None


def _find(path: str) -> Path:
    if not path.startswith("hf://"):
        return Path(path).expanduser()
    address, at, revision = path.partition("@")
    found = PurePosixPath(address.removeprefix("hf://"))
    if len(found.parts) < 3:
        raise ArtifactError(
            f"lens={path!r}; allowed is hf://owner/repository/folder/file.pt, then @revision"
        )
    return download("lens", f"hf://{found.parent}{at}{revision}", (found.name,)) / found.name


def _text(value: object) -> str | None:
    return value if isinstance(value, str) and value else None
