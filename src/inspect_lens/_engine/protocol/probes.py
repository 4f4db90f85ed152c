"""What a worker and a front-end have to know of the probes of one request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from inspect_lens.errors import SpecError
from inspect_lens.spec import (
    DType,
    EngineProbe,
    Positions,
    ProbeUse,
    TapPoint,
    is_mask,
    resolve_positions,
    tap_order,
    tap_points,
)

from .interning import written

__all__ = ["AskedProbes", "ProbesEnvelope", "seal_probes"]


@dataclass(frozen=True)
class ProbesEnvelope:
    """Probes to apply to the rows of a request."""

    names: tuple[str, ...]
    """sha256 of each registered probe."""
    taps: tuple[TapPoint, ...]
    """What they read together, in tap order."""
    columns: int
    """Numbers per token that come back."""
    lo: int
    hi: int
    """Positions that any of them reads lie in [lo, hi)."""
    is_live: bool = False
    """Whether scores are looked at while the request runs, so that none may wait for the next."""

    @property
    def shape(self) -> tuple[int, int]:
        """Taps and width of the result's rows; each worker sends one row for all its taps."""
        return len(self.taps), self.columns

    wire: DType = "float32"
    positions: tuple[int, ...] | None = None

    @cached_property
    def alike(self) -> bytes:
        """What the requests of a batch have in common."""
        return written((self.names, self.taps, self.columns, self.is_live))

    def pack(self) -> tuple[Any, ...]:
        """As msgpack-able data."""
        return self.names, self.taps, self.columns, self.lo, self.hi, self.is_live

    @classmethod
    def unpack(cls, values: Sequence[Any]) -> ProbesEnvelope:
        """Read what `pack` made, with tuples in the place of lists."""
        names, taps, *others = values
        return cls(names, tuple(TapPoint(site, n) for site, n in taps), *others)


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
        """Look the uses up.

        Raises:
            SpecError: a probe is not registered any more.
        """
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
    """Resolve what probes read against a prompt.

    Args:
        asked: the uses.
        n_prompt: prompt tokens.
        n_max: tokens that are fed at most.
        is_live: see `ProbesEnvelope`.

    Raises:
        SpecError: a position lies outside the request.
    """
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
    return ProbesEnvelope(asked.names, asked.taps, asked.columns, lo, max(lo, hi), is_live)
