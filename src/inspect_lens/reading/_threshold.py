"""Which threshold acts: a number of the user's, or a point of the card for what is compared."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from inspect_lens.errors import SpecError
from inspect_lens.probe import AnyProbe, CardPoint, Statistic, card_points, choose_point

if TYPE_CHECKING:
    from ._reader import ProbeReader

__all__ = ["ThresholdLike", "acting_point", "acting_value"]

ThresholdLike: TypeAlias = float | str | None
"""A number; an operating point of the probe's card such as `fpr=0.05`; None for the card's own."""


def acting_point(
    probe: AnyProbe, threshold: ThresholdLike, statistic: Statistic, *, same_tokens: bool
) -> CardPoint | None:
    """What the card knows of the threshold that is to act on a statistic."""
    if isinstance(threshold, str):
        if not same_tokens:
            raise SpecError(
                f"threshold={threshold!r}: the operating points of {probe.name!r} hold for the "
                "card's own layer, positions and selection alone; leave these out, or pass a "
                "number"
            )
        return choose_point(probe.card, threshold, statistic)
    if not same_tokens:
        return None
    points = card_points(probe.card, statistic)
    same = next((p for p in points if p.value == threshold), None)
    if same is None and probe.card.thresholds_for(statistic):
        return choose_point(probe.card, None, statistic)
    return same


def acting_value(
    reader: ProbeReader, threshold: ThresholdLike, statistic: Statistic | None = None
) -> float:
    """The number above which something acts."""
    if threshold is not None and not isinstance(threshold, str):
        return float(threshold)
    asked = statistic or reader.statistic
    point = reader.point_for(asked, threshold)
    if point is not None:
        return point.value
    if reader.same_tokens:
        choose_point(reader.probe.card, None, asked)  # says what the card has instead
    raise SpecError(
        f"threshold: probe {reader.probe.name!r} has none for these settings; its own hold for the "
        "card's layer, positions and selection; pass a number"
    )
