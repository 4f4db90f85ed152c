"""The heat map of patching: layers upwards, tokens to the right."""

from __future__ import annotations

import importlib
import io
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from inspect_lens.errors import LensError

__all__ = ["draw_cells"]


def draw_cells(
    values: NDArray[np.float64],
    *,
    layers: Sequence[int],
    labels: Sequence[str],
    name: str,
    unit: float | None,
    hidden: NDArray[np.bool_],
    title: str,
) -> bytes:
    """Draw a map with a scale that is symmetric about 0."""
    try:
        figure_class: Any = importlib.import_module("matplotlib.figure").Figure
        canvas: Any = importlib.import_module("matplotlib.backends.backend_agg").FigureCanvasAgg
    except ImportError:
        raise LensError(
            "figure: needs matplotlib; install it with: pip install 'inspect-lens[train]'"
        ) from None
    n_layers, n = values.shape
    width, height = max(4.8, 1.9 + 0.3 * n), max(2.6, 1.5 + 0.22 * n_layers)
    figure = figure_class(figsize=(width, height), dpi=130, layout="constrained")
    canvas(figure)
    axes = figure.add_subplot()
    axes.set_facecolor("#e3e8ec")
    top = unit or float(np.nanmax(np.abs(values), initial=0.0)) or 1.0
    shown = np.where(hidden, np.nan, values)
    # Orange restores, and purple does the opposite.
    drawn = axes.pcolormesh(
        np.arange(n + 1) - 0.5, np.arange(n_layers + 1) - 0.5, shown, cmap="PuOr_r",
        vmin=-top, vmax=top, edgecolors="white", linewidth=0.6,
    )  # fmt: skip
    axes.spines[["top", "right", "bottom", "left"]].set_visible(False)
    axes.tick_params(length=0)
    pieces = [label.replace("\n", "⏎").replace("$", r"\$") for label in labels]
    axes.set_xticks(range(n), pieces, rotation=60, ha="right", rotation_mode="anchor", fontsize=8.5)
    step = max(1, n_layers // 16)
    axes.set_yticks(range(0, n_layers, step), [str(at) for at in layers[::step]], fontsize=8.5)
    axes.set_ylabel("layer")
    if title:
        axes.set_title(title, fontsize=10, loc="left")
    bar = figure.colorbar(drawn, ax=axes, shrink=0.9, pad=0.02)
    bar.outline.set_visible(False)
    bar.ax.tick_params(length=0, labelsize=8)
    bar.set_label(name, fontsize=8.5)
    buffer = io.BytesIO()
    # No software name: the same data give the same bytes.
    figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()
