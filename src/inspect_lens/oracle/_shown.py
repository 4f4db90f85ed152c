"""Which activations are shown to an oracle: layers, tokens, and where they come from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
from inspect_ai.model import ChatMessage, Model, ModelOutput
from numpy.typing import NDArray

from inspect_lens.errors import ArtifactError, SpecError
from inspect_lens.model import Activations, activations_for, recapture
from inspect_lens.model._request import role_advice
from inspect_lens.reading import Source
from inspect_lens.reading._rows import pick_rows, select_positions, take_captured
from inspect_lens.spec import Positions, check_word, parse_positions

from ._load import OracleConfig

InputKind = Literal["tokens", "segment", "full_seq"]
"""`segment`: the chosen tokens together; `tokens`: each of them alone, one question for each;
`full_seq`: every token of prompt and completion together."""

LayerChoice: TypeAlias = int | float | Sequence[int] | None
"""A layer; a share of the depth such as 0.5, which is layer int(n_layers * 0.5); one of the
oracle's sets of several layers; or None for the middle one of its sets."""


class Shown(NamedTuple):
    """Rows that one prompt shows."""

    rows: NDArray[np.float32]
    """(layers times positions, hidden), layer by layer."""
    layers: tuple[int, ...]
    positions: tuple[int, ...]
    """Absolute positions over prompt and completion."""


def parse_inputs(
    inputs: str, positions: object, last: int | None
) -> tuple[InputKind, Positions, int | None]:
    """Judge what a user asked to show."""
    check_word("inputs", inputs, InputKind)
    if last is not None and (isinstance(last, bool) or not isinstance(last, int) or last < 1):
        raise SpecError(f"last={last!r}; allowed are a positive number of tokens, and None for all")
    kind: InputKind = "tokens" if inputs == "tokens" else "segment"
    if inputs == "full_seq":
        return "full_seq", "all", None
    return kind, parse_positions(positions, field="positions"), last


def choose_layers(
    config: OracleConfig, layers: LayerChoice, n_layers: int | None
) -> tuple[int, ...]:
    """Find the layers to show, among those that the oracle learned to read."""
    known = config.act_layer_combinations
    if layers is None:
        return known[len(known) // 2]
    if isinstance(layers, bool) or not isinstance(layers, int | float | Sequence):
        raise SpecError(f"layers={layers!r}; allowed are a layer, a share of the depth, or None")
    wanted: tuple[int, ...]
    if isinstance(layers, float):
        if not 0.0 < layers < 1.0 or n_layers is None:
            raise SpecError(
                f"layers={layers!r}; a share of the depth is between 0 and 1, as 0.5 for the middle"
            )
        wanted = (int(n_layers * layers),)
    else:
        wanted = (layers,) if isinstance(layers, int) else tuple(layers)
    if wanted not in known:
        asked = f"layers={layers!r}" + (
            f" (layer {wanted[0]})" if isinstance(layers, float) else ""
        )
        raise SpecError(
            f"{asked}; this oracle learned to read {', '.join(map(str, map(list, known)))} "
            "(act_layer_combinations of its ao_config.json), and answers about others would mean "
            "nothing"
        )
    return wanted


async def n_layers_of(model: Model, token_ids: Sequence[int]) -> int:
    """Count the decoder layers of a model by capturing one token at all of them."""
    whole = await recapture(
        model, prompt_token_ids=token_ids[:1], token_ids=token_ids[1:2], layers="all"
    )
    return len(whole.layers)


async def find_activations(
    about: Activations | ModelOutput | ChatMessage,
    *,
    layers: tuple[int, ...],
    source: Source,
    model: Model,
) -> tuple[Activations, str]:
    """The activations of a generation, and whether they were captured or fed again."""
    if isinstance(about, Activations):
        return about, "captured"
    if not isinstance(about, ModelOutput):
        handle = activations_for(about)
        if handle is None:
            raise ArtifactError(
                f"oracle: no activations are known for message {about.id!r}; the call that made it "
                "has to capture: -M capture=…, with_capture(…) or lens_config(capture=…); in a "
                f"role {role_advice()}"
            )
        return handle, "captured"

    def take(handle: Activations, origin: str) -> tuple[Activations, str]:
        pick_rows(handle, layers, wanted=())  # reads the file, which may be gone
        return handle, "captured" if origin == "rows" else origin

    return await take_captured(
        about, take, layers=layers, source=source, model=model, reader="oracle"
    )


def select_rows(
    handle: Activations,
    layers: tuple[int, ...],
    *,
    inputs: InputKind,
    positions: Positions,
    last: int | None = None,
) -> list[Shown]:
    """Cut out what each prompt shows.

    The last sampled token is never among the positions: the model that wrote it did not read it.
    """
    read: Positions = "all" if inputs == "full_seq" else positions
    found = tuple(select_positions(read, handle.n_prompt, handle.n_completion) or ())
    wanted = found if last is None else found[-last:]
    captured = pick_rows(handle, layers, wanted=wanted).acts
    if not wanted:
        return []
    row = {position: i for i, position in enumerate(wanted)}
    groups = [(p,) for p in wanted] if inputs == "tokens" else [wanted]
    return [
        Shown(
            np.ascontiguousarray(captured[:, [row[p] for p in group]]).reshape(
                len(layers) * len(group), -1
            ),
            layers,
            group,
        )
        for group in groups
    ]
