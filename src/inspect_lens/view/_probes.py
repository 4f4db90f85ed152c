"""Which probes a page shows: those that were asked for, else those that scored the log."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from inspect_ai.log import EvalLog, EvalSample

from inspect_lens.errors import ArtifactError, SpecError
from inspect_lens.model.stored._places import may_follow
from inspect_lens.probe import AnyProbe, check_model, load_probe

__all__ = ["choose_probes"]


def choose_probes(
    asked: Sequence[str | Path | AnyProbe],
    header: EvalLog,
    first: EvalSample | None,
    *,
    any_model: bool,
    have_kept: bool = False,
) -> tuple[list[AnyProbe], list[str]]:
    """Load the probes of a page.

    Args:
        asked: by the user.
        header: of the log, whose scorers' options name probes.
        first: sample of the log, whose scores' metadata name probes.
        any_model: accept probes of another model.
        have_kept: scorers kept token scores, so that a page can do without any probe.

    Returns:
        The probes, and notes for the page.

    Raises:
        SpecError: none was asked for and the log names none.
        ArtifactError: one is not found, or belongs to another model.
    """
    model = header.eval.model.partition("/")[2].partition(":")[0]
    notes: list[str] = []
    probes: list[AnyProbe] = []
    if asked:
        probes = [load_probe(name) for name in asked]
    else:
        scored_with = dict(_of_scores(first))
        for name in dict.fromkeys([*_of_options(header), *scored_with]):
            if name in {p.name for p in probes}:
                continue  # of the card of one that was named by its path
            path = Path(name)
            if ("://" in name or path.is_absolute() or ".." in path.parts) and not may_follow(name):
                notes.append(
                    f"The log was scored with {name!r}, which was not fetched: a log may name any "
                    f"place. Pass --probe {name}, or allow it with --follow {name}."
                )
                continue
            try:
                probe = load_probe(name)
            except ArtifactError as error:
                notes.append(f"The log was scored with {name!r}, which is not here: {error}")
                continue
            wanted = scored_with.get(probe.name)
            if wanted and wanted != probe.sha256:
                notes.append(
                    f"The log was scored with another version of {probe.name} "
                    f"({wanted[:12]}…, here is {probe.sha256[:12]}…)."
                )
            if probe.sha256 not in {p.sha256 for p in probes}:
                probes.append(probe)
    if not probes and not have_kept:
        raise SpecError(
            "probe: none was given, and the log names none that is here; allowed are a name below "
            f"probes/, a folder or an hf:// address; pass --probe. {' '.join(notes)}".strip()
        )
    for probe in probes:
        if not any_model:
            check_model(probe, model)
        elif probe.card.model and probe.card.model.name != model:
            notes.append(f"{probe.name} was trained on {probe.card.model.name}, not on {model}.")
    return probes, notes


def _of_options(header: EvalLog) -> Iterator[str]:
    for scorer in header.eval.scorers or []:
        yield from _names((scorer.options or {}).get("probe"))
        yield from _names((scorer.options or {}).get("probes"))


def _names(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from (v for v in value.values() if isinstance(v, str))
    elif isinstance(value, Sequence):
        yield from (v for v in value if isinstance(v, str))


def _of_scores(sample: EvalSample | None) -> Iterator[tuple[str, str]]:
    for score in ((sample.scores if sample else None) or {}).values():
        facts = score.metadata or {}
        # A dict score has the facts of each part under its key.
        for part in (facts, *(v for v in facts.values() if isinstance(v, Mapping))):
            if isinstance(part.get("probe"), str):
                yield part["probe"], str(part.get("probe_sha256") or "")
