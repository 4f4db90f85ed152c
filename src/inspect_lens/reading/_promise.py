"""What a threshold promises, and what it misses: said together wherever one acts."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ._reader import ProbeReader

__all__ = ["promise", "rates"]


def rates(reader: ProbeReader, cut: float, model_name: str | None = None) -> dict[str, float]:
    """False positive rate and lowest recall of a threshold, for a log."""
    own = reader.threshold
    if own is None or own.value != cut or reader.is_other(model_name):
        return {}
    made = {"fpr": own.fpr}
    return made if reader.found is None else made | {"recall": round(reader.found.lowest, 4)}


def promise(reader: ProbeReader, cut: float, model_name: str | None = None) -> str:
    """The same in words, as one or two sentences."""
    own, card = reader.threshold, reader.probe.card
    if own is None or own.value != cut:
        return "This threshold is not the card's, so no rate is known for it."
    if reader.is_other(model_name):
        made = "another model" if card.model is None else repr(card.model.name)
        which = "this model" if model_name is None else repr(model_name)
        return f"It was set for {made}: no rate of it holds for {which}."
    found = reader.found or "Its card does not say how many positives it finds."
    return f"{own.fpr:.2%} of {own.control} samples may exceed it. {found}"
