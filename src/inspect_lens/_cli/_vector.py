"""`inspect-lens vector …`: the commands and their options."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from ._output import emit, parse_layers

__all__ = ["vector_app"]

vector_app = typer.Typer(
    help="Find steering vectors in stores of activations, and exchange them with other tools.",
    no_args_is_help=True,
)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Layers = Annotated[str, typer.Option(help="'all', or numbers such as 8,10-14.")]
Rows = Annotated[
    str, typer.Option(help="Rows of a sample: tokens, mean, last, or an index such as -2.")
]
Seed = Annotated[int, typer.Option(help="Seed of pairs, splits and random directions.")]


@vector_app.command()
def extract(
    store: Annotated[
        str, typer.Option(help="Store to find the direction in (from probe collect).")
    ],
    out: Annotated[str, typer.Option(help="Folder to write the vector to.")],
    selection: Annotated[str, typer.Option(help="Store to choose the layer on.")] = "",
    name: Annotated[str, typer.Option(help="Name on the card: <model>/<name>.")] = "",
    method: Annotated[
        str, typer.Option(help="How to find it: mean_difference, caa, logistic or pca.")
    ] = "mean_difference",
    rows: Rows = "",
    layers: Layers = "all",
    layer: Annotated[int, typer.Option(help="Layer to steer at; -1 chooses the best one.")] = -1,
    description: Annotated[
        str, typer.Option(help="What a positive scale does, for the card.")
    ] = "",
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Find a steering vector: a direction in every layer, with its card.

    Without --selection, a part of the store with whole groups is split off to choose the layer.
    """
    from ._vector_jobs import extract_job

    result, lines = extract_job(
        store, out=out, selection=selection, name=name, method=method, rows=rows,
        layers=parse_layers(layers), layer=None if layer < 0 else layer, description=description,
        seed=seed,
    )  # fmt: skip
    emit(result, lines, as_json=as_json)


@vector_app.command()
def evaluate(
    vector: Annotated[str, typer.Argument(help="Vector: name, folder or hf:// address.")],
    store: Annotated[list[str], typer.Argument(help="Stores with both classes.")],
    rows: Rows = "mean",
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Measure how well a vector separates the classes of stores, against random directions.

    A direction that separates need not steer; `steering_sweep` measures what it does.
    """
    from ._vector_jobs import evaluate_job

    result, lines = evaluate_job(vector, store, rows=rows, seed=seed)
    emit(result, lines, as_json=as_json)


@vector_app.command()
def sweep(
    train_store: Annotated[str, typer.Option("--train", help="Store to find directions in.")],
    selection: Annotated[str, typer.Option(help="Store to compare on; not your test set.")] = "",
    method: Annotated[
        list[str] | None,
        typer.Option(help="Method to compare, as for extract. Repeatable; all by default."),
    ] = None,
    rows: Rows = "",
    layers: Layers = "all",
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Compare methods and layers on a selection set."""
    from ._vector_jobs import sweep_job

    result, lines = sweep_job(
        train_store, selection, method or [], rows=rows, layers=parse_layers(layers), seed=seed
    )
    emit(result, lines, as_json=as_json)


@vector_app.command(name="import")
def import_(
    file: Annotated[str, typer.Argument(help="File to read: .gguf, .pt, .svec or .safetensors.")],
    out: Annotated[str, typer.Option(help="Folder to write the vector to.")],
    name: Annotated[str, typer.Option(help="Name on the card: <model>/<name>.")],
    format: Annotated[
        str, typer.Option(help="Tool that wrote the file; detected by default.")
    ] = "",
    layer: Annotated[int, typer.Option(help="Layer (from 0), if the file names none.")] = -1,
    concept: Annotated[int, typer.Option(help="axbench only: the row to take.")] = -1,
    description: Annotated[
        str, typer.Option(help="What a positive scale does, for the card.")
    ] = "",
    as_json: Json = False,
) -> None:
    """Read a vector of another tool: repeng, steering-vectors, persona, CAST, IBM, AxBench."""
    from ._vector_jobs import import_job

    how: dict[str, Any] = {"format": format or None, "layer": None if layer < 0 else layer}
    how["concept"] = None if concept < 0 else concept
    result, lines = import_job(file, out=out, name=name, description=description, **how)
    emit(result, lines, as_json=as_json)


@vector_app.command()
def export(
    vector: Annotated[str, typer.Argument(help="Vector: name, folder or hf:// address.")],
    file: Annotated[str, typer.Argument(help="File to write.")],
    format: Annotated[
        str, typer.Option(help="repeng, steering-vectors, persona, ibm or safetensors.")
    ],
    layers: Layers = "all",
    model_hint: Annotated[str, typer.Option(help="repeng only: model type, such as llama.")] = "",
    n_layers: Annotated[int, typer.Option(help="persona only: number of layers of the model.")] = 0,
    avg_proj: Annotated[
        float | None, typer.Option(help="ibm only: value that the projection is set to.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Write a vector as a file of another tool."""
    from ._vector_jobs import export_job

    result, lines = export_job(
        vector, file, format=format, layers=parse_layers(layers), model_hint=model_hint,
        n_layers=n_layers or None, avg_proj=avg_proj,
    )  # fmt: skip
    emit(result, lines, as_json=as_json)
