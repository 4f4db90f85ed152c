"""`inspect-lens lens …`: the commands and their options."""

from __future__ import annotations

from typing import Annotated

import typer

from ._output import emit, parse_layers

__all__ = ["lens_app"]

lens_app = typer.Typer(
    help="Fit tuned and Jacobian lenses to a model, and judge them on other texts.",
    no_args_is_help=True,
)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Model = Annotated[str, typer.Option(help="Model for transformers: folder or hub name.")]
Device = Annotated[str, typer.Option(help="cpu, cuda, and so on.")]
Dtype = Annotated[str, typer.Option(help="Precision of the model: float32 or bfloat16.")]
Texts = Annotated[str, typer.Option(help="JSONL file; each line has 'text' or 'messages'.")]


@lens_app.command()
def fit(
    kind: Annotated[str, typer.Option(help="Kind of lens: tuned or jacobian.")],
    model: Model,
    texts: Texts,
    held_out: Annotated[str, typer.Option(help="JSONL file of other texts, to judge the lens on.")],
    out: Annotated[str, typer.Option(help="Folder to write the lens to.")],
    name: Annotated[str, typer.Option(help="Name on the card: <model>/<name>.")] = "",
    layers: Annotated[
        str, typer.Option(help="'all' (but the last), or numbers such as 8,10-14.")
    ] = "all",
    steps: Annotated[int, typer.Option(help="tuned only: number of batches.")] = 250,
    lr: Annotated[float, typer.Option(help="tuned only: learning rate at the start.")] = 1e-3,
    batch: Annotated[int, typer.Option(help="tuned only: texts per batch.")] = 16,
    block: Annotated[int, typer.Option(help="jacobian only: rows of the matrix at once.")] = 32,
    max_tokens: Annotated[
        int, typer.Option(help="Tokens of a text; 0 means 512 (tuned) or 128 (jacobian).")
    ] = 0,
    skip_first: Annotated[
        int, typer.Option(help="First tokens to leave out; -1 means 0 (tuned) or 16 (jacobian).")
    ] = -1,
    seed: Annotated[int, typer.Option(help="tuned only: seed of the order of texts.")] = 0,
    half: Annotated[bool, typer.Option(help="Store the matrices as float16.")] = False,
    device: Device = "cpu",
    dtype: Dtype = "float32",
    as_json: Json = False,
) -> None:
    """Fit a lens, judge it on held-out texts next to the logit lens, and write it."""
    from ._lens_jobs import fit_job

    result, lines = fit_job(
        kind, model=model, texts=texts, held_out=held_out, out=out, name=name,
        layers=parse_layers(layers), steps=steps, lr=lr, batch=batch, block=block,
        max_tokens=max_tokens or None, skip_first=None if skip_first < 0 else skip_first,
        seed=seed, half=half, device=device, dtype=dtype,
    )  # fmt: skip
    emit(result, lines, as_json=as_json)


@lens_app.command()
def evaluate(
    lens: Annotated[str, typer.Argument(help="Lens: name, folder or hf:// address.")],
    model: Model,
    texts: Texts,
    device: Device = "cpu",
    dtype: Dtype = "float32",
    as_json: Json = False,
) -> None:
    """Compare a lens with the model's own predictions, and with the logit lens."""
    from ._lens_jobs import evaluate_job

    result, lines = evaluate_job(lens, model=model, texts=texts, device=device, dtype=dtype)
    emit(result, lines, as_json=as_json)
