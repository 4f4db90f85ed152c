"""`inspect-lens view` and `inspect-lens chat`: pages whose tokens show scores and predictions."""

from __future__ import annotations

import contextlib
import sys
import webbrowser
from typing import Annotated

import typer

from ._output import Json, emit, parse_layers


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
    as_json: Json = False,
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


def chat(
    base_url: Annotated[
        str, typer.Option(help="Address of a running server, such as http://localhost:8000.")
    ],
    model: Annotated[
        str, typer.Option(help="Model as lens/<served name>; the server's first by default.")
    ] = "",
    probe: Annotated[
        str, typer.Option(help="Probe: its name on the server, or a probe to register there.")
    ] = "",
    lens: Annotated[
        str,
        typer.Option(help="Tuned or Jacobian lens, named like a probe; the logit lens by default."),
    ] = "",
    layers: Annotated[
        str, typer.Option(help="'all', 'none', or numbers such as 8,10-14; six by default.")
    ] = "",
    top_k: Annotated[int, typer.Option(help="Predicted tokens to show for each layer.")] = 5,
    vector: Annotated[
        str, typer.Option(help="Steering vector: its name on the server, or one to register there.")
    ] = "",
    scale: Annotated[
        float | None, typer.Option(help="Scale of the vector to begin with; its own by default.")
    ] = None,
    api_key: Annotated[str, typer.Option(help="API key, if the server needs one.")] = "",
    port: Annotated[int, typer.Option(help="Local port of the page; 0 takes a free one.")] = 0,
    browser: Annotated[bool, typer.Option(help="Open the page in a browser.")] = True,
) -> None:
    """Chat with a model, and steer it, on a page whose tokens show their scores.

    The page is on this machine only, and ends with this command.
    """
    from inspect_lens.view import ChatPage, open_talk

    chosen = [] if layers == "none" else parse_layers(layers) if layers else None
    talk = open_talk(
        base_url, model=model or None, probe=probe or None, lens=lens or None, layers=chosen,
        top_k=top_k, vector=vector or None, scale=scale, api_key=api_key or None,
    )  # fmt: skip
    with ChatPage(talk, port=port) as page:
        sys.stdout.write(f"{page.url}\nCtrl-C ends it.\n")
        sys.stdout.flush()
        if browser:
            webbrowser.open(page.url)
        with contextlib.suppress(KeyboardInterrupt):  # that is how it ends
            page.wait()
