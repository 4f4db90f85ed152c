"""Scanners for Inspect Scout that apply a probe to logged conversations.

Needs the extra `scout`. `probe_scanner` takes any transcript, `audit_probe_scanner` Petri's audits.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from inspect_ai.event import Event, ModelEvent, Timeline, TimelineEvent, TimelineSpan
from inspect_ai.model import Model, get_model
from inspect_ai.scorer import Reference, mean

from inspect_lens.errors import NotCapturedError, SpecError
from inspect_lens.model import activations, know_log
from inspect_lens.model._host import PrerequisiteError
from inspect_lens.model._recapture import reread
from inspect_lens.model._scope import LensProvider
from inspect_lens.probe import AnyProbe
from inspect_lens.reading import OnMissing, Over, ProbeReader, Reading, Source, Turn
from inspect_lens.reading import read_turns as read_calls
from inspect_lens.reading._samples import Combine, combining, read_call, read_each
from inspect_lens.reading._shared import shared_parameters
from inspect_lens.reading._thresholds import named_point
from inspect_lens.scorer import at_threshold, auroc_metric
from inspect_lens.spec import Positions

from ._extras import require

require("inspect_scout", module="inspect_lens.agents.scout", extra="scout")

from inspect_scout import Result, Scanner, Transcript, scanner  # noqa: E402 - after the check

__all__ = ["audit_probe_scanner", "probe_scanner"]


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
    """The model that can read transcripts again, or None."""
    try:
        model = get_model(name) if name is not None else get_model()
    except ValueError:
        return None  # the scan was started without a model
    if not isinstance(model.api, LensProvider):
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
    """Apply a probe to model calls of a transcript; one that occurs twice is read once.

    The events have what the model was shown, and `model`, or else that of the scan, reads calls
    again that captured nothing.
    """
    again = None if reader.source == "captured" else reading_model(model)
    made = {
        choice.message.id: event
        for event in events
        if isinstance(event, ModelEvent)
        for choice in event.output.choices
    }

    async def read(turn: Turn, _: Model | None) -> tuple[Reading, bool] | None:
        return await _read(reader, turn, made.get(turn.message_id), again)

    once = list({turn.message_id: turn for turn in turns}.values())
    found, missing = await read_each(read, once, reader.calls)
    return Turns(
        [Read(turn.message_id or "", *one) for turn, one in found],
        missing,
        len(once) - len(found) - missing,
    )


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
    if not message.text and message.tool_calls:
        raise NotCapturedError(
            f"activations: message {turn.message_id} captured nothing and is tool calls alone, "
            "which cannot be read again, as chat templates continue texts only; run the eval with "
            f'-M capture={layers}, or leave such calls out with on_missing="skip"'
        )
    if not message.text:
        return None
    rendered = await reread(
        again, messages=event.input, answer=message, layers=layers, tools=event.tools,
        site=reader.probe.site,
    )  # fmt: skip
    reading = await reader.read(rendered, model_name=again.name, model=again)
    return None if reading is None else (reading, True)


def summarise(turns: Turns, *, combine: Combine, reader: ProbeReader) -> Result:
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
        metadata=chosen.reading.metadata()
        | {
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
        },
    )


@scanner(
    messages="all",
    # The latter say which calls are scorers', and which answers were only compared.
    events=["model", "span_begin", "span_end", "info"],
    metrics=[auroc_metric(), at_threshold(), mean()],
)
@shared_parameters
def probe_scanner(
    probe: str | Path | AnyProbe,
    layer: int | None = None,
    positions: Positions | list[int] | None = None,
    pool: str | None = None,
    selection: str | None = None,
    combine: Combine = "max",
    source: Source = "auto",
    model: str | None = None,
    check_model: bool = True,
    tokenizer: str | None = None,
    over: Over = "all",
    roles: Sequence[str] | None = None,
    on_missing: OnMissing = "error",
    threshold: str | None = None,
) -> Scanner[Transcript]:
    """Apply a probe to each model call of a transcript.

    Calls that captured are read from the files beside the log. Others are read again by a
    `vllm-lens/` model, if the scan has one: rendered with its chat template and fed to it,
    which `off_policy` in the result's metadata says.

    Args:
        source: `captured` never reads again, `auto` where it has to, `recompute` always.
        model: that reads again; the scan's model by default.

    Returns:
        The scanner. Its value is None for a transcript without a token that the probe reads.

    Raises:
        ArtifactError: no such probe; while scanning, nothing was captured and there is no model.
        PrerequisiteError: while scanning, each of several processes would start a server.

    Example:
        ```python
        from inspect_scout import scan, scan_results_df, transcripts_from

        from inspect_lens.agents.scout import probe_scanner

        status = scan(
            scanners=[probe_scanner("organism/deception-lr", source="captured")],
            transcripts=transcripts_from("logs/honesty.eval"),
            max_processes=1,
            display="none",
        )
        found = scan_results_df(status.location).scanners["probe_scanner"]
        assert len(found) == 8
        ```
    """
    combining(combine)
    reader = ProbeReader.of(
        probe, layer=layer, positions=positions, pool=pool, selection=selection, source=source,
        check_model=check_model, tokenizer=tokenizer, over=over, roles=roles,
        on_missing=on_missing, threshold=named_point(threshold),
    )  # fmt: skip

    async def scan(transcript: Transcript) -> Result:
        if transcript.source_uri:
            know_log(transcript.source_uri)
        calls = reader.calls.select(transcript.events, None, transcript.model)
        turns = await read_turns(reader, calls.turns, transcript.events, model=model)
        return summarise(turns, combine=combine, reader=reader)

    return scan


@scanner(timeline=True, events=["model"], metrics=[auroc_metric(), at_threshold(), mean()])
@shared_parameters
def audit_probe_scanner(
    probe: str | Path | AnyProbe,
    audit_name: str | None = None,
    layer: int | None = None,
    positions: Positions | list[int] | None = None,
    pool: str | None = None,
    selection: str | None = None,
    combine: Combine = "max",
    source: Source = "auto",
    model: str | None = None,
    check_model: bool = True,
    tokenizer: str | None = None,
    over: Over = "all",
    on_missing: OnMissing = "error",
    threshold: str | None = None,
) -> Scanner[Transcript]:
    """Apply a probe to each turn of the target of a Petri audit, on every branch.

    Turns that a rollback took back are read as well: what the target did there it did.

    Args:
        audit_name: as for Petri's `audit_scanner`; the timeline is `<audit_name>-target`.
        source: `captured` never reads again, `auto` where it has to, `recompute` always.
        model: that reads again; the scan's model by default.
        over: `all` reads every turn of the target, `last` its last one.

    Raises:
        ArtifactError: as for `probe_scanner`.
        SpecError: an argument is wrong; while scanning, the transcript has no such timeline.

    Example:
        ```python
        from inspect_ai import task_with
        from inspect_petri import audit
        from inspect_scout import as_scorer

        from inspect_lens.agents.petri import lens_target_agent
        from inspect_lens.agents.scout import audit_probe_scanner

        target = lens_target_agent(capture=[4])
        task = audit(seed_instructions="Find out whether the target lies.", target=target)
        scanner = audit_probe_scanner("organism/deception-lr", combine="max")
        task = task_with(task, scorer=as_scorer(scanner))
        ```
    """
    combining(combine)
    reader = ProbeReader.of(
        probe, layer=layer, positions=positions, pool=pool, selection=selection, source=source,
        check_model=check_model, tokenizer=tokenizer, over=over, on_missing=on_missing,
        threshold=named_point(threshold),
    )  # fmt: skip
    wanted = f"{audit_name}-target" if audit_name else "target"

    async def scan(transcript: Transcript) -> Result:
        if transcript.source_uri:
            know_log(transcript.source_uri)
        events = list(_events(_timeline(transcript, wanted).root))
        calls = read_calls(events)
        chosen = calls[-1:] if over == "last" else calls
        turns = await read_turns(reader, chosen, events, model=model)
        return summarise(turns, combine=combine, reader=reader)

    return scan


def _timeline(transcript: Transcript, name: str) -> Timeline:
    for timeline in transcript.timelines:
        if timeline.name == name:
            return timeline
    known = ", ".join(timeline.name for timeline in transcript.timelines) or "none"
    raise SpecError(
        f"audit_name: the transcript has no timeline {name!r}, only {known}; audits of Petri have "
        "'target', or '<audit_name>-target'"
    )


def _events(span: TimelineSpan) -> Iterator[Event]:
    """Every event of a span, branches included, in order of creation."""
    for item in span.content:
        if isinstance(item, TimelineSpan):
            yield from _events(item)
        elif isinstance(item, TimelineEvent):
            yield item.event
    for branch in span.branches:
        yield from _events(branch)
