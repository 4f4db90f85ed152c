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

Json = Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")]
Layers = Annotated[str, typer.Option(help="'all', or numbers such as 8,10-14.")]
Rows = Annotated[str, typer.Option(help="tokens, mean, last, or an index such as -2.")]
Seed = Annotated[int, typer.Option(help="Of pairing, splits and random directions.")]


@vector_app.command()
def extract(
    store: Annotated[str, typer.Option(help="Store to find the direction in.")],
    out: Annotated[str, typer.Option(help="Folder of the vector.")],
    selection: Annotated[str, typer.Option(help="Store to choose the layer on.")] = "",
    name: Annotated[str, typer.Option(help="<model>/<name>, for the card.")] = "",
    method: Annotated[str, typer.Option(help="mean_difference, caa, logistic or pca.")] = (
        "mean_difference"
    ),
    rows: Rows = "",
    layers: Layers = "all",
    layer: Annotated[int, typer.Option(help="Layer to steer at; -1 chooses on --selection.")] = -1,
    description: Annotated[str, typer.Option(help="What a positive scale does.")] = "",
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Find a direction in every layer, and write vector and card.

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
    vector: Annotated[str, typer.Argument(help="Name, folder or hf:// address.")],
    store: Annotated[list[str], typer.Argument(help="Stores with both classes.")],
    rows: Rows = "mean",
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Measure how well a vector separates the classes of stores, beside random directions.

    A direction that separates need not steer; `steering_sweep` measures what it does.
    """
    from ._vector_jobs import evaluate_job

    result, lines = evaluate_job(vector, store, rows=rows, seed=seed)
    emit(result, lines, as_json=as_json)


@vector_app.command()
def sweep(
    train_store: Annotated[str, typer.Option("--train", help="Store to find directions in.")],
    selection: Annotated[str, typer.Option(help="Store to compare on; no test set.")] = "",
    method: Annotated[list[str] | None, typer.Option(help="Methods to compare.")] = None,
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
    file: Annotated[str, typer.Argument(help=".gguf, .pt, .svec or .safetensors.")],
    out: Annotated[str, typer.Option(help="Folder of the vector.")],
    name: Annotated[str, typer.Option(help="<model>/<name>, for the card.")],
    format: Annotated[str, typer.Option(help="Whose file it is; told by its content else.")] = "",
    layer: Annotated[int, typer.Option(help="Our layer, where the file names none.")] = -1,
    concept: Annotated[int, typer.Option(help="Of axbench: the row to take.")] = -1,
    description: Annotated[str, typer.Option(help="What a positive scale does.")] = "",
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
    vector: Annotated[str, typer.Argument(help="Name, folder or hf:// address.")],
    file: Annotated[str, typer.Argument(help="File to write.")],
    format: Annotated[
        str, typer.Option(help="repeng, steering-vectors, persona, ibm or safetensors.")
    ],
    layers: Layers = "all",
    model_hint: Annotated[str, typer.Option(help="Of repeng: model type, such as llama.")] = "",
    n_layers: Annotated[int, typer.Option(help="Of persona: blocks of the model.")] = 0,
    avg_proj: Annotated[
        float | None, typer.Option(help="Of ibm: what the projection is set to.")
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
