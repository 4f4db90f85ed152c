"""Vectors as the files of other tools."""

from __future__ import annotations

import importlib
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save as save_safetensors

from inspect_lens.errors import LensError, SpecError
from inspect_lens.probe import write_atomic

from ._foreign import VectorFormat, encode_gguf
from ._vector import Vector


def export_vector(
    vector: Vector,
    path: str | Path,
    *,
    format: VectorFormat,
    layers: Sequence[int] | None = None,
    model_hint: str = "",
    n_layers: int | None = None,
    avg_proj: float | None = None,
) -> Path:
    """Write a steering vector in the file format of another tool, at scale 1.

    Args:
        vector: what to write.
        path: of the file; its folder is made when missing.
        format: `repeng` (GGUF, read by llama.cpp too, which knows no vector behind block 0),
            `steering-vectors`, `persona`, `ibm` or `safetensors`.
        layers: to write; all by default. `ibm` holds one.
        model_hint: of `repeng`: the model's type as transformers names it, such as `llama`.
        n_layers: of `persona`: blocks of the model. Rows of layers that are not written are 0.
        avg_proj: of `ibm`: what its operator sets the projection on the direction to.

    Returns:
        The path.

    Raises:
        SpecError: something that the format needs is missing, or it cannot hold the layers.
        LensError: torch is not installed, and the format needs it.

    Example:
        ```python
        import numpy as np

        from inspect_lens.vector import Vector, VectorCard, export_vector, import_vector

        card = VectorCard(name="mine/first-axis", layers=(3, 4), hidden=8)
        vector = Vector.from_raw(np.eye(8)[:2], card=card)
        file = export_vector(vector, "v.gguf", format="repeng", model_hint="llama")
        assert import_vector(file, name="mine/again").layers == (3, 4)
        ```
    """
    chosen = tuple(vector.layers if layers is None else sorted(layers))
    raw = {n: vector.raw(n) for n in chosen}
    if vector.site != "resid_post":
        raise SpecError(
            f"site {vector.site!r}: vector {vector.name!r} is added there, and files of other "
            "tools say nothing of a place in the block; allowed is resid_post; find a vector there"
        )
    if format == "repeng":
        content = _repeng(vector, raw, model_hint)
    elif format == "safetensors":
        content = save_safetensors(
            {f"layer.{n}": np.ascontiguousarray(v) for n, v in raw.items()},
            metadata={"name": vector.name},
        )
    elif format == "steering-vectors":
        content = _torch_file({"layer_activations": raw, "layer_type": "decoder_block"})
    elif format == "persona":
        content = _torch_file(_persona(raw, n_layers))
    elif format == "ibm":
        if len(chosen) != 1 or avg_proj is None:
            raise SpecError(
                f"layers={list(chosen)}, avg_proj={avg_proj}: an ibm file holds one direction and "
                "what its projection is set to; pass layers=[n] and avg_proj="
            )
        unit = vector.direction[vector.layers.index(chosen[0])]
        content = _torch_file({"dir": unit, "avg_proj": np.float32(avg_proj)})
    else:
        raise SpecError(
            f"format={format!r}; allowed are repeng, steering-vectors, persona, ibm, safetensors"
        )
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(target, content)
    return target


def _repeng(vector: Vector, raw: dict[int, Any], model_hint: str) -> bytes:
    if not model_hint:
        raise SpecError(
            "model_hint: is missing; allowed is the model's type, such as 'llama', which readers "
            "of the file compare with their model"
        )
    if 0 in raw:
        raise SpecError(
            f"layers={list(raw)}: llama.cpp refuses a file with a direction behind block 0; pass "
            "layers= without it"
        )
    facts: dict[str, str | int] = {
        "general.architecture": "controlvector",
        "controlvector.model_hint": model_hint,
        "controlvector.layer_count": len(raw),
    }
    return encode_gguf(facts, {f"direction.{n}": v for n, v in raw.items()})


def _persona(raw: dict[int, Any], n_layers: int | None) -> Any:
    if n_layers is None or n_layers <= max(raw):
        raise SpecError(
            f"n_layers={n_layers}: layers {list(raw)}; needed is how many blocks the model has, "
            "as the file has a row for each, and one for the embedding before them"
        )
    rows = np.zeros((n_layers + 1, len(next(iter(raw.values())))), dtype=np.float32)
    for n, vector in raw.items():
        rows[n + 1] = vector
    return rows


def _torch_file(value: Any) -> bytes:
    """A `.pt` file of tensors; arrays inside dictionaries become tensors."""
    try:
        torch: Any = importlib.import_module("torch")
    except ImportError:
        raise LensError("a .pt file needs torch; install inspect-lens[train]") from None

    def convert(inner: Any) -> Any:
        if isinstance(inner, dict):
            return {key: convert(part) for key, part in inner.items()}
        if isinstance(inner, np.ndarray | np.floating):
            return torch.from_numpy(np.array(inner, dtype=np.float32))
        return inner

    buffer = io.BytesIO()
    torch.save(convert(value), buffer)
    return buffer.getvalue()
