"""Operating points: every threshold that a card holds, chosen by the rate that it was set for."""

from __future__ import annotations

import math
import re
from typing import NamedTuple

from inspect_lens.errors import SpecError

from ._card import ProbeCard

__all__ = [
    "CardPoint",
    "Found",
    "card_points",
    "choose_point",
    "found_above",
]


class Found(NamedTuple):
    """Share of positives that a threshold finds on the held-out sets of a card.

    Example:
        ```python
        from inspect_lens.probe import Found

        assert "finds 40% of the positives" in str(Found(0.4, 0.4, ("insider",)))
        ```
    """

    lowest: float
    """On the set on which it finds least."""
    highest: float
    sets: tuple[str, ...]
    """Names of the held-out sets."""

    def __str__(self) -> str:
        low, high = (f"{value:.0%}" for value in (self.lowest, self.highest))
        if len(self.sets) == 1:
            return f"On {self.sets[0]} it finds {low} of the positives."
        span = low if low == high else f"{low} to {high}"
        return f"On {len(self.sets)} held-out sets it finds {span} of the positives."


def found_above(card: ProbeCard, threshold: float) -> Found | None:
    """Find the recall of a threshold on the held-out sets of a probe's card.

    Args:
        card: of the probe.
        threshold: one that the card has: a stored one, or that of an operating point.

    Returns:
        Recall on the sets that were measured at this threshold; None where none was.

    Example:
        ```python
        from inspect_lens.probe import found_above, load_probe

        probe = load_probe("organism/deception-lr")
        found = found_above(probe.card, probe.threshold.value)
        print(found)  # On 3 held-out sets it finds 91% to 97% of the positives.
        assert found.lowest < found.highest < 1
        ```
    """
    stored = card.thresholds[0].value if card.thresholds else None
    recalls: dict[str, float] = {}
    for measured in card.evaluations:
        at = {point.threshold: point.recall for point in measured.recalls}
        recall = measured.recall if threshold == stored else at.get(threshold)
        if recall is not None:
            recalls[measured.name] = recall
    if not recalls:
        return None
    return Found(min(recalls.values()), max(recalls.values()), tuple(recalls))


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
