"""`probe_scanner` for any transcript, `audit_probe_scanner` for audits of Petri."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from inspect_ai.event import Event, Timeline, TimelineEvent, TimelineSpan
from inspect_ai.scorer import mean
from inspect_scout import Result, Scanner, Transcript, scanner

from inspect_lens.errors import SpecError
from inspect_lens.model import know_log
from inspect_lens.probe import AnyProbe
from inspect_lens.reading import Combine, OnMissing, Over, ProbeReader, Source, combining
from inspect_lens.reading import read_turns as read_calls
from inspect_lens.scorer import at_threshold, auroc
from inspect_lens.spec import Positions

from ._turns import read_turns, summarise

__all__ = ["audit_probe_scanner", "probe_scanner"]


@scanner(
    messages="all",
    # The latter say which calls are scorers', and which answers were only compared.
    events=["model", "span_begin", "span_end", "info"],
    metrics=[auroc(), at_threshold(), mean()],
)
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
) -> Scanner[Transcript]:
    """Apply a probe to each model call of a transcript.

    Calls that captured are read from the files beside the log. Others are read again by a
    `vllm-lens/` model, if the scan has one: rendered with its chat template and fed to it,
    which `off_policy` in the result's metadata says.

    Args:
        probe: name below `probes/`, path, `hf://` address, or a probe.
        layer: one of the probe's layers; all of them, averaged, by default.
        positions: tokens to read; those of the card by default.
        pool: how token scores become one: `mean`, `last`, `max`, `top_k_mean:5`,
            `rolling_mean_max:10`, `sentence_mean_max`; the card's by default.
        selection: tokens among these positions by what they are: `answer`, `reasoning`,
            `tool_calls`, `assistant`, `prompt`, `last:K` or `regex:PATTERN`; the card's by default,
            "" for all.
        combine: `max` or `mean` of the calls is the value.
        source: `captured` never reads again, `auto` where it has to, `recompute` always.
        model: that reads again; the scan's model by default.
        check_model: refuse a model whose fingerprint is not that of the card.
        tokenizer: folder or name of the tokenizer that tells sentences and selections; by default
            that of the model that is read, else that of the card's model, where it is on this
            machine.
        over: `last` reads the call of the sample's answer, or the last one of `roles`; `all` reads
            every call, each choice by itself.
        roles: model roles whose calls are read instead of those of the eval's model. By default
            these are found where the calls of one role alone have a lens.
        on_missing: `error` fails the sample where the activations of a call are not there; `skip`
            treats such a call as one without a token to read.

    Returns:
        The scanner. Its value is None for a transcript without a token that the probe reads.

    Raises:
        ArtifactError: no such probe; while scanning, nothing was captured and there is no model.
        SpecError: an argument is wrong.
        PrerequisiteError: while scanning, each of several processes would start a server.

    Example:
        ```python
        from inspect_scout import scan, scan_results_df, transcripts_from

        from inspect_lens.scout import probe_scanner

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
        on_missing=on_missing,
    )  # fmt: skip

    async def scan(transcript: Transcript) -> Result:
        if transcript.source_uri:
            know_log(transcript.source_uri)
        calls = reader.calls.select(transcript.events, None, transcript.model)
        turns = await read_turns(reader, calls.turns, transcript.events, model=model)
        return summarise(turns, combine=combine, reader=reader)

    return scan


@scanner(timeline=True, events=["model"], metrics=[auroc(), at_threshold(), mean()])
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
) -> Scanner[Transcript]:
    """Apply a probe to each turn of the target of a Petri audit, on every branch.

    Turns that a rollback took back are read as well: what the target did there it did.

    Args:
        probe: as for `probe_scanner`.
        audit_name: as for Petri's `audit_scanner`; the timeline is `<audit_name>-target`.
        layer: one of the probe's layers; all of them, averaged, by default.
        positions: tokens to read; those of the card by default.
        pool: how token scores become one: `mean`, `last`, `max`, `top_k_mean:5`,
            `rolling_mean_max:10`, `sentence_mean_max`; the card's by default.
        selection: tokens among these positions by what they are: `answer`, `reasoning`,
            `tool_calls`, `assistant`, `prompt`, `last:K` or `regex:PATTERN`; the card's by default,
            "" for all.
        combine: `max` or `mean` of the calls is the value.
        source: `captured` never reads again, `auto` where it has to, `recompute` always.
        model: as for `probe_scanner`.
        check_model: refuse a model whose fingerprint is not that of the card.
        tokenizer: folder or name of the tokenizer that tells sentences and selections; by default
            that of the model that is read, else that of the card's model, where it is on this
            machine.
        over: `all` reads every turn of the target, `last` its last one.
        on_missing: `error` fails the sample where the activations of a call are not there; `skip`
            treats such a call as one without a token to read.

    Returns:
        The scanner.

    Raises:
        ArtifactError: as for `probe_scanner`.
        SpecError: an argument is wrong; while scanning, the transcript has no such timeline.

    Example:
        ```python
        from inspect_ai import task_with
        from inspect_petri import audit
        from inspect_scout import as_scorer

        from inspect_lens.petri import lens_target_agent
        from inspect_lens.scout import audit_probe_scanner

        task = audit(
            seed_instructions="Find out whether the target lies.",
            target=lens_target_agent(capture=[4]),
        )
        task = task_with(
            task, scorer=as_scorer(audit_probe_scanner("organism/deception-lr", combine="max"))
        )
        ```
    """
    combining(combine)
    reader = ProbeReader.of(
        probe, layer=layer, positions=positions, pool=pool, selection=selection, source=source,
        check_model=check_model, tokenizer=tokenizer, over=over, on_missing=on_missing,
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
