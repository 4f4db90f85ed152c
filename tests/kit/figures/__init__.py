"""Figures of the documentation, drawn from committed results: `python -m tests.kit.generated`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from . import _others, _probe
from ._canvas import PALETTES

__all__ = ["FIGURES", "figure_files"]

FIGURES: Final[dict[str, Callable[[str], str]]] = {
    "baselines": _probe.baselines,
    "conformance": _others.conformance,
    "layers": _probe.layers,
    "lens": _others.lens,
    "oracle": _others.oracle,
    "positions": _others.positions,
    "reliability": _probe.reliability,
    "roc": _probe.roc,
    "scores": _probe.histogram,
    "steering": _others.steering,
    "transfer": _probe.transfer,
}
"""What draws each figure, by its name."""


def figure_files() -> dict[str, str]:
    """Content of each figure in each palette, by path from the root."""
    return {
        f"docs/assets/{name}-{palette}.svg": draw(palette)
        for name, draw in FIGURES.items()
        for palette in PALETTES
    }
