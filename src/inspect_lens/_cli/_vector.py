"""`inspect-lens vector …`: the commands and their options."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from inspect_lens.errors import SpecError
from inspect_lens.vector import VectorFormat

from ._choices import ExportFormat
from ._choices import VectorMethod as Method
from ._output import (
    CHOSEN_HERE,
    AllowSeen,
    AnyModel,
    CommandGroup,
    Json,
    Layers,
    emit,
    examples,
    number,
    out_folder,
    parse_layers,
    seen,
    typed_command,
    writable,
)

if TYPE_CHECKING:
    from inspect_lens.train import ActivationSet
    from inspect_lens.vector import Vector

vector_app = typer.Typer(
    cls=CommandGroup,
    help="Find steering vectors in stores of activations, and exchange them with other tools.",
    no_args_is_help=True,
)

Rows = Annotated[
    str, typer.Option(help="Rows of a sample: tokens, mean, last, or an index such as -2.")
]
Description = Annotated[str, typer.Option(help="What a positive scale does, for the card.")]
Seed = Annotated[int, typer.Option(min=0, help="Seed of pairs, splits and random directions.")]


@vector_app.command(
    epilog=examples(
        "inspect-lens vector extract --store acts/train --name my-model/honesty \\",
        "    --out my-vectors/honesty",
    )
)
def extract(
    store: Annotated[
        str, typer.Option(help="Store to find the direction in (from probe collect).")
    ],
    out: Annotated[str, out_folder("Folder to write the vector to.")],
    selection: Annotated[str, typer.Option(help="Store to choose the layer on.")] = "",
    name: Annotated[str, typer.Option(help="Name on the card: <model>/<name>.")] = "",
    method: Annotated[Method, typer.Option(help="How to find it.")] = Method.MEAN_DIFFERENCE,
    rows: Rows = "",
    layers: Layers = "all",
    layer: Annotated[
        int, typer.Option(min=-1, help="Layer to steer at; -1 chooses the best one.")
    ] = -1,
    description: Description = "",
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Find a steering vector: a direction in every layer, with its card.

    Without --selection, a part of the store with whole groups is split off to choose the layer.
    """
    from inspect_lens.probe import ModelRef
    from inspect_lens.train import extract_vector

    from ._stores import manifest_of

    data, chosen = _sets(store, selection, layers=layers, seed=seed)
    facts = manifest_of(store)
    made = extract_vector(
        data,
        name=name or f"{Path(data.model).name}/{method}",
        method=method.value,
        rows=_rows(rows),
        selection=chosen,
        layer=None if layer < 0 else layer,
        seed=seed,
        model=ModelRef(name=facts["model"]["name"], sha256=facts["model"]["sha256"]),
        on_policy=bool(facts["dataset"]["on_policy"]),
        description=description or str(facts["dataset"]["label_meaning"]),
        command=typed_command(),
    )
    folder, card = made.save(out), made.card
    is_chosen = layer < 0 and len(card.layers) > 1
    lines = [f"{made.name}: layers {_list(made.layers)}, steers at {card.layer}, {folder}"]
    for n, norm, area in zip(card.layers, made.norm.tolist(), card.separation, strict=True):
        mark = " *" if is_chosen and n == card.layer else ""
        lines.append(f"  layer {n}: length {norm:.4g}, AUROC {area:.4f} on {chosen.name}{mark}")
    lines += [f"  {CHOSEN_HERE}"] if is_chosen else []
    lines += [f"  {note}" for note in card.notes]
    result = _facts(made, str(folder)) | {"auroc": list(card.separation)}
    emit(result, lines, as_json=as_json)


@vector_app.command(epilog=examples("inspect-lens vector evaluate my-vectors/honesty acts/test"))
def evaluate(
    vector: Annotated[str, typer.Argument(help="Vector: name, folder or hf:// address.")],
    store: Annotated[list[str], typer.Argument(help="Stores with both classes.")],
    rows: Rows = "mean",
    seed: Seed = 0,
    any_model: AnyModel = False,
    allow_seen: AllowSeen = False,
    as_json: Json = False,
) -> None:
    """Measure how well a vector separates the classes of stores, against random directions.

    A direction that separates need not steer; `steering_sweep` measures what it does.
    """
    from inspect_lens.train import evaluate_vector
    from inspect_lens.vector import load_vector

    from ._stores import read_set, refuse_other_model

    loaded, table, lines = load_vector(vector), [], []
    for uri in store:
        refuse_other_model(loaded, uri, any_model=any_model)
    for uri in store:
        found = evaluate_vector(
            loaded, read_set(uri, "store"), rows=_rows(rows) or "mean",
            allow_seen=allow_seen, seed=seed,
        )  # fmt: skip
        if found[0].n_seen != 0:
            lines.append(f"{uri}: {seen(loaded, found[0].n_seen)}")
        for score in found:
            table.append({"store": uri, **score._asdict()})
            lines.append(
                f"{uri}, layer {score.layer}: AUROC {score.auroc:.4f} (random directions up to "
                f"{score.random_auroc:.4f}), separation {score.separation:.2f}, length "
                f"{score.length:.4g}"
            )
    result = {"vector": loaded.name, "sha256": loaded.sha256, "scores": table}
    emit(result, lines, as_json=as_json)


@vector_app.command(
    epilog=examples(
        "inspect-lens vector sweep --train acts/train --method caa --method pca --layers 8-14"
    )
)
def sweep(
    train_store: Annotated[str, typer.Option("--train", help="Store to find directions in.")],
    selection: Annotated[str, typer.Option(help="Store to compare on; not your test set.")] = "",
    method: Annotated[
        list[Method] | None, typer.Option(help="Method to compare. Repeatable; all by default.")
    ] = None,
    rows: Rows = "",
    layers: Layers = "all",
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Compare methods and layers on a selection set."""
    from inspect_lens.train import extract_vector

    data, chosen = _sets(train_store, selection, layers=layers, seed=seed)
    table: list[dict[str, Any]] = []
    lines = [f"{'method':16s} {'layer':>5s} {'AUROC':>7s} {'length':>9s}"]
    for one in method or Method:
        made = extract_vector(
            data, name="sweep/any", method=one.value, rows=_rows(rows),
            selection=chosen, seed=seed,
        )  # fmt: skip
        card = made.card
        for n, norm, area in zip(card.layers, made.norm.tolist(), card.separation, strict=True):
            best = n == card.layer
            table.append({"method": one, "layer": n, "auroc": area, "length": norm, "chosen": best})
            lines.append(f"{one:16s} {n:5d} {area:7.4f} {norm:9.4g}{' *' if best else ''}")
    lines.append(CHOSEN_HERE)
    result = {"selection": chosen.name, "n": len(chosen), "sweep": table}
    emit(result, lines, as_json=as_json)


@vector_app.command(
    name="import",
    epilog=examples(
        "inspect-lens vector import honesty.gguf --name my-model/honesty --out my-vectors/honesty"
    ),
)
def import_(
    file: Annotated[str, typer.Argument(help="File to read: .gguf, .pt, .svec or .safetensors.")],
    out: Annotated[str, out_folder("Folder to write the vector to.")],
    name: Annotated[str, typer.Option(help="Name on the card: <model>/<name>.")],
    format: Annotated[
        VectorFormat | None, typer.Option(help="Tool that wrote the file; detected by default.")
    ] = None,
    layer: Annotated[
        int, typer.Option(min=-1, help="Layer (from 0), if the file names none.")
    ] = -1,
    concept: Annotated[int, typer.Option(min=-1, help="axbench only: the row to take.")] = -1,
    description: Description = "",
    as_json: Json = False,
) -> None:
    """Read a vector of another tool: repeng, steering-vectors, persona, CAST, IBM, AxBench."""
    from inspect_lens.vector import import_vector

    vector = import_vector(
        file, name=name, description=description, format=format,
        layer=None if layer < 0 else layer, concept=None if concept < 0 else concept,
    )  # fmt: skip
    folder = str(vector.save(out))
    notes = [f"  {note}" for note in vector.card.notes]
    line = f"{vector.name}: {vector.card.method}, layers {_list(vector.layers)}, {folder}"
    emit(_facts(vector, folder), [line, *notes], as_json=as_json)


@vector_app.command(
    epilog=examples(
        "inspect-lens vector export my-vectors/honesty honesty.gguf --format repeng "
        "--model-hint llama"
    )
)
def export(
    vector: Annotated[str, typer.Argument(help="Vector: name, folder or hf:// address.")],
    file: Annotated[str, typer.Argument(help="File to write.", callback=writable)],
    format: Annotated[ExportFormat, typer.Option(help="Tool that will read the file.")],
    layers: Layers = "all",
    model_hint: Annotated[str, typer.Option(help="repeng only: model type, such as llama.")] = "",
    n_layers: Annotated[
        int, typer.Option(min=0, help="persona only: number of layers of the model.")
    ] = 0,
    avg_proj: Annotated[
        float | None, number("ibm only: value that the projection is set to.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Write a vector as a file of another tool."""
    from inspect_lens.vector import export_vector, load_vector

    loaded = load_vector(vector)
    picked = _picked(layers)
    made = export_vector(
        loaded, file, format=format, layers=picked, model_hint=model_hint,
        n_layers=n_layers or None, avg_proj=avg_proj,
    )  # fmt: skip
    written = list(loaded.layers if picked is None else picked)
    line = f"{made}: {format}, layers {_list(written)} of {loaded.name}"
    emit({"file": str(made), "format": format, "layers": written}, [line], as_json=as_json)


def _picked(layers: str) -> list[int] | None:
    found = parse_layers(layers)
    return None if found == "all" else found


def _sets(
    store: str, selection: str, *, layers: str, seed: int
) -> tuple[ActivationSet, ActivationSet]:
    """What is trained on, and what chooses: a store of its own, or groups split off."""
    from inspect_lens.train import split_by_group

    from ._stores import read_set

    picked = _picked(layers)
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
