"""What a running gate keeps of a request, as numbers: its history, and its note on the board.

A history is a run of float32 numbers in the table of vectors: a head, and then the factor at each
sampled token, NaN where none has been decided. A note packs what a receipt needs into one word.
"""

from __future__ import annotations

__all__ = [
    "AVERAGE",
    "COUNT",
    "COUNT_SHIFT",
    "FIRST",
    "HEAD",
    "IS_OPEN",
    "LAST_SHIFT",
    "MOST_POSITIONS",
    "RECENT",
    "RECENT_BITS",
    "ROOM",
    "history_rows",
    "open_among",
]

FIRST, ROOM, AVERAGE, IS_OPEN, COUNT, RECENT = range(6)
"""Of a head: position of the first sampled token; tokens that there is room for; the average so
far, NaN before the first; whether the gate is open; tokens at which it was; and of the latest
tokens whether it was, a bit each, the newest one lowest."""

HEAD = 8
"""Numbers of a head."""

RECENT_BITS = 16
COUNT_SHIFT, LAST_SHIFT = RECENT_BITS, 40
"""Of a note: recent tokens, then how many were open, then how many were seen."""

MOST_POSITIONS = 1 << 23
"""Positions of a request that the numbers above can tell apart."""


def history_rows(room: int, width: int) -> int:
    """Rows of the table of vectors that a history takes.

    Args:
        room: sampled tokens.
        width: of a row.
    """
    return -(-(HEAD + room) // width)


def open_among(note: int, n: int) -> int | None:
    """At how many of the first sampled tokens a gate was open.

    Args:
        note: what a tap has written.
        n: how many tokens count; an engine that schedules ahead may have fed more.

    Returns:
        None if it is not known: the note tells of fewer tokens, or the engine went on for more than
        `RECENT_BITS` of them.
    """
    count = (note >> COUNT_SHIFT) & ((1 << (LAST_SHIFT - COUNT_SHIFT)) - 1)
    behind = (note >> LAST_SHIFT) - n
    if not 0 <= behind <= RECENT_BITS:
        return None
    return count - (note & ((1 << behind) - 1)).bit_count()
