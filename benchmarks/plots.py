"""`python -m benchmarks.plots FILES`: the figures of docs/benchmarks.md from committed results."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .arms import ARMS

__all__ = ["draw_ratios", "draw_steps", "main", "ratio_rows", "together"]

REFERENCE, PEER, OURS = "#555555", "#c2571a", "#1f5fa8"
COLOURS = {"default": REFERENCE, "eager": REFERENCE, "vllm-lens": PEER, "hf": PEER}


def ratio_rows(runs: list[dict[str, Any]], load: str) -> list[tuple[str, list[float]]]:
    """(arm, each repetition's seconds over the default arm's median), in the order of the arms."""
    found = {run["arm"]: run["seconds"] for run in runs if run["load"] == load}
    if "default" not in found:
        return []
    unit = statistics.median(found["default"])
    return [(arm, [s / unit for s in found[arm]]) for arm in ARMS if arm in found]


def together(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Several runs as one, in which seconds are those over the median default of the same file."""
    ratios: dict[tuple[str, str, str], list[float]] = {}
    for result in results:
        for model, load in dict.fromkeys((run["model"], run["load"]) for run in result["runs"]):
            rows = ratio_rows([run for run in result["runs"] if run["model"] == model], load)
            for arm, found in rows:
                ratios.setdefault((model, load, arm), []).extend(found)
    return {
        "runs": [
            {"model": model, "load": load, "arm": arm, "seconds": found}
            for (model, load, arm), found in ratios.items()
        ]
    }


def _panel(axis: Any, rows: list[tuple[str, list[float]]], title: str) -> None:
    for y, (arm, ratios) in enumerate(rows):
        colour = COLOURS.get(arm, OURS)
        middle = statistics.median(ratios)
        axis.hlines(y, min(1.0, middle), max(1.0, middle), color=colour, lw=2, alpha=0.35)
        axis.plot(ratios, [y] * len(ratios), "o", ms=4, color=colour, alpha=0.45, mec="none")
        axis.plot([middle], [y], "|", ms=14, mew=2, color=colour)
        # Beside the rightmost dot, so that no number lies on one.
        axis.annotate(
            f"{middle:.3f}" if middle < 1.995 else f"{middle:.1f}",
            (max(ratios), y), xytext=(7, 0), textcoords="offset points", va="center",
            fontsize=8, color=colour,
        )  # fmt: skip
    axis.axvline(1.0, color="#999999", lw=0.8, zorder=0)
    axis.set_xscale("log")
    high = max(max(r) for _, r in rows)
    low = min(min(r) for _, r in rows)
    is_close = high < 1.3
    left, right = min(0.95, low * 0.95), max(1.1, high * (1.1 if is_close else 1.45))
    wanted: tuple[float, ...]
    wanted = (0.5, 1, 2, 5, 10, 20, 50) if high > 3 else (0.5, 0.75, 1, 1.1, 1.25, 1.5, 2, 3)
    if is_close:
        wanted = (0.9, 0.95, 1, 1.02, 1.05, 1.1, 1.2)
    ticks = [t for t in wanted if left <= t <= right]
    axis.set_xticks(ticks, [f"{t:g}" for t in ticks])
    axis.minorticks_off()
    axis.set_xlim(left, right)
    axis.set_yticks(range(len(rows)), [arm for arm, _ in rows], fontsize=9)
    axis.set_ylim(len(rows) - 0.4, -0.6)
    axis.set_title(title, loc="left", fontsize=10)
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)
    axis.tick_params(axis="y", length=0)


def draw_ratios(result: dict[str, Any], model: str, path: Path) -> None:
    """Wall time against default vLLM, a panel for each load; dots are repetitions."""
    runs = [run for run in result["runs"] if run["model"] == model]
    loads = [load for load in dict.fromkeys(r["load"] for r in runs) if ratio_rows(runs, load)]
    tallest = max(len(ratio_rows(runs, load)) for load in loads)
    figure, axes = _figure(len(loads), 0.9 + 0.3 * tallest)
    for axis, load in zip(axes, loads, strict=True):
        _panel(axis, ratio_rows(runs, load), f"load {load}")
    axes[-1].set_xlabel("wall time over that of default vLLM, log scale; tick: median", fontsize=9)
    _save(figure, path)


def draw_steps(result: dict[str, Any], model: str, path: Path) -> None:
    """Median time of a decode step against default vLLM, by number of sequences."""
    steps = [row for row in result.get("steps", []) if row["model"] == model]
    default = {row["sequences"]: row["ms_median"] for row in steps if row["arm"] == "default"}
    sizes = [n for n in sorted(default)]
    figure, axes = _figure(len(sizes), 3.2)
    for axis, n in zip(axes, sizes, strict=True):
        found = {row["arm"]: row["ms_median"] for row in steps if row["sequences"] == n}
        rows = [(arm, [found[arm] / default[n]]) for arm in ARMS if arm in found]
        _panel(axis, rows, f"{n} sequences, {default[n]:.2f} ms by default")
    axes[-1].set_xlabel("GPU time of a decode step over default vLLM, log scale", fontsize=9)
    _save(figure, path)


def _figure(n: int, height: float) -> tuple[Any, list[Any]]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, height * n), dpi=150, layout="constrained")
    axes = figure.subplots(n, 1, squeeze=False)
    return figure, [row[0] for row in axes]


def _save(figure: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    # Without a date inside, so that drawing again changes no file.
    figure.savefig(path, metadata={"Software": None})


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw every model of a result."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plots", description=__doc__)
    parser.add_argument("results", nargs="+", help="JSON files of benchmarks/results")
    parser.add_argument("--out", default="docs/assets", help="folder for the PNG files")
    options = parser.parse_args(arguments)
    results = [json.loads(Path(file).read_text(encoding="utf-8")) for file in options.results]
    result = results[0] if len(results) == 1 else together(results)
    out = Path(options.out)
    for model in dict.fromkeys(run["model"] for run in result["runs"]):
        drawn = [out / f"benchmark-ratios-{model}.png"]
        draw_ratios(result, model, drawn[0])
        if any(r["model"] == model and r["arm"] == "default" for r in result.get("steps", [])):
            drawn.append(out / f"benchmark-steps-{model}.png")
            draw_steps(result, model, drawn[1])
        sys.stdout.write("".join(f"{path}\n" for path in drawn))
    return 0


if __name__ == "__main__":
    sys.exit(main())
