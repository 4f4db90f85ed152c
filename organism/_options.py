"""Numbers on command lines, as a `type` of argparse: what means nothing is refused in one line."""

from __future__ import annotations

import argparse

__all__ = ["positive", "share"]


def positive(text: str) -> int:
    """A count of which at least one is needed."""
    if (n := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text}; at least 1 is needed")
    return n


def share(text: str) -> float:
    """A part of a whole."""
    if not 0.0 <= (part := float(text)) <= 1.0:
        raise argparse.ArgumentTypeError(f"{text}; allowed is 0 to 1, such as 0.5 for one half")
    return part
