"""`inspect-lens view`: a log as a page of coloured tokens."""

from __future__ import annotations

from typing import Annotated

import typer

from ._output import emit

__all__ = ["view"]


def view(
    log: Annotated[
        str, typer.Argument(help="Inspect log (.eval), with its .lens folder next to it.")
    ],
    probe: Annotated[
        list[str] | None,
        typer.Option(
            help="Probe (repeatable): name, folder or hf:// address; by default, those in the log."
        ),
    ] = None,
    out: Annotated[str, typer.Option(help="HTML file to write; next to the log by default.")] = "",
    tokenizer: Annotated[
        str, typer.Option(help="Folder of a tokenizer; the model's by default.")
    ] = "",
    limit: Annotated[
        int, typer.Option(min=0, help="Show at most this many samples; 0 shows all.")
    ] = 0,
    max_mib: Annotated[
        int, typer.Option(min=1, help="Largest page in MiB; further samples are left out.")
    ] = 64,
    any_model: Annotated[
        bool, typer.Option("--any-model", help="Accept probes that were trained on another model.")
    ] = False,
    follow: Annotated[
        list[str] | None,
        typer.Option(
            help="Folder or URL to read files from where the log names them; 'all' trusts the log. "
            "Repeatable."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Write one HTML page of a log, with the probe score of every token.

    Needs the log and the .lens folder next to it; no server and no GPU, and no network unless
    --probe or --follow names an address.
    """
    from inspect_lens.view import write_view

    made = write_view(
        log, out or None, probes=probe or (), tokenizer=tokenizer or None, limit=limit or None,
        max_bytes=max_mib << 20, any_model=any_model, follow=follow or (),
        progress=True,
    )  # fmt: skip
    lines = [
        f"{made.path}: {made.n_samples} samples, {made.n_calls} calls, {made.n_tokens} tokens, "
        + (f"{made.nbytes / 2**20:.1f} MiB" if made.nbytes >> 20 else f"{made.nbytes >> 10} KiB"),
        f"  probes: {', '.join(made.series)}",
        *(f"  note: {note}" for note in made.notes),
    ]
    emit(made.as_dict(), lines, as_json=as_json)
