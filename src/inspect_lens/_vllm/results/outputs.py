"""What stands of ours on vLLM's outputs and their choices, and how it outlives their merging."""

from __future__ import annotations

from typing import Any

__all__ = [
    "attached",
    "choices_of",
    "has_fields",
    "has_tickets",
    "keep_scores",
    "keep_tickets",
    "ticket_keys",
]


_FIELDS = ("inspect_lens_ticket", "inspect_lens_scores", "inspect_lens_json")


def keep_tickets(outputs: list[Any], later: list[Any]) -> None:
    """Give the tickets of an output's choices to those that they were merged into."""
    tickets = {c.index: c.inspect_lens_ticket for c in later if hasattr(c, "inspect_lens_ticket")}
    for completion in outputs:
        if completion.index in tickets:
            completion.inspect_lens_ticket = tickets[completion.index]


def has_fields(output: Any) -> bool:
    """Whether anything of ours stands on an output's choices."""
    return any(
        any(hasattr(completion, name) for name in _FIELDS) for completion in choices_of(output)
    )


def keep_scores(outputs: list[Any], later: Any, earlier: dict[str, list[float]]) -> None:
    """Give token scores of two outputs to the choice that they were merged into, or the later one.

    vLLM adds up what has come of a text, or lets the whole of it take the place of less.
    """
    scores: dict[str, list[float]] = getattr(later, "inspect_lens_scores", {})
    for completion in outputs:
        if completion.index == later.index and (scores or earlier):
            both = {name: earlier.get(name, []) + scores.get(name, []) for name in earlier | scores}
            completion.inspect_lens_scores = both


def attached(output: Any) -> int:
    """Choices of an output that have a receipt."""
    return sum(hasattr(completion, "inspect_lens") for completion in output.outputs)


def has_tickets(output: Any) -> bool:
    """Whether an output holds finished choices that used the lens."""
    return any(
        hasattr(completion, "inspect_lens_ticket") and not hasattr(completion, "inspect_lens")
        for completion in choices_of(output)
    )


def ticket_keys(output: Any) -> list[str]:
    """Finished choices of an output that used the lens."""
    tickets = (getattr(c, "inspect_lens_ticket", None) for c in choices_of(output))
    return [ticket.key for ticket in tickets if ticket is not None]


def choices_of(output: Any) -> list[Any]:
    """Choices of generated text; engines that pool have outputs that are none."""
    outputs = getattr(output, "outputs", None)
    return outputs if isinstance(outputs, list) else []
