"""Labels as data sets write them."""

from __future__ import annotations

from typing import Final

LABELS: Final = "true, false, 1 and 0, and these as texts"
_TEXTS: Final = {"true": True, "1": True, "false": False, "0": False}


def label_of(found: object) -> bool | None:
    """Whether a value says yes or no; None if it is no label.

    A CSV file has texts only, so the texts "1" and "0" count as numbers do.
    """
    if isinstance(found, str):
        return _TEXTS.get(found.strip().lower())
    return bool(found) if isinstance(found, bool | int | float) and found in (0, 1) else None
