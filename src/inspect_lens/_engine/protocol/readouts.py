"""The kinds of results that a request may have, and what is known of its probes and its lens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final, NamedTuple

from inspect_lens.errors import SpecError
from inspect_lens.spec import (
    RESID_POST,
    EngineFacts,
    EngineProbe,
    LogitLens,
    Positions,
    ProbeUse,
    ResolvedLens,
    TapPoint,
    is_mask,
    resolve_positions,
    tap_order,
    tap_points,
)

from .capture import CaptureEnvelope, Readout, span_of
from .programs import written

__all__ = [
    "LENS_KEY",
    "READOUTS",
    "AskedProbes",
    "LensEnvelope",
    "LensForm",
    "ProbesEnvelope",
    "seal_lens",
    "seal_probes",
]


@dataclass(frozen=True, kw_only=True)
class ProbesEnvelope(Readout):
    """Probes to apply to the rows of a request."""

    names: tuple[str, ...]
    """sha256 of each registered probe."""
    points: tuple[TapPoint, ...]
    """What they read together, in tap order."""
    columns: int
    """Numbers per token that come back."""
    is_live: bool = False
    """Whether scores are looked at while the request runs, so that none may wait for the next."""

    @property
    def taps(self) -> tuple[TapPoint, ...]:
        return self.points

    @property
    def shape(self) -> tuple[int, int]:
        # Each worker sends one row for all its taps.
        return len(self.points), self.columns

    @cached_property
    def alike(self) -> bytes:
        return written((self.names, self.points, self.columns, self.is_live))


@dataclass(frozen=True)
class AskedProbes:
    """What uses of registered probes come to, whatever the prompt: worked out once for a batch."""

    names: tuple[str, ...]
    """sha256 of the probe of each use."""
    taps: tuple[TapPoint, ...]
    columns: int
    positions: tuple[tuple[int, Positions], ...]
    """Different ones, each with the index of the first use that reads it."""

    @classmethod
    def of(cls, uses: Sequence[ProbeUse], registered: Mapping[str, EngineProbe]) -> AskedProbes:
        """Look the uses up."""
        if gone := sorted({use.name for use in uses} - registered.keys()):
            raise SpecError(
                f"probes: {', '.join(gone)} removed while the request was on its way; register "
                "again"
            )
        used = [registered[use.name] for use in uses]
        read = {(probe.site, probe.layers) for probe in used}
        positions: dict[tuple[type, bool, Positions], int] = {}
        for i, use in enumerate(uses):
            # True is 1 to Python.
            positions.setdefault((type(use.positions), is_mask(use.positions), use.positions), i)
        return cls(
            names=tuple(probe.sha256 for probe in used),
            taps=tuple(
                sorted(
                    {t for site, layers in read for t in tap_points((site,), layers)}, key=tap_order
                )
            ),
            columns=sum(probe.columns for probe in used),
            positions=tuple((i, asked) for (*_, asked), i in positions.items()),
        )


def seal_probes(
    asked: AskedProbes, n_prompt: int, n_max: int, *, is_live: bool = False
) -> ProbesEnvelope:
    """Resolve what probes read against a prompt."""
    # One request reads all its probes over one range; what each uses of it is its own affair.
    lo, hi = n_max, 0
    for i, positions in asked.positions:
        where = resolve_positions(
            positions, n_prompt=n_prompt, n_max=n_max, field=f"probes[{i}].positions"
        )
        if len(where):
            # A range is as long as the request may become: it is not walked.
            is_range = isinstance(where, range)
            lo = min(lo, where[0] if is_range else min(where))
            hi = max(hi, (where[-1] if is_range else max(where)) + 1)
    return ProbesEnvelope(
        lo=lo,
        hi=max(lo, hi),
        names=asked.names,
        points=asked.taps,
        columns=asked.columns,
        is_live=is_live,
    )


LENS_KEY = "lens"
"""Of a packed envelope: hash of the lens that is asked for, empty for the logit lens, None without
one. All ranks read together."""


class LensForm(NamedTuple):
    """What is made of a row; requests that want the same are read together."""

    layers: tuple[int, ...]
    """Whose streams are read, ascending."""
    top_k: int
    tokens: tuple[int, ...]
    """Ids of the chosen tokens."""
    lens: str = ""
    """Hash of the lens that translates rows first; empty where none does."""

    @property
    def columns(self) -> int:
        """Numbers of a row: ids and log-probabilities, then log-probabilities and ranks."""
        return 2 * (self.top_k + len(self.tokens))

    @property
    def taps(self) -> tuple[TapPoint, ...]:
        """Whose rows are read, in tap order."""
        return tap_points((RESID_POST,), self.layers)


@dataclass(frozen=True, kw_only=True)
class LensEnvelope(Readout):
    """Rows to read."""

    layers: tuple[int, ...]
    top_k: int
    tokens: tuple[int, ...]
    transport: str
    """How the response carries the result; the worker does not care."""
    lens: str = ""
    """Hash of the registered lens that translates rows first; empty for the logit lens."""
    kind: str = "logit"
    """Which lens it is, for the receipt."""
    name: str | None = None
    """Under which it is registered, for the receipt."""

    @property
    def form(self) -> LensForm:
        """What is made of each row."""
        return LensForm(self.layers, self.top_k, self.tokens, self.lens)

    @property
    def taps(self) -> tuple[TapPoint, ...]:
        return self.form.taps

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.layers), self.form.columns

    @cached_property
    def alike(self) -> bytes:
        return written(tuple(self.form))


READOUTS: Final[Mapping[str, type[Readout]]] = {
    "capture": CaptureEnvelope,
    "probes": ProbesEnvelope,
    "qk": CaptureEnvelope,
    "lens": LensEnvelope,
}
"""Kinds of results by name, in the order of `ROWS`, `SCORES`, `QK` and `LENS`."""


def seal_lens(
    lens: LogitLens | None, facts: EngineFacts, n_prompt: int, n_max: int
) -> LensEnvelope | None:
    """Resolve a judged lens against its prompt."""
    if lens is None:
        return None
    where = resolve_positions(
        lens.positions, n_prompt=n_prompt, n_max=n_max, field="lens.positions"
    )
    lo, hi, listed = span_of(where)
    entry = lens.entry if isinstance(lens, ResolvedLens) else None
    if entry is None and lens.name is not None:
        raise SpecError(f"lens.name: {lens.name!r} has not been looked up")
    return LensEnvelope(
        layers=tuple(range(facts.n_layers)) if lens.layers == "all" else lens.layers,
        top_k=lens.top_k,
        tokens=lens.ids,
        lo=lo,
        hi=hi,
        positions=listed,
        transport=lens.transport,
        lens="" if entry is None else entry.sha256,
        kind="logit" if entry is None else entry.kind,
        name=lens.name,
    )
