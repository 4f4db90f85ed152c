"""Figures of the documentation, drawn from committed results: `python -m tests.kit.generated`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from . import _explained, _others, _probe, _turns
from ._canvas import PALETTES

__all__ = ["FIGURES", "figure_files"]

FIGURES: Final[dict[str, Callable[[str], str]]] = {
    "baselines": _probe.baselines,
    "conformance": _others.conformance,
    "found": _explained.found,
    "layers": _probe.layers,
    "lens": _others.lens,
    "oracle": _others.oracle,
    "places": _explained.places,
    "positions": _others.positions,
    "reliability": _probe.reliability,
    "roc": _probe.roc,
    "scores": _probe.histogram,
    "sets": _explained.sets,
    "sites": _explained.sites,
    "steering": _others.steering,
    "transfer": _probe.transfer,
    "turns": _turns.turns,
}
"""What draws each figure, by its name."""


def figure_files() -> dict[str, str]:
    """Content of each figure in each palette, by path from the root."""
    return {
        f"docs/assets/{name}-{palette}.svg": draw(palette)
        for name, draw in FIGURES.items()
        for palette in PALETTES
    }
