"""The probe's score of each model call of a transcript, and one number for all of them."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterable
from typing import Any, NamedTuple

from inspect_ai.event import Event, ModelEvent
from inspect_ai.model import Model, get_model
from inspect_ai.scorer import Reference
from inspect_scout import Result

from inspect_lens.errors import NotCapturedError, UnsupportedError
from inspect_lens.model import activations, recaptures, reread
from inspect_lens.model._host import PrerequisiteError
from inspect_lens.reading import Combine, ProbeReader, Reading, Turn, combining, read_call

__all__ = ["Read", "Turns", "read_turns", "summarise"]


class Read(NamedTuple):
    """One model call that the probe read."""

    message_id: str
    reading: Reading
    off_policy: bool
    """The activations are not those of the model that wrote the text, or not of its tokens."""


class Turns(NamedTuple):
    """All model calls that were to be read."""

    read: list[Read]
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
    reader: ProbeReader, turns: Iterable[Turn], events: Iterable[Event], *, model: str | None
) -> Turns:
    """Apply a probe to model calls of a transcript.

    Args:
        reader: the probe and what it reads.
        turns: calls of the transcript; one that occurs twice is read once.
        events: of the transcript, which have what the model was shown.
        model: that reads calls again which captured nothing; the scan's model by default.

    Returns:
        The turns, in their order.

    Raises:
        ArtifactError: activations are damaged or not there, or the model is not the probe's.
        PrerequisiteError: as for `reading_model`.
    """
    again = None if reader.source == "captured" else reading_model(model)
    made = {
        choice.message.id: event
        for event in events
        if isinstance(event, ModelEvent)
        for choice in event.output.choices
    }
    read, missing, empty = [], 0, 0
    for turn in {turn.message_id: turn for turn in turns}.values():
        try:
            found = await _read(reader, turn, made.get(turn.message_id), again)
        except (NotCapturedError, UnsupportedError):
            if reader.calls.on_missing == "error":
                raise
            missing += 1
            continue
        if found is None:
            empty += 1
            continue
        read.append(Read(turn.message_id or "", *found))
    return Turns(read, missing, empty)


async def _read(
    reader: ProbeReader, turn: Turn, event: ModelEvent | None, again: Model | None
) -> tuple[Reading, bool] | None:
    """The reading of one call, and whether it is off-policy; None without a token."""
    handle = activations(turn.output)
    if handle is not None:
        reading = await read_call(reader, handle, model=again)
        if reading is None:
            return None
        other = again is not None and again.name != handle.origin.get("model")
        return reading, reading.rows.source == "recomputed" and other
    layers = list(reader.probe.layers)
    if again is None or event is None:
        raise NotCapturedError(
            f"activations: message {turn.message_id} captured nothing; the probe needs layers "
            f"{layers}; scan with a vllm-lens/ model to read the text again, which is off-policy, "
            f"run the eval with -M capture={layers}, or leave such calls out with "
            'on_missing="skip"'
        )
    message = turn.output.message
    if not message.text:
        return None
    rendered = await reread(
        again, messages=event.input, answer=message, layers=layers, tools=event.tools,
        site=reader.probe.site,
    )  # fmt: skip
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
    """
    note = f" {turns.n_missing} calls captured nothing." if turns.n_missing else ""
    if not turns.read:
        return Result(value=None, explanation=f"No token that {reader.probe.name} reads.{note}")
    values = [turn.reading.value for turn in turns.read]
    best = values.index(max(values))
    value = combining(combine)(values)
    chosen = turns.read[best]
    references = [
        Reference(type="message", cite=f"[M{i}]", id=turn.message_id)
        for i, turn in enumerate(turns.read, start=1)
        if turn.message_id
    ]
    return Result(
        value=value,
        answer=chosen.reading.verdict,
        explanation=f"[M{best + 1}]: {chosen.reading.explain()} "
        f"The value is the {combine} of {len(values)} turns.{note}",
        references=references,
        metadata=_metadata(turns, chosen),
    )


def _metadata(turns: Turns, chosen: Read) -> dict[str, Any]:
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
