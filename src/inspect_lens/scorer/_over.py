"""From the readings of a sample's calls to its one value: the largest, and which turn has it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from inspect_lens.reading import CallReading, Calls, LatentCall

AnyCall = CallReading | LatentCall
OneCall = TypeVar("OneCall", CallReading, LatentCall)

__all__ = ["calls_read", "largest", "say_turn"]


def largest(read: Sequence[OneCall]) -> OneCall:
    """The call with the largest value; the first of several."""
    return max(read, key=lambda one: one.reading.value)


def calls_read(over: str, calls: Calls, read: Sequence[AnyCall], top: AnyCall) -> dict[str, Any]:
    """Small facts of which calls were read, for a score's metadata.

    A card's false positive rate is that of one completion. Over several, as many times the rate
    may be false positives, which `fpr_bound` says (Boole's inequality).

    Args:
        over: which calls count.
        calls: that were found.
        read: those with a token to read.
        top: the one with the value.

    Returns:
        The facts.
    """
    facts: dict[str, Any] = {"turn": top.turn.number}
    if calls.ended_by is not None:
        facts["ended_by"] = calls.ended_by
    if over == "last":
        return facts
    rate = top.reading.rate
    return facts | {
        "over": over,
        "choice": top.turn.choice,
        "message_id": top.turn.message_id,
        "n_turns": calls.n_turns,
        "n_turns_read": len({one.turn.number for one in read}),
        "turn_values": [one.reading.value for one in read],
        "fpr_bound": None if rate is None else min(1.0, rate * len(read)),
    }


def say_turn(calls: Calls, read: Sequence[AnyCall], top: AnyCall) -> str:
    """A sentence that says which call the value is of, where that is not plain; with a space."""
    text = ""
    if len(read) > 1:
        choice = f", choice {top.turn.choice}" if top.turn.choice else ""
        text = (
            f" It is the largest of {len(read)} answers, in turn {top.turn.number}{choice} "
            "(counted from 0)."
        )
        if top.reading.rate is not None:
            bound = min(1.0, top.reading.rate * len(read))
            text += f" The rate holds for one answer; for this many it is at most {bound:.2%}."
    if calls.ended_by is not None:
        text += f" The sample was ended by {calls.ended_by}; its last call was read."
    return text
