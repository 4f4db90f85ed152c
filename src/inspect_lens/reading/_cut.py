"""Which threshold acts: a number, an operating point of the card by name, or the card's own."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from inspect_lens.errors import SpecError
from inspect_lens.probe import AnyProbe, CardPoint, Threshold, card_points, choose_point

if TYPE_CHECKING:
    from ._reader import ProbeReader

__all__ = ["Cut", "acting_point", "cut_of"]

Cut: TypeAlias = float | str | None
"""A number; an operating point of the probe's card such as `fpr=0.05`; None for the card's own."""


def acting_point(
    probe: AnyProbe, threshold: Cut, *, as_calibrated: bool
) -> Threshold | CardPoint | None:
    """What the card knows of the threshold that is to act."""
    if isinstance(threshold, str):
        if not as_calibrated:
            raise SpecError(
                f"threshold={threshold!r}: the operating points of {probe.name!r} hold for the "
                "card's own layer, positions, pool and selection alone; leave these out, or pass "
                "a number"
            )
        return choose_point(probe.card, threshold)
    if not as_calibrated:
        return None
    own = probe.threshold
    if threshold is None or (own is not None and threshold == own.value):
        return own
    return next((p for p in card_points(probe.card) if p.value == threshold), own)


def cut_of(reader: ProbeReader, threshold: Cut) -> float:
    """The number above which something acts."""
    if threshold is not None and not isinstance(threshold, str):
        return float(threshold)
    if reader.threshold is None:
        raise SpecError(
            f"threshold: probe {reader.probe.name!r} has none for these settings; pass a number"
        )
    return reader.threshold.value
