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
    """What the card knows of the threshold that is to act.

    Args:
        probe: whose card is asked.
        threshold: as a user gave it.
        as_calibrated: whether layer, positions, pool and selection are the card's own.

    Returns:
        The point that was named, or that has this number; else the card's first threshold. None
        where the settings are not those of the card.

    Raises:
        SpecError: the card has no such point, or none that holds for these settings.
    """
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
    """The number above which something acts.

    Args:
        reader: that was made with this threshold.
        threshold: as a user gave it.

    Returns:
        The number itself, or that of the reader's operating point.

    Raises:
        SpecError: there is none for these settings.
    """
    if threshold is not None and not isinstance(threshold, str):
        return float(threshold)
    if reader.threshold is None:
        raise SpecError(
            f"threshold: probe {reader.probe.name!r} has none for these settings; pass a number"
        )
    return reader.threshold.value
