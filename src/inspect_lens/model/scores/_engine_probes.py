"""Probes that calls ask the engine to run: their names at a server, and what they are."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

from inspect_ai.log import transcript

from inspect_lens.errors import SpecError, UnsupportedError
from inspect_lens.probe import AnyProbe, load_probe
from inspect_lens.spec import (
    CaptureSpec,
    EngineProbe,
    Positions,
    ProbeUse,
    Site,
    in_site_order,
    parse_positions,
)

__all__ = [
    "KNOWN",
    "NOTHING",
    "Asked",
    "Known",
    "ProbeLike",
    "Role",
    "ask_probes",
    "including",
    "note_refused",
    "widened",
]

ProbeLike = str | Path | AnyProbe

Role = Literal["tokens", "text"]
"""Whether the numbers are scores of tokens, or each that of the text up to its token."""


class Known(NamedTuple):
    """A probe that this process may register."""

    probe: str
    """Name of its card."""
    probe_sha256: str
    """Of its file."""
    role: Role
    engine: EngineProbe
    """The engine's form; aggregate and threshold play no part."""


KNOWN: dict[str, Known] = {}
"""By the name at a server, which is made of the content: whoever asks for a probe, in this eval or
in another, finds what is registered already."""


class Asked(NamedTuple):
    """What probes ask of every call."""

    uses: tuple[ProbeUse, ...] = ()
    capture: CaptureSpec | None = None
    """What is captured for probes that no engine runs."""
    refused: tuple[tuple[str, str], ...] = ()
    """These probes, by name, and why."""


NOTHING = Asked()


def ask_probes(
    probes: ProbeLike | Sequence[ProbeLike] | None, positions: Positions | list[int] | None = None
) -> Asked:
    """Say in a request what runs probes in the engine."""
    if probes is None:
        return NOTHING
    if isinstance(probes, str):
        probes = [part.strip() for part in probes.split(",")]
    listed = list(probes) if isinstance(probes, Sequence) else [probes]
    if not listed or "" in listed:
        raise SpecError(
            f"probes={probes!r}; allowed is at least one name or path; leave it out for none"
        )
    asked = NOTHING
    for probe in listed:
        loaded = load_probe(probe)
        read = loaded.positions if positions is None else parse_positions(
            positions, field="positions"
        )  # fmt: skip
        # Scores are wanted as they come; which token is the last one is known at the end.
        read = "completion" if read == "last" else read
        try:
            uses = [ProbeUse(name=n, positions=read, tokens=True) for n in _register(loaded)]
        except UnsupportedError as error:
            capture = widened(asked.capture, loaded.layers, loaded.site, read)
            refused = (*asked.refused, (loaded.name, str(error)))
            asked = asked._replace(capture=capture, refused=refused)
            continue
        new = tuple(use for use in uses if use.name not in {u.name for u in asked.uses})
        asked = asked._replace(uses=(*asked.uses, *new))
    return asked


def note_refused(asked: Asked) -> None:
    """Say in the transcript which probes no engine runs, and what happens instead."""
    for name, reason in asked.refused:
        note: dict[str, Any] = {
            "probe": name,
            "not in the engine": reason,
            "instead": "rows are captured",
        }
        transcript().info(note, source="inspect_lens")


def _register(probe: AnyProbe) -> list[str]:
    """Note the forms of a probe; their names."""
    tokens, text = probe.engine_forms()
    forms: list[tuple[Role, EngineProbe | None]] = [("tokens", tokens), ("text", text)]
    names = []
    for role, form in forms:
        if form is not None:
            # What a card says of pool and threshold is for readers, and no other probe.
            bare = form.model_copy(
                update={
                    "aggregate": "mean", "threshold": None, "threshold_tokens": None,
                    "threshold_positions": None,
                }
            )  # fmt: skip
            name = f"probe-{form.sha256[:24]}"
            KNOWN.setdefault(name, Known(probe.name, probe.sha256, role, bare))
            names.append(name)
    return names


def including(capture: CaptureSpec | None, other: CaptureSpec) -> CaptureSpec:
    """A capture with what another one keeps of the stream, too."""
    if capture is None or other.layers == "all":
        return other if capture is None else capture
    for site in other.sites:
        capture = widened(capture, other.layers, site, other.positions)
    return capture


def widened(
    capture: CaptureSpec | None, layers: tuple[int, ...], site: Site, positions: Positions
) -> CaptureSpec:
    """A capture with what a probe reads, too."""
    if capture is None:
        return CaptureSpec(layers=layers, site=site, positions=positions)
    if capture.reduce != "none":
        return capture
    return _widened(capture, layers, site, positions)


@lru_cache(maxsize=64)
def _widened(
    capture: CaptureSpec, layers: tuple[int, ...], site: Site, positions: Positions
) -> CaptureSpec:
    wanted: dict[str, Any] = {}
    if capture.layers != "all":
        wanted["layers"] = tuple(sorted({*capture.layers, *layers}))
    if site not in capture.sites:
        wanted["site"] = in_site_order((*capture.sites, site))
    if capture.positions != positions:
        wanted["positions"] = "all"
    if capture.phase != "both":
        wanted["phase"] = "both"
    return capture.model_copy(update=wanted) if wanted else capture
