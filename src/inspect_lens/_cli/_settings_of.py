"""`inspect-lens settings`: what others have published for a model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from ._output import Json, emit

if TYPE_CHECKING:
    from inspect_lens import PublishedSetting


def settings(
    model: Annotated[
        str,
        typer.Argument(
            help="Model on the hub, such as Qwen/Qwen2-1.5B-Instruct; those of all by default."
        ),
    ] = "all",
    as_json: Json = False,
) -> None:
    """List heads, layers, vectors and verbalisers that were published for a model.

    They are what the authors published, with source and licence; they were not measured again here.
    """
    from inspect_lens import published_settings
    from inspect_lens._base.published import PUBLISHED

    found = PUBLISHED if model == "all" else published_settings(model)
    lines = [line for one in found for line in _lines(one)]
    emit({"settings": [one.model_dump(mode="json") for one in found]}, lines, as_json=as_json)


def _lines(one: PublishedSetting) -> Iterator[str]:
    said = f"revision {one.revision}" if one.revision else "revision not stated"
    yield f"{one.model} ({said}): {one.kind}"
    if one.heads:
        yield f"  heads {' '.join(f'{layer}.{head}' for layer, head in one.heads)} (layer.head)"
    if one.layer is not None:
        yield f"  layer {one.layer}"
    yield from (f"  file {file}" for file in one.files)
    if one.note:
        yield f"  {one.note}"
    yield f"  source: {one.source}; licence: {one.licence}"
