"""`python -m benchmarks.plots`: the figure of docs/benchmarks.md, from the committed results.

An SVG is text, so that a test reads its numbers and compares them with the results.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from xml.sax.saxutils import escape

__all__ = ["RESULTS", "TIMES", "Row", "Section", "draw", "figure_files", "main", "sections"]

RESULTS: Final = Path(__file__).with_name("results")
ASSETS: Final = Path(__file__).parents[1] / "docs/assets"

TIMES: Final = "\N{MULTIPLICATION SIGN}"
_COST: Final = (
    "cost-h200-1", "cost-h200-2", "cost-h200-5-sites", "cost-h200-6-families",
)  # fmt: skip
_FAMILIES: Final = ("cost-h200-6-families",)
_OTHERS: Final = ("others-h200-slow-host", "others-h200-fast-host", "others-h200-1000-requests")
_LOADS: Final = {"8x256": "8 requests", "256x128": "256 requests", "512x128": "512 requests"}
_ARMS: Final = {
    "idle": "idle", "capture-1": "capture, one layer", "capture-all": "capture, all layers",
    "probes-16x4": f"16 probes {TIMES} 4 layers", "steer": "steering",
}  # fmt: skip
_EVALS: Final = {
    "256 connections": "256 connections", "32 connections": "32 connections",
    "agent of 20 turns": "agents, 20 turns",
}  # fmt: skip
_EVAL_ARMS: Final = {
    "capture-scored": "capture and score", "mean-scored": "capture the mean, score",
    "probe-scored": "probe in the engine",
    "peer": "vllm-lens 1.3.0, no scorer",
}  # fmt: skip

Read = Callable[[str], dict[str, Any]]


@dataclass(frozen=True)
class Row:
    """One comparison; each ratio is of a run of its own."""

    label: str
    ratios: tuple[float, ...]

    @property
    def middle(self) -> float:
        """The median over the runs."""
        return statistics.median(self.ratios)

    @property
    def text(self) -> str:
        """The median, and the least and the largest where there are several runs."""
        digits = 3 if max(self.ratios) < 2 else 1
        said = f"{self.middle:.{digits}f}"
        if len(self.ratios) > 1:
            said += f" ({min(self.ratios):.{digits}f} to {max(self.ratios):.{digits}f})"
        return said


@dataclass(frozen=True)
class Section:
    """Rows with one baseline."""

    title: str
    rows: tuple[Row, ...]


def read_result(name: str) -> dict[str, Any]:
    """A committed result, by its name without the suffix."""
    made: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return made


def sections(read: Read = read_result) -> tuple[Section, ...]:
    """What the figure shows.

    Args:
        read: gives a result by its name.
    """
    cost = [
        Row(f"{requests}: {said}", _ratios(read, _COST, load, arm))
        for load, requests in _LOADS.items()
        for arm, said in _ARMS.items()
    ]
    served = [
        Row(f"{requests}: {_ARMS[arm]}", _ratios(read, ("http-h200",), load, arm))
        for load, requests in (
            ("256x128", "256 requests"), ("512x128", "512 requests"), ("alpaca", "mixed lengths"),
        )
        for arm in ("capture-1", "probes-16x4")
    ]  # fmt: skip
    peers = [
        Row(f"vllm-lens 1.3.0, {n} requests", _ratios(read, _OTHERS, load, "vllm-lens"))
        for load, n in (("8x256", 8), ("256x128", 256), ("1000x128", 1000))
    ]
    for arm, said in (("eager", "vLLM, eager mode"), ("hf", "transformers with a hook")):
        ratios = _ratios(read, ("others-h200-eager-hf",), "8x256", arm)
        peers.append(Row(f"{said}, 8 requests", ratios))
    sweep = read("cpu")["steering_sweep"]["median_seconds"]
    loses = [
        *(Row(f"{said}, 512 requests", _ratios(read, _FAMILIES, "512x128", arm))
          for arm, said in (("programs-256", "256 edit programs at once"),
                            ("qk-1", "queries and keys, one layer"),
                            ("router-1", "router logits, one layer"),
                            ("logit-lens", "logit lens, 4 layers"))),
        Row("sweep of a 4M model on a CPU, over hooks", (sweep["engine"] / sweep["hooks"],)),
    ]  # fmt: skip
    return (
        Section("Offline engine, over vLLM without the lens", tuple(cost)),
        Section("Whole Inspect eval, over Inspect's vllm provider", tuple(_eval_rows(read))),
        Section("HTTP server, over vLLM's server without the lens", tuple(served)),
        Section("Other tools, over vLLM without the lens", tuple(peers)),
        Section("Where it loses", tuple(loses)),
    )


def _ratios(read: Read, names: Sequence[str], load: str, arm: str) -> tuple[float, ...]:
    found = [
        run["ratio_to_default"]
        for name in names
        for run in read(name)["runs"]
        if run["load"] == load and run["arm"] == arm and run["ratio_to_default"] is not None
    ]
    return tuple(found)


def _eval_rows(read: Read) -> Iterator[Row]:
    runs = read("eval")["runs"]
    seconds = {(run["load"], run["arm"], run["round"]): run["seconds"] for run in runs}
    for load, said in _EVALS.items():
        for arm, what in _EVAL_ARMS.items():
            ratios = [
                value / seconds[load, "plain", n]
                for (at, which, n), value in seconds.items()
                if (at, which) == (load, arm)
            ]
            if ratios:
                yield Row(f"{said}: {what}", tuple(ratios))


_PALETTES: Final = {
    "light": {"text": "#1f2430", "faint": "#5b6472", "line": "#c9ced6", "dot": "#1f5fa8",
              "other": "#a8480b", "back": "#ffffff"},
    "dark": {"text": "#e6e9ef", "faint": "#a9b1bd", "line": "#4a505c", "dot": "#7db4f5",
             "other": "#f0a35e", "back": "#1b1d23"},
}  # fmt: skip
_WIDTH, _ROW, _HEAD, _LEFT, _RIGHT = 820, 18, 30, 292, 632
_LOW, _HIGH = 0.8, 10.0


def draw(shown: Sequence[Section], palette: str) -> str:
    """One axis for all sections, as SVG.

    Args:
        shown: what `sections` gives.
        palette: `light` or `dark`.
    """
    colour = _PALETTES[palette]
    height = 44 + sum(_HEAD + _ROW * len(section.rows) for section in shown)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img" '
        'font-family="system-ui, sans-serif" font-size="12">',
        "<title>Wall time with the lens over wall time without it</title>",
        f'<rect width="{_WIDTH}" height="{height}" fill="{colour["back"]}"/>',
    ]
    for tick in (1.0, 1.5, 2.0, 3.0, 5.0, 10.0):
        x = _x(tick)
        lines.append(
            f'<line x1="{x}" x2="{x}" y1="26" y2="{height - 8}" stroke="{colour["line"]}" '
            f'stroke-width="{2 if tick == 1 else 1}"/>'
        )
        lines.append(_text(x, 18, f"{tick:g}{TIMES}", colour["faint"], "middle"))
    y = 26
    for section in shown:
        y += _HEAD
        other = section.title.startswith("Other")
        lines.append(_text(8, y - 8, section.title, colour["text"], "start", bold=True))
        for row in section.rows:
            lines += _row(row, y + 4, colour, colour["other" if other else "dot"])
            y += _ROW
    return "\n".join([*lines, "</svg>", ""])


def _row(row: Row, y: int, colour: dict[str, str], dot: str) -> Iterator[str]:
    yield _text(20, y + 4, row.label, colour["text"], "start")
    low, high = _x(min(row.ratios)), _x(max(row.ratios))
    yield f'<line x1="{low}" x2="{high}" y1="{y}" y2="{y}" stroke="{dot}" stroke-width="3"/>'
    yield f'<circle cx="{_x(row.middle)}" cy="{y}" r="4.5" fill="{dot}"/>'
    yield _text(_RIGHT + 14, y + 4, row.text, colour["text"], "start")


def _x(ratio: float) -> float:
    share = math.log(ratio / _LOW) / math.log(_HIGH / _LOW)
    return round(_LEFT + share * (_RIGHT - _LEFT), 1)


def _text(x: float, y: float, said: str, fill: str, anchor: str, *, bold: bool = False) -> str:
    weight = ' font-weight="600"' if bold else ""
    return (
        f'<text x="{x}" y="{y}" fill="{fill}" text-anchor="{anchor}"{weight}>{escape(said)}</text>'
    )


def figure_files() -> dict[str, str]:
    """Content of each file of the figure, by its name."""
    shown = sections()
    return {f"benchmarks-{name}.svg": draw(shown, name) for name in _PALETTES}


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the figure."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plots", description=__doc__)
    parser.add_argument("--out", type=Path, default=ASSETS, help="folder for the SVG files")
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    for name, content in figure_files().items():
        (options.out / name).write_text(content, encoding="utf-8")
        sys.stdout.write(f"{options.out / name}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
