"""Arguments that take a text or several."""

from __future__ import annotations

from collections.abc import Iterable


def one_or_several(given: str | Iterable[str]) -> tuple[str, ...]:
    """The texts that were given: one alone is a text, and not a sequence of letters."""
    return (given,) if isinstance(given, str) else tuple(given)
