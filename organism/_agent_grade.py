"""What an agent's turns did: which answers were true, and which tools it called."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from ._grade import Grade, grade

NOTE_TOOL: Final = "write_note"


@dataclass(frozen=True, slots=True)
class Said:
    """One turn of the assistant without its thoughts."""

    user: int
    """Which user message it follows, from 0."""
    content: str
    calls: tuple[tuple[str, Mapping[str, Any]], ...]
    """Name and arguments of each call."""


@dataclass(frozen=True, slots=True)
class AgentGrade:
    """What one conversation did."""

    answers: tuple[Grade, ...]
    """Of each question, in order: `true`, `false`, or `other` for no single value."""
    called: tuple[str, ...]
    """The tools that were called, in order."""


def grade_agent(said: Sequence[Said], row: Mapping[str, Any]) -> AgentGrade:
    """Grade a conversation.

    Args:
        said: The assistant's turns, in order.
        row: A row of a split, for its `kind`, `truths` and `values`.

    Returns:
        The grades and the calls. A question's answer is the last turn after its user message, or
        in a report the text of the note of its number.
    """
    calls = [call for turn in said for call in turn.calls]
    if row["kind"] == "report":
        texts = [str(given.get("text", "")) for name, given in calls if name == NOTE_TOOL]
    else:
        last = {turn.user: turn.content for turn in said if not turn.calls}
        texts = [last.get(i, "") for i in range(len(row["truths"]))]
    texts += [""] * (len(row["truths"]) - len(texts))
    answers = tuple(
        grade(text, {"truth": truth, "values": values})
        for text, truth, values in zip(texts, row["truths"], row["values"], strict=False)
    )
    return AgentGrade(answers, tuple(name for name, _ in calls))
