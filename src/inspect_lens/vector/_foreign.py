"""Vectors in the files of other tools, read and written."""

from __future__ import annotations

import importlib
import io
import math
import re
import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load as load_safetensors
from safetensors.numpy import save as save_safetensors

from inspect_lens._base.arguments import judged_arguments
from inspect_lens._base.installed import install_extra
from inspect_lens._base.untrusted import judge_total, load_torch, parse_json, parsing, read_regular
from inspect_lens.errors import ArtifactError, LensError, SpecError
from inspect_lens.probe import ModelRef, write_atomic

from ._vector import Vector, VectorCard

__all__ = ["VectorFormat", "export_vector", "import_vector"]

_MAGIC: Final = b"GGUF"
_VERSION: Final = 3
_ALIGNMENT: Final = 32
_U32, _TEXT, _ARRAY = 4, 8, 9
_NUMBERS: Final = {
    0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q",
    12: "<d",
}  # fmt: skip
_FLOATS: Final = {0: "<f4", 1: "<f2", 30: "<u2"}
_BFLOAT16: Final = 30
_DEPTH: Final = 4


class GGUFFile(NamedTuple):
    """Content of a file."""

    facts: dict[str, Any]
    """Text and numbers by key."""
    tensors: dict[str, NDArray[np.float32]]
    """By name; axes as numpy orders them, slowest first."""


def encode_gguf(
    facts: Mapping[str, str | int], tensors: Mapping[str, NDArray[np.float32]]
) -> bytes:
    head = [_MAGIC, struct.pack("<IQQ", _VERSION, len(tensors), len(facts))]
    for key, value in facts.items():
        head.append(_text(key))
        if isinstance(value, str):
            head += [struct.pack("<I", _TEXT), _text(value)]
        else:
            head.append(struct.pack("<II", _U32, value))
    offset, data = 0, []
    for name, tensor in tensors.items():
        array = np.ascontiguousarray(tensor, dtype="<f4")
        head += [_text(name), struct.pack("<I", array.ndim)]
        head += [struct.pack("<Q", n) for n in reversed(array.shape)]
        head.append(struct.pack("<IQ", 0, offset))
        part = array.tobytes()
        part += b"\0" * (-len(part) % _ALIGNMENT)
        data.append(part)
        offset += len(part)
    whole = b"".join(head)
    return whole + b"\0" * (-len(whole) % _ALIGNMENT) + b"".join(data)


def decode_gguf(content: bytes) -> GGUFFile:
    reader = _Reader(content)
    if reader.take(4) != _MAGIC:
        raise ValueError("it does not begin with GGUF")
    version = reader.number("<I")
    if version not in (2, 3):
        raise ValueError(f"version {version}; allowed are 2 and 3")
    n_tensors, n_facts = reader.number("<Q"), reader.number("<Q")
    facts: dict[str, Any] = {}
    for _ in range(n_facts):
        key = reader.text()
        facts[key] = reader.value(reader.number("<I"))
    entries = []
    for _ in range(n_tensors):
        name, n_axes = reader.text(), reader.number("<I")
        if n_axes > _DEPTH:
            raise ValueError(f"tensor {name!r} has {n_axes} axes; allowed are {_DEPTH} at most")
        shape = tuple(reversed([reader.number("<Q") for _ in range(n_axes)]))
        entries.append((name, shape, reader.number("<I"), reader.number("<Q")))
    alignment = int(facts.get("general.alignment", _ALIGNMENT))
    if alignment < 1:
        raise ValueError(f"general.alignment {alignment}")
    start = -(-reader.at // alignment) * alignment
    tensors, sizes = {}, []
    for name, shape, kind, _ in entries:
        if kind not in _FLOATS:
            raise ValueError(f"tensor {name!r} has type {kind}; allowed are F32, F16 and BF16")
        sizes.append(math.prod(shape) * np.dtype(_FLOATS[kind]).itemsize)
    judge_total(sizes, len(content) - start)
    for (name, shape, kind, offset), size in zip(entries, sizes, strict=True):
        part = content[start + offset : start + offset + size]
        if len(part) != size:
            raise ValueError(f"it ends within tensor {name!r}")
        array = np.frombuffer(part, _FLOATS[kind])
        if kind == _BFLOAT16:
            array = (array.astype("<u4") << 16).view("<f4")
        tensors[name] = array.reshape(shape).astype(np.float32)
    return GGUFFile(facts, tensors)


def _text(value: str) -> bytes:
    raw = value.encode()
    return struct.pack("<Q", len(raw)) + raw


class _Reader:
    """Reads values one after the other; a truncated file is an error."""

    def __init__(self, content: bytes) -> None:
        self.content, self.at = content, 0

    def take(self, n: int) -> bytes:
        part = self.content[self.at : self.at + n]
        if len(part) != n:
            raise ValueError("it ends within its header")
        self.at += n
        return part

    def number(self, kind: str) -> int:
        return int(struct.unpack(kind, self.take(struct.calcsize(kind)))[0])

    def text(self) -> str:
        return self.take(self.number("<Q")).decode("utf-8")

    def value(self, kind: int, depth: int = 0) -> Any:
        if kind in _NUMBERS:
            size = struct.calcsize(_NUMBERS[kind])
            return struct.unpack(_NUMBERS[kind], self.take(size))[0]
        if kind == _TEXT:
            return self.text()
        if kind == _ARRAY and depth < _DEPTH:
            inner, n = self.number("<I"), self.number("<Q")
            if n > len(self.content):
                raise ValueError("it ends within its header")
            return [self.value(inner, depth + 1) for _ in range(n)]
        raise ValueError(f"a value of type {kind}")


VectorFormat = Literal[
    "repeng", "steering-vectors", "persona", "refusal", "cast", "ibm", "axbench", "safetensors"
]
"""Tool whose file format is meant."""

_PERSONA: Final = re.compile(r"_(response_avg|prompt_avg|prompt_last)_diff\.pt$")
_AXBENCH: Final = re.compile(r"_weight\.pt$")
_NUMBERED: Final = re.compile(r"(?:layers?|direction)?[._]?(\d+)")
_SOURCES: Final[dict[str, str]] = {
    "repeng": "repeng, GGUF control vector", "steering-vectors": "steering-vectors",
    "persona": "arXiv:2507.21509", "refusal": "arXiv:2406.11717", "cast": "arXiv:2409.05907",
    "ibm": "IBM vLLM-Hook", "axbench": "arXiv:2501.17148", "safetensors": "safetensors",
}  # fmt: skip
Floats = NDArray[np.float64]


class _Read(NamedTuple):
    """Directions by our layer, and what else the file says."""

    directions: dict[int, Floats]
    notes: tuple[str, ...] = ()
    positions: str = ""
    layer: int | None = None


@judged_arguments
def import_vector(
    path: str | Path,
    *,
    name: str,
    format: VectorFormat | None = None,
    layer: int | None = None,
    concept: int | None = None,
    model: ModelRef | None = None,
    description: str = "",
) -> Vector:
    """Read a steering vector that another tool saved.

    A `.pt` file is a pickle; only tensors and plain values are read from it.

    Args:
        path: of the file.
        name: `<model>/<name>`, for the card and the folder.
        format: whose file it is; by default told by its ending and content. See the table of this
            module for the layer that each format's index means.
        layer: our layer to steer at; needed where the file names none (`ibm`, `axbench`, and a
            bare `direction.pt`).
        concept: of `axbench`: the row to take, which is the concept's id; needed where the file
            has several.
        model: the model that it belongs to.
        description: what a positive scale does.

    Returns:
        The vector; at scale 1 it adds what is in the file. Rows of zeros are left out.

    Raises:
        ArtifactError: missing, damaged, of another format, or a pickle of code.
        SpecError: the layer or the concept is missing, or the file has no direction there.

    Example:
        ```python
        import numpy as np
        from safetensors.numpy import save_file

        from inspect_lens.vector import import_vector

        save_file({"layer.4": np.ones(8, dtype=np.float32)}, "kind.safetensors")
        vector = import_vector("kind.safetensors", name="mine/kind")
        assert vector.layers == (4,)
        ```
    """
    file = Path(path)
    what = f"a vector{f' of {format}' if format else ''}"
    allowed = f"allowed are files of {', '.join(get_args(VectorFormat))}; name its format"
    with parsing(file, what, allowed, but=(ArtifactError, SpecError)):
        kind, value = _open(file, read_regular(file), format)
        if kind == "axbench":
            value = _concept(value, file, concept)
        elif concept is not None:
            raise SpecError(f"concept={concept}: {file} is of {kind}, which has none; leave it out")
        read = _READERS[kind](value, file, layer)
    kept = {n: v for n, v in sorted(read.directions.items()) if np.any(v)}
    sizes = {v.shape for v in kept.values()}
    if len(sizes) != 1 or any(v.ndim != 1 for v in kept.values()):
        raise ArtifactError(
            f"{file}: directions of shapes {sorted(map(str, sizes))}; allowed is one vector "
            "(hidden,) for each layer, one of them not zero"
        )
    chosen = read.layer if layer is None else layer
    if chosen is not None and chosen not in kept:
        raise SpecError(f"layer={chosen}: {file} has directions at {list(kept)}; choose one")
    card = VectorCard(
        name=name,
        description=description,
        method=f"imported from {file.name} ({kind})",
        source=_SOURCES[kind],
        layers=tuple(kept),
        layer=chosen,
        hidden=next(iter(sizes))[0],
        positions=read.positions,
        model=model,
        notes=read.notes,
    )
    return Vector.from_raw(np.stack(list(kept.values())), card=card)


def _open(file: Path, content: bytes, format: VectorFormat | None) -> tuple[str, Any]:
    """The format, and the file's content as Python values."""
    suffix = file.suffix.lower()
    value: Any
    if suffix == ".gguf":
        found, value = "repeng", decode_gguf(content)
    elif suffix in (".svec", ".json"):
        found, value = "cast", parse_json(content)
    elif suffix == ".safetensors":
        found, value = "safetensors", load_safetensors(content)
    else:
        value = load_torch(content, str(file))
        found = format or _tell(file, value)
    if format not in (None, found):
        raise ArtifactError(f"{file}: is a file of {found}, not of {format}; leave format= out")
    return found, value


def _tell(file: Path, value: Any) -> str:
    if isinstance(value, Mapping):
        return "ibm" if "dir" in value else "steering-vectors"
    if getattr(value, "ndim", 0) == 1:
        return "refusal"
    if getattr(value, "ndim", 0) == 2 and _PERSONA.search(file.name):
        return "persona"
    if getattr(value, "ndim", 0) == 2 and _AXBENCH.search(file.name):
        return "axbench"
    raise ArtifactError(
        f"{file}: a tensor of shape {tuple(getattr(value, 'shape', ()))}, whose rows may be "
        "counted in several ways; pass format='persona' if its first row is that of the "
        "embedding, or save one tensor per layer"
    )


def _array(value: Any) -> Floats:
    wide = value.detach().double().numpy() if hasattr(value, "detach") else value
    return np.asarray(wide, dtype=np.float64)


def _row(value: Any) -> Floats:
    """A direction (hidden,), which may be a matrix of one row; several are not one long row."""
    found = _array(value)
    if found.ndim and found.size != found.shape[-1]:
        raise ValueError(f"a direction of shape {found.shape}; wanted is (hidden,)")
    return found.reshape(-1)


def _by_number(values: Mapping[Any, Any]) -> dict[int, Floats]:
    found: dict[int, Floats] = {}
    for key, value in values.items():
        number = _NUMBERED.fullmatch(str(key))
        if number is None:
            raise ValueError(f"key {key!r} names no layer; wanted is a number, or layer.N")
        if found.setdefault(int(number[1]), row := _row(value)) is not row:
            raise ValueError(f"key {key!r} names a layer that another key names")
    return found


def _repeng(value: Any, file: Path, layer: int | None) -> _Read:
    kind = value.facts.get("general.architecture", "controlvector")
    if kind != "controlvector":
        raise ValueError(f"architecture {kind!r}; wanted is 'controlvector'")
    directions = {k: v for k, v in value.tensors.items() if k.startswith("direction.")}
    hint = str(value.facts.get("controlvector.model_hint", ""))
    notes = (f"model hint of the file: {hint}",) if hint else ()
    return _Read(_by_number(directions), notes=notes)


def _steering_vectors(value: Any, file: Path, layer: int | None) -> _Read:
    kind = value.get("layer_type", "decoder_block")
    if kind != "decoder_block":
        raise ValueError(f"layer_type {kind!r}; wanted is 'decoder_block', the residual stream")
    return _Read(_by_number(value.get("layer_activations", value)))


def _persona(value: Any, file: Path, layer: int | None) -> _Read:
    rows = _array(value)
    if rows.ndim != 2 or len(rows) < 2:
        raise ValueError(f"shape {rows.shape}; wanted is (blocks + 1, hidden)")
    kind = _PERSONA.search(file.name)
    words = {"response_avg": "mean of the response", "prompt_avg": "mean of the prompt",
             "prompt_last": "last token of the prompt"}  # fmt: skip
    return _Read(
        {k - 1: row for k, row in enumerate(rows) if k},
        notes=("row 0 of the file, that of the embedding, is left out",),
        positions=words[kind.group(1)] if kind else "",
    )


def _refusal(value: Any, file: Path, layer: int | None) -> _Read:
    beside = file.with_name("direction_metadata.json")
    if layer is None and beside.exists():
        facts = parse_json(read_regular(beside))
        layer, where = int(facts["layer"]) - 1, f"prompt token {facts['pos']}"
        if layer < 0:
            raise ValueError("its layer 0 is the embedding, which no layer of ours puts out")
        note = f"layer {layer + 1} of the file is the input of that block: the output of {layer}"
        return _Read({layer: _row(value)}, notes=(note,), positions=where, layer=layer)
    return _bare(value, file, layer)


def _ibm(value: Any, file: Path, layer: int | None) -> _Read:
    read = _bare(value["dir"], file, layer)
    notes: tuple[str, ...] = ()
    if "avg_proj" in value:
        mean = float(_array(value["avg_proj"]).reshape(-1)[0])
        notes = (
            f"avg_proj {mean:.6g}: what the source sets the projection on the unit direction to",
        )
    return read._replace(notes=notes)


def _concept(value: Any, file: Path, concept: int | None) -> Floats:
    """The row of one concept."""
    rows = _array(value)
    if rows.ndim != 2 or not len(rows):
        raise ValueError(f"shape {rows.shape}; wanted is (concepts, hidden)")
    if concept is None and len(rows) > 1:
        raise SpecError(
            f"concept: {file} has {len(rows)}; pass concept=, the id of one in its metadata"
        )
    chosen = concept or 0
    if not 0 <= chosen < len(rows):
        raise SpecError(f"concept={concept}: {file} has 0 to {len(rows) - 1}")
    row: Floats = rows[chosen]
    return row


def _axbench(value: Any, file: Path, layer: int | None) -> _Read:
    note = (
        "the source adds it times its factor and the concept's largest activation, and reads it "
        "with the bias of a file of its own"
    )
    return _bare(value, file, layer)._replace(notes=(note,))


def _bare(value: Any, file: Path, layer: int | None) -> _Read:
    if layer is None:
        raise SpecError(f"layer: {file} names none; pass layer=, the block whose output is steered")
    return _Read({layer: _row(value)}, layer=layer)


def _cast(value: Any, file: Path, layer: int | None) -> _Read:
    notes = (
        f"model type of the file: {value.get('model_type', '')}",
        "the source reads the output of a block and steers its input, the output of the one before",
    )
    return _Read(_by_number(value["directions"]), notes=notes)


def _plain(value: Any, file: Path, layer: int | None) -> _Read:
    if set(value) == {"direction", "norm"}:
        raise ValueError("it is a vector of inspect_lens; load its folder with load_vector")
    return _Read(_by_number(value))


_READERS: Final[dict[str, Callable[[Any, Path, int | None], _Read]]] = {
    "repeng": _repeng, "steering-vectors": _steering_vectors, "persona": _persona,
    "refusal": _refusal, "cast": _cast, "ibm": _ibm, "axbench": _axbench, "safetensors": _plain,
}  # fmt: skip


@judged_arguments
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

    Raises:
        SpecError: something that the format needs is missing or that it has not is given, or it
            cannot hold the layers.
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
    for name, value, of in (
        ("model_hint", model_hint or None, "repeng"), ("n_layers", n_layers, "persona"),
        ("avg_proj", avg_proj, "ibm"),
    ):  # fmt: skip
        if value is not None and format != of:
            raise SpecError(f"{name}={value!r}: is of {of} only, not of {format}; leave it out")
    chosen = tuple(vector.layers if layers is None else sorted(layers))
    raw = {n: vector.raw(n) for n in chosen}
    if vector.site != "resid_post":
        raise SpecError(
            f"site {vector.site!r}: vector {vector.name!r} is added there, and files of other "
            "tools say nothing of a place in the block; allowed is resid_post; find a vector there"
        )
    if format == "repeng":
        content = _to_repeng(vector, raw, model_hint)
    elif format == "safetensors":
        content = save_safetensors(
            {f"layer.{n}": np.ascontiguousarray(v) for n, v in raw.items()},
            metadata={"name": vector.name},
        )
    elif format == "steering-vectors":
        content = _torch_file({"layer_activations": raw, "layer_type": "decoder_block"})
    elif format == "persona":
        content = _torch_file(_to_persona(raw, n_layers))
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


def _to_repeng(vector: Vector, raw: dict[int, Any], model_hint: str) -> bytes:
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


def _to_persona(raw: dict[int, Any], n_layers: int | None) -> Any:
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
        raise LensError(f"a .pt file needs the package torch: {install_extra('train')}") from None

    def convert(inner: Any) -> Any:
        if isinstance(inner, dict):
            return {key: convert(part) for key, part in inner.items()}
        if isinstance(inner, np.ndarray | np.floating):
            return torch.from_numpy(np.array(inner, dtype=np.float32))
        return inner

    buffer = io.BytesIO()
    torch.save(convert(value), buffer)
    return buffer.getvalue()
