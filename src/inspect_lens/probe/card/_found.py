"""What a threshold finds, to be said wherever its false positive rate is: a rate alone hides it."""

from __future__ import annotations

from typing import NamedTuple

from ._card import ProbeCard

__all__ = ["Found", "found_above"]


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
