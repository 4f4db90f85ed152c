"""The activations that a probe reads: those of the generation, or recomputed from token ids."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final, Literal, NamedTuple, TypeVar, cast

import anyio.to_thread
import numpy as np
from anyio import CapacityLimiter
from anyio.lowlevel import RunVar
from inspect_ai.model import Model, ModelOutput, get_model
from numpy.typing import NDArray

from inspect_lens.errors import ArtifactError, NotCapturedError, SpecError, UnsupportedError
from inspect_lens.model import Activations, activations, recapture, receipt
from inspect_lens.model._request import capture_advice
from inspect_lens.spec import (
    REDUCTIONS,
    RESID_POST,
    Positions,
    Site,
    TensorData,
    check_word,
    resolve_positions,
    result_name,
)

__all__ = ["Source"]

Source = Literal["auto", "captured", "recompute"]
"""Where scores come from: the generation itself, or its tokens fed again.

`captured`: of the generation, what probes in the engine said, else captured rows; `recompute`:
from the token ids; `auto`: the first, else the second."""
Origin = Literal["rows", "recomputed"]


_MOST: Final = 8
_limiters: RunVar[CapacityLimiter] = RunVar("inspect_lens_readers")
Made = TypeVar("Made")


async def in_thread(work: Callable[[], Made]) -> Made:
    """Do what reads files or multiplies rows in a thread, a few at once.

    Calls that end together would start as many threads as Inspect allows, and all take the
    interpreter from the event loop.
    """
    try:
        limiter = _limiters.get()
    except LookupError:
        _limiters.set(limiter := CapacityLimiter(min(_MOST, os.cpu_count() or 1)))
    return await anyio.to_thread.run_sync(work, limiter=limiter)


def parse_source(source: str) -> Source:
    check_word("source", source, Source, "'auto' is the default")
    return cast("Source", source)


class Rows(NamedTuple):
    """Activations of the selected tokens of one output."""

    acts: NDArray[np.float32]
    """(layers, tokens, hidden)."""
    layers: tuple[int, ...]
    positions: range | tuple[int, ...]
    """Absolute positions over prompt and completion, in the order of the tokens."""
    source: Origin
    """`rows` are those of the generation."""
    n_prompt: int = 0
    """Prompt tokens of the call."""
    token_ids: tuple[int, ...] = ()
    """Id of the token at each position; empty where ids are not known."""
    handle: Activations | None = None
    """What the activations were taken from."""


async def read_rows(
    output: ModelOutput | Activations,
    *,
    layers: tuple[int, ...],
    positions: Positions,
    source: Source,
    site: Site = RESID_POST,
    model: Model | None = None,
) -> Rows | None:
    """Get the activations of the selected tokens.

    The last sampled token is never selected: the model that wrote it did not read it.
    """
    if isinstance(output, ModelOutput) and has_nothing_to_read(output):
        return None
    ids = read_token_ids(output)
    if ids is not None and select_positions(positions, len(ids[0]), len(ids[1])) is None:
        return None  # before anything is fed again

    take = partial(captured_rows, layers=layers, positions=positions, site=site)
    return await take_captured(output, take, layers=layers, source=source, site=site, model=model)


async def take_captured(
    output: ModelOutput | Activations,
    take: Callable[[Activations, Origin], Made],
    *,
    layers: tuple[int, ...],
    source: Source,
    site: Site = RESID_POST,
    model: Model | None = None,
    reader: str = "probe",
) -> Made:
    """What `take` makes of the activations of a call, captured or of its tokens fed again.

    It runs in a thread, and raises ArtifactError where it misses something in what was captured.
    """
    handle = activations(output)
    problem = "this output has no activations"
    if handle is not None and source != "recompute":
        try:
            return await in_thread(lambda: take(handle, "rows"))
        except ArtifactError as error:
            problem = str(error)

    def advice(problem: str, otherwise: str = "") -> str:
        return (
            f"activations: {problem}; the {reader} needs layers {list(layers)} of every token it "
            f"reads; {capture_advice(layers)}{otherwise}"
        )

    if source == "captured":
        raise NotCapturedError(advice(problem, (
            "; to recompute on the model, use source='auto', or `inspect score` with "
            "-S source=auto"
        )))  # fmt: skip
    ids = read_token_ids(output)
    if ids is None:
        problem += ", and no token ids to recompute them from"
        raise NotCapturedError(
            advice(problem, "; text alone does not say which tokens the model saw")
        )
    if source == "auto" and was_steered(output, handle):
        problem += ", and the generation was steered, which recomputing would not repeat"
        raise NotCapturedError(
            advice(problem, "; use source='recompute' to read the text on the plain model")
        )
    try:
        replayed = await recapture(
            model or get_model(), prompt_token_ids=ids[0], token_ids=ids[1], layers=layers,
            site=site, adapter=_adapter(output),
        )  # fmt: skip
    except UnsupportedError as error:
        raise UnsupportedError(advice(f"{problem}; {error}")) from None
    return await in_thread(lambda: take(replayed, "recomputed"))


def captured_rows(
    handle: Activations,
    origin: Origin = "rows",
    *,
    layers: tuple[int, ...],
    positions: Positions,
    site: Site,
) -> Rows | None:
    """What `read_rows` finds in captured activations, without an event loop."""
    wanted = select_positions(positions, handle.n_prompt, handle.n_completion)
    return None if wanted is None else pick_rows(handle, layers, site, wanted, origin)


def select_positions(
    positions: Positions, n_prompt: int, n_completion: int
) -> range | tuple[int, ...] | None:
    """Positions of one output, or None when it has none of them."""
    try:
        selected = resolve_positions(
            positions,
            n_prompt=n_prompt,
            n_max=n_prompt + max(n_completion - 1, 0),
            field="positions",
        )
    except SpecError:
        return None
    return selected if len(selected) else None


def pick_rows(
    handle: Activations,
    layers: tuple[int, ...],
    site: Site = RESID_POST,
    wanted: range | tuple[int, ...] | None = None,
    source: Origin = "rows",
) -> Rows:
    """Take rows out of what a call captured, by absolute position."""
    positions = handle.positions if wanted is None else wanted
    ids = (*handle.prompt_token_ids, *handle.token_ids)
    return Rows(
        # Cut before widening: a log may have captured every layer.
        pick_data(handle, layers, site, positions).to_float32(),
        layers,
        positions,
        source,
        n_prompt=handle.n_prompt,
        token_ids=ids_at(ids, positions),
        handle=handle,
    )


def ids_at(ids: tuple[int, ...], positions: range | tuple[int, ...]) -> tuple[int, ...]:
    """The ids at positions; none where ids are not known."""
    if isinstance(positions, range):
        return ids[positions.start : positions.stop]
    return tuple(ids[p] for p in positions) if ids else ()


def places(have: Sequence[int], wanted: Sequence[int]) -> slice | list[int]:
    """Where positions stand among those that there are; KeyError with one that is not there."""
    have, wanted = _run(have), _run(wanted)
    are_runs = isinstance(have, range) and isinstance(wanted, range) and wanted
    if are_runs and wanted[0] in have and wanted[-1] in have:
        return slice(wanted[0] - have[0], wanted[-1] + 1 - have[0])
    at = {position: i for i, position in enumerate(have)}
    return [at[position] for position in wanted]


def _run(positions: Sequence[int]) -> Sequence[int]:
    """Positions as a range, if they are one."""
    if isinstance(positions, range) or not positions:
        return positions
    run = range(positions[0], positions[-1] + 1)
    # As many first: a log says what they are, and the last one may be any number.
    is_run = run.stop - run.start == len(positions) and tuple(positions) == tuple(run)
    return run if is_run else positions


def pick_data(
    handle: Activations, layers: tuple[int, ...] | None, site: Site, positions: Sequence[int]
) -> TensorData:
    """The same rows as they were captured, of all layers where none are named."""
    name = result_name(site)
    if name not in handle:
        raise NotCapturedError(f"{site} was not captured, only {', '.join(handle)}")
    if not REDUCTIONS[reduced := handle.tensors[name].reduce].has_rows:
        raise NotCapturedError(f"of {site} only the {reduced} was captured, and not the tokens")
    there = handle.tensors[name].layers
    chosen = there if layers is None else layers
    if missing := [layer for layer in chosen if layer not in there]:
        raise NotCapturedError(f"layer {missing[0]} was not captured, only {list(there)}")
    try:
        tokens = places(handle.positions, positions)
    except KeyError as error:
        raise NotCapturedError(f"token position {error.args[0]} was not captured") from None
    data, rows = handle.data(name), [there.index(n) for n in chosen]
    # A run of tokens is not gathered one by one.
    at: Any = (rows, tokens) if isinstance(tokens, slice) else np.ix_(rows, tokens)
    return TensorData(data.storage[at], data.dtype)


def read_token_ids(output: ModelOutput | Activations) -> tuple[Sequence[int], Sequence[int]] | None:
    """Token ids of prompt and completion, from the live metadata or the captured call."""
    metadata = output.metadata or {} if isinstance(output, ModelOutput) else {}
    prompt, completion = metadata.get("prompt_token_ids"), metadata.get("token_ids")
    handle = activations(output)
    if not prompt and handle is not None:
        prompt, completion = handle.prompt_token_ids, handle.token_ids
    return (prompt, completion) if prompt and completion else None


WITHHELD = "withheld"
"""Key of `output.metadata` of a text that stands in the place of an answer, which nobody wrote.

Its value is the id of the message that was withheld."""


def is_withheld(output: ModelOutput) -> bool:
    """Whether an output stands in the place of an answer that `probe_gate` stopped."""
    return bool((output.metadata or {}).get(WITHHELD))


def has_nothing_to_read(output: ModelOutput) -> bool:
    """Whether no model wrote what stands there, so that a reader has nothing to say of it."""
    if is_withheld(output):
        return True  # the rows of what stood there are not those of this text
    # A limit ended the sample before its first answer, or the prompt was longer than the context:
    # Inspect makes an output of each, of no token.
    if output.choices and output.stop_reason != "model_length":
        return False
    return activations(output) is None and read_token_ids(output) is None


def was_steered(output: ModelOutput | Activations, handle: Activations | None) -> bool:
    """Whether recomputing would not repeat the call."""
    if handle is not None:
        return handle.was_steered
    done = receipt(output) if isinstance(output, ModelOutput) else None
    return done is not None and done.steer is not None


def _adapter(output: ModelOutput | Activations) -> Mapping[str, Any] | None:
    """The adapter that a call asked for itself: what it wrote has to be read with it too."""
    facts = output.metadata or {} if isinstance(output, ModelOutput) else output.origin
    found = facts.get("lora_request")
    return found if isinstance(found, Mapping) else None
