"""Whether a steered answer fell apart: an empty one, or one that says the same again and again."""

from __future__ import annotations

import re
from typing import Final

__all__ = ["is_broken"]

_LOOP: Final = re.compile(r"(.{1,40}?)\1{4,}", re.DOTALL)
_LETTERS: Final = 10
"""Shortest run that counts: three dots and a row of zeros are no loop."""


def is_broken(text: str) -> bool:
    """Whether a text is blank, or at least half of it repeats one piece five times or more.

    It finds what too large a scale does to most models. A grammatical answer that makes no sense
    passes: for that ask a judge, with `coherence`.

    Args:
        text: of an answer.

    Returns:
        True where it fell apart.
    """
    answer = text.strip()
    if not answer:
        return True
    runs = [len(found[0]) for found in _LOOP.finditer(answer)]
    return any(run >= max(_LETTERS, len(answer) / 2) for run in runs)
