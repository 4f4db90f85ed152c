"""Operating points: every threshold that a card holds, chosen by the rate that it was set for."""

from __future__ import annotations

import math
import re
from typing import NamedTuple

from inspect_lens.errors import SpecError
from inspect_lens.spec import Numerics

from ._card import ProbeCard, Statistic

__all__ = ["CardPoint", "Found", "card_points", "choose_point", "found_above"]


class Found(NamedTuple):
    """Share of positives that a threshold finds on the held-out sets of a card."""

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


def found_above(
    card: ProbeCard, threshold: float, statistic: Statistic | None = None
) -> Found | None:
    """Recall of a threshold on the held-out sets that a card has it for; None without one.

    Args:
        card: of the probe.
        threshold: one that the card has: a stored one, or that of an operating point.
        statistic: that it is compared with; the card's own score of a whole answer by default.

    Example:
        ```python
        from inspect_lens.probe import found_above, load_probe

        probe = load_probe("organism/deception-lr")
        found = found_above(probe.card, probe.threshold.value)
        print(found)  # On 3 held-out sets it finds 91% to 97% of the positives.
        assert found.lowest < found.highest < 1
        ```
    """
    asked = card.answer if statistic is None else statistic
    stored = next((t.value for t in card.thresholds_for(card.answer)), None)
    recalls: dict[str, float] = {}
    for measured in card.evaluations:
        at = {r.threshold: r.recall for r in measured.rates if r.statistic == str(asked)}
        if asked == card.answer:
            at |= {point.threshold: point.recall for point in measured.recalls}
            if stored is not None and measured.recall is not None:
                at[stored] = measured.recall
        recall = at.get(threshold)
        if recall is not None:
            recalls[measured.name] = recall
    if not recalls:
        return None
    return Found(min(recalls.values()), max(recalls.values()), tuple(recalls))


_NAME = re.compile(r"fpr=([0-9.eE+-]+)")


class CardPoint(NamedTuple):
    """One threshold of a card, with its false positive rate and control set."""

    value: float
    """A score strictly above it is flagged."""
    fpr: float
    """False positive rate that it was set for."""
    control: str
    """Name of the control set."""
    statistic: Statistic
    """What it was calibrated for."""
    n_tokens: tuple[int, int] | None = None
    """Tokens of the shortest and the longest answer that it holds for; None: not known."""
    numerics: Numerics | None = None
    """What it was set with; None: not known."""

    @property
    def name(self) -> str:
        """What `threshold` takes, such as `fpr=0.01`."""
        return f"fpr={self.fpr:g}"


def card_points(card: ProbeCard, statistic: Statistic | None = None) -> tuple[CardPoint, ...]:
    """The operating points of a card for one statistic, one for each false positive rate.

    These are its stored thresholds, and for whole answers those at which its evaluations measured
    recall. A rate for which evaluations had different control sets, so that its threshold is not
    one number, is left out unless it is stored.

    Args:
        card: of a probe.
        statistic: that is to be compared; the card's own score of a whole answer by default.

    Example:
        ```python
        from inspect_lens.probe import card_points, found_above, load_probe

        card = load_probe("organism/deception-lr").card
        strict, lax = card_points(card)
        assert (strict.name, lax.name) == ("fpr=0.01", "fpr=0.05") and strict.value > lax.value
        print(found_above(card, lax.value))
        ```
    """
    own = card.answer
    asked = own if statistic is None else statistic
    set_with = {t.control: card.numerics_of(t) for t in card.thresholds}
    measured: dict[float, set[CardPoint]] = {}
    for at in (r for e in card.evaluations if asked == own for r in e.recalls):
        if math.isfinite(at.threshold):
            known = set_with.get(at.control, card.numerics_of())
            point = CardPoint(at.threshold, at.fpr, at.control, own, at.n_tokens, known)
            measured.setdefault(at.fpr, set()).add(point)
    found = {fpr: next(iter(same)) for fpr, same in measured.items() if len(same) == 1}
    for stored in reversed(card.thresholds_for(asked)):
        found[stored.fpr] = CardPoint(
            stored.value, stored.fpr, stored.control, asked, stored.n_tokens,
            card.numerics_of(stored),
        )  # fmt: skip
    return tuple(found[fpr] for fpr in sorted(found))


def choose_point(
    card: ProbeCard, threshold: str | float | None = None, statistic: Statistic | None = None
) -> CardPoint:
    """The threshold of a card that may act on a statistic.

    Every surface that flags, stops or counts asks here, so that no threshold acts on a number it
    was not calibrated for.

    Args:
        card: of a probe.
        threshold: `fpr=` and the rate, such as `fpr=0.05`; the number of one of the card's points;
            None for the first that the card stores for this statistic.
        statistic: that is compared; the card's own score of a whole answer by default.

    Raises:
        SpecError: the name is not of this form, or the card has no such point for this statistic;
            the error lists what it has.

    Example:
        ```python
        from inspect_lens.errors import SpecError
        from inspect_lens.probe import Statistic, choose_point, load_probe

        card = load_probe("organism/deception-lr").card
        lax = choose_point(card, "fpr=0.05")
        try:
            choose_point(card, statistic=Statistic(over="alarm", pool="top_k_mean:3"))
        except SpecError as error:
            print(error)  # names the thresholds that the card has
        ```
    """
    asked = card.answer if statistic is None else statistic
    points = card_points(card, asked)
    if threshold is None:
        if stored := card.thresholds_for(asked):
            return next(p for p in points if p.fpr == stored[0].fpr)
        raise _no_point(card, "threshold", asked)
    if not isinstance(threshold, str):
        for point in points:
            if point.value == threshold:
                return point
        raise _no_point(card, f"threshold={threshold:g}", asked, "the number of")
    matched = _NAME.fullmatch(threshold.replace(" ", ""))
    try:
        rate = float(matched[1]) if matched else math.nan
    except ValueError:
        rate = math.nan
    for point in points:
        if math.isclose(point.fpr, rate, rel_tol=1e-5):
            return point
    raise _no_point(card, f"threshold={threshold!r}", asked)


def _no_point(card: ProbeCard, what: str, asked: Statistic, how: str = "") -> SpecError:
    """What was asked, what the card has, and how to make the one that is missing."""
    has = _listed(card, card_points(card, asked))
    said = f"{has} for {asked}" if has else f"no threshold for {asked}"
    others = sorted({str(t.statistic or card.answer) for t in card.thresholds} - {str(asked)})
    if others:
        said += f"; it has one for {' and one for '.join(others)}, which cannot stand in"
    own = asked.over == "token" or asked == Statistic(over=asked.over, pool=card.pool)
    over = asked.over if own else f"{asked.over}:{asked.pool}"
    do = f"pass {how} one that it has" if how else "name one that it has, pass a number of your own"
    return SpecError(
        f"{what}: probe {card.name!r} has {said}; {do}, or calibrate it (inspect-lens probe "
        f"calibrate --for {over} --fpr RATE)"
    )


def _listed(card: ProbeCard, points: tuple[CardPoint, ...]) -> str:
    said = []
    for point in points:
        found = found_above(card, point.value, point.statistic)
        recall = f" (recall {found.lowest:.0%} or more)" if found else ""
        said.append(f"{point.name!r}{recall}")
    return ", ".join(said)
