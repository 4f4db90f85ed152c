"""Operating points: every threshold that a card holds, chosen by the rate that it was set for."""

from __future__ import annotations

import math
import re
from typing import NamedTuple

from inspect_lens.errors import SpecError

from ._card import ProbeCard
from ._found import found_above

__all__ = ["CardPoint", "card_points", "choose_point"]

_NAME = re.compile(r"fpr=([0-9.eE+-]+)")


class CardPoint(NamedTuple):
    """One threshold of a card, with its false positive rate and control set.

    Example:
        ```python
        from inspect_lens.probe import card_points, load_probe

        strict, lax = card_points(load_probe("organism/deception-lr").card)
        assert (strict.name, lax.name) == ("fpr=0.01", "fpr=0.05")
        assert strict.value > lax.value
        ```
    """

    value: float
    """A score strictly above it is flagged."""
    fpr: float
    """False positive rate that it was set for."""
    control: str
    """Name of the control set."""

    @property
    def name(self) -> str:
        """What `threshold` takes, such as `fpr=0.01`."""
        return f"fpr={self.fpr:g}"


def card_points(card: ProbeCard) -> tuple[CardPoint, ...]:
    """The operating points of a card, one for each false positive rate.

    These are its stored thresholds, and those at which its evaluations measured recall. A rate
    for which evaluations had different control sets, so that its threshold is not one number, is
    left out unless it is stored.

    Args:
        card: of a probe.

    Returns:
        The points, the strictest first.

    Example:
        ```python
        from inspect_lens.probe import card_points, found_above, load_probe

        card = load_probe("organism/deception-lr").card
        for point in card_points(card):
            print(point.name, point.value, found_above(card, point.value))
        ```
    """
    measured: dict[float, set[CardPoint]] = {}
    for evaluation in card.evaluations:
        for at in evaluation.recalls:
            if math.isfinite(at.threshold):
                point = CardPoint(at.threshold, at.fpr, at.control)
                measured.setdefault(at.fpr, set()).add(point)
    found = {fpr: next(iter(same)) for fpr, same in measured.items() if len(same) == 1}
    for stored in reversed(card.thresholds):
        found[stored.fpr] = CardPoint(stored.value, stored.fpr, stored.control)
    return tuple(found[fpr] for fpr in sorted(found))


def choose_point(card: ProbeCard, name: str) -> CardPoint:
    """The operating point of a card that has this name.

    Args:
        card: of a probe.
        name: `fpr=` and the rate, such as `fpr=0.05`.

    Returns:
        The point.

    Raises:
        SpecError: the name is not of this form, or the card has no such point; the error lists
            those that it has, with the recall of each.

    Example:
        ```python
        from inspect_lens.probe import choose_point, load_probe

        lax = choose_point(load_probe("organism/deception-lr").card, "fpr=0.05")
        assert round(lax.value, 3) == 1.137
        ```
    """
    points = card_points(card)
    matched = _NAME.fullmatch(name.replace(" ", ""))
    try:
        rate = float(matched[1]) if matched else math.nan
    except ValueError:
        rate = math.nan
    for point in points:
        if math.isclose(point.fpr, rate, rel_tol=1e-5):
            return point
    raise SpecError(
        f"threshold={name!r}; probe {card.name!r} has {_listed(card, points)}; name one of these, "
        "pass a number, or calibrate the probe at that rate (inspect-lens probe calibrate --fpr)"
    )


def _listed(card: ProbeCard, points: tuple[CardPoint, ...]) -> str:
    said = []
    for point in points:
        found = found_above(card, point.value)
        recall = f" (recall {found.lowest:.0%} or more)" if found else ""
        said.append(f"{point.name!r}{recall}")
    return ", ".join(said) or "no threshold"
