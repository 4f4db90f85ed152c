"""What a threshold promises, and what it misses: said together wherever one acts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from inspect_lens.probe import CardPoint, Statistic, found_above

if TYPE_CHECKING:
    from ._reader import ProbeReader

__all__ = ["promise", "rates"]


def rates(
    reader: ProbeReader,
    cut: float,
    model_name: str | None = None,
    n_tokens: int | None = None,
    statistic: Statistic | None = None,
) -> dict[str, float]:
    """False positive rate and lowest recall of a threshold, for a log."""
    own = _own(reader, cut, statistic)
    if own is None or reader.is_other(model_name) or _is_outside(own, n_tokens):
        return {}
    made = {"fpr": own.fpr}
    found = found_above(reader.probe.card, cut)
    return made if found is None else made | {"recall": round(found.lowest, 4)}


def _own(reader: ProbeReader, cut: float, statistic: Statistic | None) -> CardPoint | None:
    """The card's point for a statistic, where it is the threshold that acts."""
    own = reader.point_for(statistic or reader.statistic, cut)
    return own if own is not None and own.value == cut else None


def _is_outside(own: CardPoint, n_tokens: int | None) -> bool:
    return n_tokens is not None and not own.statistic.covers(n_tokens, own.n_tokens)


def promise(
    reader: ProbeReader,
    cut: float,
    model_name: str | None = None,
    n_tokens: int | None = None,
    statistic: Statistic | None = None,
) -> str:
    """The same in words, as one or two sentences."""
    own, card = _own(reader, cut, statistic), reader.probe.card
    if own is None:
        return "This threshold is not the card's, so no rate is known for it."
    if reader.is_other(model_name):
        made = "another model" if card.model is None else repr(card.model.name)
        which = "this model" if model_name is None else repr(model_name)
        return f"It was set for {made}: no rate of it holds for {which}."
    if _is_outside(own, n_tokens) and own.n_tokens:
        low, high = own.n_tokens
        span = f"up to {high}" if own.statistic.over == "alarm" else f"{low} to {high}"
        return (
            f"It was set for answers of {span} tokens, and this one has {n_tokens}, so no rate is "
            "known for it."
        )
    found = found_above(card, cut) or "Its card does not say how many positives it finds."
    return f"{own.fpr:.2%} of {own.control} samples may exceed it. {found}"
