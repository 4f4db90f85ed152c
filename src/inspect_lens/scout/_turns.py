"""The probe's score of each model call of a transcript, and one number for all of them."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterable
from typing import Any, Literal, NamedTuple

from inspect_ai.event import Event, ModelEvent
from inspect_ai.model import Model, get_model
from inspect_ai.scorer import Reference
from inspect_scout import Result

from inspect_lens.errors import ArtifactError, UnsupportedError
from inspect_lens.model import activations, recaptures, reread
from inspect_lens.model._host import PrerequisiteError
from inspect_lens.model.request._instrument import is_instrument_call
from inspect_lens.reading import ProbeReader, Reading, read_call
from inspect_lens.reading._aside import Aside

__all__ = ["Combine", "Turn", "Turns", "read_turns", "summarise"]

Combine = Literal["max", "mean", "last"]
"""Which turns make the value: the most suspicious one, all of them, or the last."""


class Turn(NamedTuple):
    """One model call that the probe read."""

    message_id: str
    reading: Reading
    off_policy: bool
    """The activations are not those of the model that wrote the text, or not of its tokens."""


class Turns(NamedTuple):
    """All model calls that were to be read."""

    read: list[Turn]
    n_missing: int
    """Calls that captured nothing and could not be read again."""
    n_without_tokens: int
    """Calls without a token that the probe reads."""


def reading_model(name: str | None) -> Model | None:
    """The model that can read transcripts again, or None.

    Raises:
        PrerequisiteError: each of several processes would start a server of it.
    """
    try:
        model = get_model(name) if name is not None else get_model()
    except ValueError:
        return None  # the scan was started without a model
    if not recaptures(model):
        if name is not None:
            raise PrerequisiteError(
                f"model={name!r} cannot be captured; give a vllm-lens/ model, or leave it out to "
                "read what the log captured"
            )
        return None
    if multiprocessing.parent_process() is not None and model.api.base_url is None:
        raise PrerequisiteError(
            f"{model}: each of the scan's processes would start a vLLM server of its own; scan "
            "with max_processes=1, or start one server and pass its address as VLLM_BASE_URL or "
            "model_base_url"
        )
    return model


async def read_turns(
    reader: ProbeReader, events: Iterable[Event], *, role: str | None, model: str | None
) -> Turns:
    """Apply a probe to every model call of a transcript.

    Args:
        reader: the probe and what it reads.
        events: of the transcript; a call that occurs twice is read once, one of an oracle and one
            that was only compared, such as a cell of a sweep, never.
        role: only calls of this model role.
        model: that reads calls again which captured nothing; the scan's model by default.

    Returns:
        The turns, in their order.

    Raises:
        ArtifactError: activations are damaged, or the model is not the probe's.
        PrerequisiteError: as for `reading_model`.
    """
    again = None if reader.source == "captured" else reading_model(model)
    turns, seen, missing, empty = [], set(), 0, 0
    events = list(events)
    aside = Aside.of(events)
    for event in events:
        if not isinstance(event, ModelEvent) or not event.output.choices:
            continue
        if is_instrument_call(event.input) or aside.has(event, event.output.message.id):
            continue
        message_id = event.output.message.id or ""
        if (role is not None and event.role != role) or message_id in seen:
            continue
        seen.add(message_id)
        try:
            turn = await _read(reader, event, again)
        except _Missing:
            missing += 1
            continue
        if turn is None:
            empty += 1
            continue
        reading, off_policy = turn
        turns.append(Turn(message_id, reading, off_policy))
    return Turns(turns, missing, empty)


class _Missing(Exception):
    """This call captured nothing, and there is no model to read it again."""


async def _read(
    reader: ProbeReader, event: ModelEvent, again: Model | None
) -> tuple[Reading, bool] | None:
    """The reading of one call, and whether it is off-policy; None without a token."""
    handle = activations(event.output)
    if handle is not None:
        try:
            reading = await read_call(reader, handle, model=again)
        except UnsupportedError:
            raise _Missing from None
        if reading is None:
            return None
        other = again is not None and again.name != handle.origin.get("model")
        return reading, reading.rows.source == "recomputed" and other
    if again is None:
        raise _Missing
    message = event.output.message
    if not message.text:
        return None
    rendered = await reread(
        again,
        messages=event.input,
        answer=message,
        layers=list(reader.probe.layers),
        tools=event.tools,
        site=reader.probe.site,
    )
    reading = await reader.read(rendered, model_name=again.name, model=again)
    return None if reading is None else (reading, True)


def summarise(turns: Turns, *, combine: Combine, reader: ProbeReader) -> Result:
    """One result for a transcript.

    Args:
        turns: of it.
        combine: which of them make the value.
        reader: that read them.

    Returns:
        The result; its references cite the turns.

    Raises:
        ArtifactError: no turn could be read because none captured anything.
    """
    layers = list(reader.probe.layers)
    if not turns.read:
        if turns.n_missing:
            raise ArtifactError(
                f"activations: none of the {turns.n_missing} model calls of this transcript "
                f"captured anything; the probe needs layers {layers}; scan with a vllm-lens/ model "
                "to read the text again, which is off-policy, or run the eval with -M "
                f"capture={layers}"
            )
        return Result(value=None, explanation=f"No token that {reader.probe.name} reads.")
    values = [turn.reading.value for turn in turns.read]
    best = values.index(max(values)) if combine != "last" else len(values) - 1
    value = sum(values) / len(values) if combine == "mean" else values[best]
    chosen = turns.read[best]
    references = [
        Reference(type="message", cite=f"[M{i}]", id=turn.message_id)
        for i, turn in enumerate(turns.read, start=1)
        if turn.message_id
    ]
    note = f" {turns.n_missing} calls captured nothing." if turns.n_missing else ""
    return Result(
        value=value,
        answer=chosen.reading.verdict,
        explanation=f"[M{best + 1}]: {chosen.reading.explain()} "
        f"The value is the {combine} of {len(values)} turns.{note}",
        references=references,
        metadata=_metadata(turns, chosen),
    )


def _metadata(turns: Turns, chosen: Turn) -> dict[str, Any]:
    return {
        **chosen.reading.metadata(),
        "off_policy": any(turn.off_policy for turn in turns.read),
        "n_missing": turns.n_missing,
        "n_without_tokens": turns.n_without_tokens,
        "turns": [
            {
                "message_id": turn.message_id,
                "value": turn.reading.value,
                "source": turn.reading.rows.source,
                "off_policy": turn.off_policy,
            }
            for turn in turns.read
        ],
    }
