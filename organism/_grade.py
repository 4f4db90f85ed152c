"""Which of the candidate values an answer names."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal, TypedDict

Grade = Literal["true", "false", "other"]


class Gradable(TypedDict):
    """The fields of a row that grading reads; every `Row` has them."""

    truth: str
    values: list[str]


def _named(text: str, values: Sequence[str]) -> set[str]:
    """The values that occur in a text as whole words."""
    return {v for v in values if re.search(rf"\b{re.escape(v)}\b", text, re.IGNORECASE)}


def grade(completion: str, row: Gradable) -> Grade:
    """Say whether an answer is true.

    Yes and no count only as the first word. Otherwise exactly one candidate must be named, in the
    whole answer or else in its first sentence.

    Args:
        completion: What the model wrote.
        row: A row of a split, for its `truth` and `values`.

    Returns:
        `true`, `false`, or `other` when no candidate or several are named.
    """
    if set(row["values"]) == {"yes", "no"}:
        first = re.match(r"\W*(yes|no)\b", completion, re.IGNORECASE)
        if first is None:
            return "other"
        return "true" if first.group(1).lower() == row["truth"] else "false"
    for text in (completion, re.split(r"[.!?\n]", completion.strip(), maxsplit=1)[0]):
        named = _named(text, row["values"])
        if len(named) == 1:
            return "true" if named == {row["truth"]} else "false"
    return "other"
