"""`inspect-lens chat`: a page whose tokens show scores and predictions, and that steers."""

from __future__ import annotations

import contextlib
import sys
import webbrowser
from typing import Annotated

import typer

from ._output import parse_layers

__all__ = ["chat"]


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
