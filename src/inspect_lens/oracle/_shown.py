"""Which activations are shown to an oracle: layers, tokens, and where they come from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal, NamedTuple, TypeAlias, get_args

import anyio.to_thread
import numpy as np
from inspect_ai.model import Model, ModelOutput
from numpy.typing import NDArray

from inspect_lens.errors import ArtifactError, NotCapturedError, SpecError
from inspect_lens.model import Activations, activations, recapture
from inspect_lens.model._request import capture_advice
from inspect_lens.reading._rows import call_adapter, was_steered
from inspect_lens.spec import REDUCTIONS, Positions, parse_positions, resolve_positions

from ._load import OracleConfig

__all__ = [
    "InputKind",
    "LayerChoice",
    "Shown",
    "Source",
    "choose_layers",
    "find_activations",
    "n_layers_of",
    "parse_inputs",
    "select_rows",
]

InputKind = Literal["tokens", "segment", "full_seq"]
"""`segment`: the chosen tokens together; `tokens`: each of them alone, one question for each;
`full_seq`: every token of prompt and completion together."""

Source = Literal["auto", "captured", "recompute"]
"""Where activations come from: the generation itself, or its tokens fed again.

`captured`: of the generation; `recompute`: from its token ids; `auto`: the first, else the
second."""

LayerChoice: TypeAlias = int | float | Sequence[int] | None
"""A layer; a share of the depth such as 0.5, which is layer int(n_layers * 0.5); one of the
oracle's sets of several layers; or None for the middle one of its sets."""

_RESIDUAL: Final = "residual_stream"


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
    if inputs not in get_args(InputKind):
        raise SpecError(f"inputs={inputs!r}; allowed are {', '.join(get_args(InputKind))}")
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
    output: ModelOutput, *, layers: tuple[int, ...], source: Source, model: Model
) -> tuple[Activations, Literal["captured", "recomputed"]]:
    """Get the activations of a generation: those it captured, or by feeding its tokens again."""
    handle = activations(output)
    problem = "this output has no activations"
    if handle is not None and source != "recompute":
        try:
            await anyio.to_thread.run_sync(_check, handle, layers)
            return handle, "captured"
        except ArtifactError as error:
            problem = str(error)
    if source == "captured":
        raise NotCapturedError(_advice(problem, layers, "use source='auto' to recompute"))
    metadata = output.metadata or {}
    prompt, completion = metadata.get("prompt_token_ids"), metadata.get("token_ids")
    if not prompt and handle is not None:
        prompt, completion = handle.prompt_token_ids, handle.token_ids
    if not prompt or not completion:
        raise NotCapturedError(
            _advice(f"{problem}, and no token ids to recompute them from", layers, "")
        )
    if source == "auto" and was_steered(output, handle):
        raise NotCapturedError(
            _advice(
                f"{problem}, and the generation was steered, which recomputing would not repeat",
                layers,
                "use source='recompute' for the activations of the text on the plain model",
            )
        )
    fed_again = await recapture(
        model, prompt_token_ids=prompt, token_ids=completion, layers=layers,
        adapter=call_adapter(output),
    )  # fmt: skip
    return fed_again, "recomputed"


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
    _check(handle, layers)
    n_fed = handle.n_prompt + max(handle.n_completion - 1, 0)
    try:
        wanted = tuple(
            resolve_positions(
                "all" if inputs == "full_seq" else positions,
                n_prompt=handle.n_prompt, n_max=n_fed, field="positions",
            )
        )  # fmt: skip
    except SpecError:
        return []
    wanted = wanted if last is None else wanted[-last:]
    if not wanted:
        return []
    row = {position: i for i, position in enumerate(handle.positions)}
    if absent := [position for position in wanted if position not in row]:
        raise ArtifactError(
            f"activations: token position {absent[0]} was not captured; capture with "
            "positions='all', or show others"
        )
    captured = handle.numpy(_RESIDUAL)[[handle.layers.index(n) for n in layers]]
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


def _check(handle: Activations, layers: tuple[int, ...]) -> None:
    if _RESIDUAL not in handle:
        raise ArtifactError(f"resid_post was not captured, only {', '.join(handle)}")
    if not REDUCTIONS[reduced := handle.tensors[_RESIDUAL].reduce].has_rows:
        raise ArtifactError(f"of resid_post only the {reduced} was captured, and not the tokens")
    missing = [layer for layer in layers if layer not in handle.layers]
    if missing:
        raise ArtifactError(f"layer {missing[0]} was not captured, only {list(handle.layers)}")
    handle.data(_RESIDUAL)  # reads the file, which may be gone


def _advice(problem: str, layers: tuple[int, ...], otherwise: str) -> str:
    return (
        f"activations: {problem}; the oracle reads layers {list(layers)}; "
        f"{capture_advice(layers)}" + (f"; {otherwise}" if otherwise else "")
    )
