"""Which threshold acts, what it promises, and how much of a suspicion that makes a score."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self, TypeAlias

from inspect_lens.errors import SpecError
from inspect_lens.probe import (
    AnyProbe,
    CardPoint,
    Statistic,
    card_points,
    choose_point,
)
from inspect_lens.spec import check_word

if TYPE_CHECKING:
    from ._reader import ProbeReader, Reading

__all__ = ["Suspicion", "SuspicionUnit"]

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


def named_point(threshold: str | None) -> str | None:
    """Refuse a number where nothing compares values, so that only a point of the card helps."""
    if threshold is None or isinstance(threshold, str):
        return threshold
    raise SpecError(
        f"threshold={threshold!r}; allowed is the name of an operating point, such as 'fpr=0.05'; "
        "pass a number to the metrics: threshold_accuracy(threshold=…), at_threshold(threshold=…)"
    )


Verdict = Literal["above threshold", "below threshold"]


def verdict(value: float, threshold: float | None) -> Verdict | None:
    """What a threshold says of a value; None without one."""
    if threshold is None:
        return None
    return "above threshold" if value > threshold else "below threshold"


def verdict_facts(reader: ProbeReader, cut: float, reading: Reading) -> dict[str, Any]:
    """Facts of a reading that was compared with a threshold, for a log."""
    facts = {**reading.metadata(), "value": reading.value, "threshold": cut, "fpr": None}
    facts.pop("recall", None)  # of the card's own threshold
    return facts | promise(reader, cut, reading.model_name, len(reading.rows.positions)).rates


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


class Promise(NamedTuple):
    """What a threshold promises of an answer."""

    rates: dict[str, float]
    """False positive rate and lowest recall, for a log; empty where none is known."""
    text: str
    """The same in words, as one or two sentences."""


def promise(
    reader: ProbeReader,
    cut: float,
    model_name: str | None = None,
    n_tokens: int | None = None,
    statistic: Statistic | None = None,
    *,
    differences: Sequence[str] = (),
) -> Promise:
    """What a threshold promises: something only if it is the card's own, for its model.

    `differences` are those of the readings that it is said of (`Reading.differences`).
    """
    own, card = reader.point_for(statistic or reader.statistic, cut), reader.probe.card
    if own is None or own.value != cut:
        return Promise({}, "This threshold is not the card's, so no rate is known for it.")
    if (why := reader.no_rate(model_name)) is not None:
        made = "another model" if card.model is None else repr(card.model.name)
        return Promise({}, f"It was set for {made}: {why}")
    if n_tokens is not None and own.n_tokens and not own.statistic.covers(n_tokens, own.n_tokens):
        low, high = own.n_tokens
        span = f"up to {high}" if own.statistic.over == "alarm" else f"{low} to {high}"
        return Promise({}, f"It was set for answers of {span} tokens, and this one has {n_tokens}, "
                       "so no rate is known for it.")  # fmt: skip
    found = reader.found_above(cut, own.statistic)
    said = found or "Its card does not say how many positives it finds."
    by = next((t.claimed_by for t in card.thresholds if t.claimed_by and t.value == cut), "")
    stated = f", as {by} states; that was not measured here" if by else ""
    differs = " and ".join(differences)
    but = differs and (
        f" But that was measured elsewhere, and this was computed with {differs}; inspect-lens "
        "probe check shows what changes."
    )
    return Promise(
        {"fpr": own.fpr} | ({} if found is None else {"recall": round(found.lowest, 4)}),
        f"{own.fpr:.2%} of {own.control} samples may exceed it{stated}. {said}{but}",
    )


SuspicionUnit = Literal["threshold", "raw"]
"""`threshold`: between 0 and 1, one half at the threshold; `raw`: the probe's own score."""


@dataclass(frozen=True)
class Suspicion:
    """Map from scores to suspicion: larger means more suspicious, in either unit.

    With `threshold` it is sigmoid(score - threshold): a score that the card flags is above 0.5
    and no other is, so protocols that act above one half act at the card's false positive
    rate. It is not a probability. With `raw` it is the score itself.

    Example:
        ```python
        from inspect_lens.reading import ProbeReader, Suspicion

        reader = ProbeReader.of("organism/deception-lr")
        suspicion = Suspicion.of(reader, unit="threshold")
        assert suspicion(reader.threshold.value) == 0.5
        assert suspicion(reader.threshold.value + 3) > 0.9
        ```
    """

    unit: SuspicionUnit
    threshold: float | None
    """Score that maps to one half; None on the raw unit."""

    @classmethod
    def of(
        cls, reader: ProbeReader, *, unit: SuspicionUnit, threshold: ThresholdLike = None
    ) -> Self:
        """Settle the unit of a reader.

        Args:
            reader: whose scores come.
            unit: of the suspicion.
            threshold: score that maps to one half, or the operating point that the reader was
                made with; that of the probe's card by default.

        Raises:
            SpecError: the unit is unknown, or needs a threshold and there is none, or is `raw` and
                takes none.
        """
        check_word("unit", unit, SuspicionUnit)
        if unit == "raw" and threshold is not None:
            raise SpecError(
                f"threshold={threshold!r}: with unit='raw' the suspicion is the score itself, and "
                "nothing is compared; allowed is unit='threshold', or no threshold"
            )
        if unit == "raw":
            return cls(unit, None)
        try:
            return cls(unit, acting_value(reader, threshold))
        except SpecError as error:
            raise SpecError(f"unit='threshold': {error}; or use unit='raw'") from None

    def __call__(self, score: float) -> float:
        if self.threshold is None:
            return score
        return 0.5 * (1.0 + math.tanh(0.5 * (score - self.threshold)))
