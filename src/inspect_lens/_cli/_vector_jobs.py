"""What the commands of `inspect-lens vector` do."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast, get_args

from inspect_lens.errors import SpecError
from inspect_lens.probe import ModelRef
from inspect_lens.train import (
    ActivationSet,
    VectorMethod,
    evaluate_vector,
    extract_vector,
    split_by_group,
)
from inspect_lens.vector import Vector, export_vector, import_vector, load_vector

from ._made import CHOSEN_HERE
from ._stores import manifest_of, read_set

__all__ = ["evaluate_job", "export_job", "extract_job", "import_job", "sweep_job"]

Answer = tuple[dict[str, Any], list[str]]


def extract_job(
    store: str,
    *,
    out: str,
    selection: str,
    name: str,
    method: str,
    rows: str,
    layers: Any,
    layer: int | None,
    description: str,
    seed: int,
) -> Answer:
    """Find a vector in a store, and save it."""
    data, chosen = _sets(store, selection, layers=layers, seed=seed)
    facts = manifest_of(store)
    vector = extract_vector(
        data,
        name=name or f"{Path(data.model).name}/{method}",
        method=cast(VectorMethod, method),
        rows=_rows(rows),
        selection=chosen,
        layer=layer,
        seed=seed,
        model=ModelRef(name=facts["model"]["name"], sha256=facts["model"]["sha256"]),
        on_policy=bool(facts["dataset"]["on_policy"]),
        description=description or str(facts["dataset"]["label_meaning"]),
        command=shlex.join(["inspect-lens", *sys.argv[1:]]),
    )
    folder = vector.save(out)
    card = vector.card
    lines = [f"{vector.name}: layers {_list(vector.layers)}, steers at {card.layer}, {folder}"]
    rows_of = zip(card.layers, vector.norm.tolist(), card.separation, strict=True)
    for n, norm, area in rows_of:
        mark = " *" if n == card.layer else ""
        lines.append(f"  layer {n}: length {norm:.4g}, AUROC {area:.4f} on {chosen.name}{mark}")
    lines += [f"  {note}" for note in card.notes]
    return _facts(vector, str(folder)) | {"auroc": list(card.separation)}, lines


def evaluate_job(name: str, stores: Sequence[str], *, rows: str, seed: int) -> Answer:
    """Measure a vector on stores."""
    vector, table, lines = load_vector(name), [], []
    for uri in stores:
        found = evaluate_vector(
            vector, read_set(uri, "store"), rows=_rows(rows) or "mean", seed=seed
        )
        for score in found:
            table.append({"store": uri, **score._asdict()})
            lines.append(
                f"{uri}, layer {score.layer}: AUROC {score.auroc:.4f} (random directions up to "
                f"{score.random_auroc:.4f}), separation {score.separation:.2f}, length "
                f"{score.length:.4g}"
            )
    return {"vector": vector.name, "sha256": vector.sha256, "scores": table}, lines


def sweep_job(
    train: str, selection: str, methods: Sequence[str], *, rows: str, layers: Any, seed: int
) -> Answer:
    """Every method at every layer, on the selection set."""
    data, chosen = _sets(train, selection, layers=layers, seed=seed)
    table: list[dict[str, Any]] = []
    lines = [f"{'method':16s} {'layer':>5s} {'AUROC':>7s} {'length':>9s}"]
    for method in methods or get_args(VectorMethod):
        vector = extract_vector(
            data,
            name="sweep/any",
            method=cast(VectorMethod, method),
            rows=_rows(rows),
            selection=chosen,
            seed=seed,
        )
        card = vector.card
        for n, norm, area in zip(card.layers, vector.norm.tolist(), card.separation, strict=True):
            best = n == card.layer
            table.append({"method": method, "layer": n, "auroc": area, "length": norm,
                          "chosen": best})  # fmt: skip
            lines.append(f"{method:16s} {n:5d} {area:7.4f} {norm:9.4g}{' *' if best else ''}")
    lines.append(CHOSEN_HERE)
    return {"selection": chosen.name, "n": len(chosen), "sweep": table}, lines


def import_job(file: str, *, out: str, name: str, description: str, **how: Any) -> Answer:
    """Read another tool's file, and save it as ours."""
    vector = import_vector(file, name=name, description=description, **how)
    folder = str(vector.save(out))
    notes = [f"  {note}" for note in vector.card.notes]
    line = f"{vector.name}: {vector.card.method}, layers {_list(vector.layers)}, {folder}"
    return _facts(vector, folder), [line, *notes]


def export_job(name: str, file: str, *, layers: Any, **how: Any) -> Answer:
    """Write a vector as another tool's file."""
    vector = load_vector(name)
    picked = None if layers == "all" else layers
    made = export_vector(vector, file, layers=picked, **how)
    written = list(vector.layers if picked is None else picked)
    line = f"{made}: {how['format']}, layers {_list(written)} of {vector.name}"
    return {"file": str(made), "format": how["format"], "layers": written}, [line]


def _sets(
    store: str, selection: str, *, layers: Any, seed: int
) -> tuple[ActivationSet, ActivationSet]:
    picked = None if layers == "all" else layers
    data = read_set(store, "store", layers=picked)
    if selection:
        return data, read_set(selection, "selection", layers=picked)
    return split_by_group(data, seed=seed)


def _rows(value: str) -> Any:
    if value in ("", "tokens", "mean", "last"):
        return value or None
    try:
        return int(value)
    except ValueError:
        raise SpecError(
            f"--rows={value!r}; allowed are tokens, mean, last and an index such as -2"
        ) from None


def _facts(vector: Vector, folder: str) -> dict[str, Any]:
    return {
        "vector": vector.name, "folder": folder, "sha256": vector.sha256,
        "layers": list(vector.layers), "layer": vector.card.layer,
    }  # fmt: skip


def _list(layers: Sequence[int]) -> str:
    return ", ".join(map(str, layers))
