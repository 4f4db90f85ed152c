"""`python -m benchmarks.plots`: figures and tables of costs, from the committed results.

All come from `sections`, and each section names what its ratios are divided by.
`python -m tests.kit.generated` puts the tables into README and the pages.
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

__all__ = [
    "RESULTS", "TIMES", "Row", "Section", "Use", "costs_markdown", "draw", "evals_markdown",
    "figure_files", "in_short", "large_models_markdown", "main", "peers_markdown", "sections",
    "techniques_markdown", "walk_markdown",
]  # fmt: skip

RESULTS: Final = Path(__file__).with_name("results")
ASSETS: Final = Path(__file__).parents[1] / "docs/assets"

TIMES: Final = "\N{MULTIPLICATION SIGN}"
_ENGINE: Final = "engine-h200"
_EDITS: Final = "edits-h200"
_HTTP: Final = "http-h200"
_LARGE: Final = "large-h200"
_MODELS: Final = {
    "llama-8b": "Llama-8B", "llama-70b-48": "Llama-70B", "glm-4.5-air-23": "GLM-4.5-Air",
    "gpt-oss-120b-24": "gpt-oss-120b",
}  # fmt: skip
_OTHERS: Final = ("others-h200-slow-host", "others-h200-fast-host", "others-h200-1000-requests")
_PEER_EVAL: Final = "others-h200-eval"
_LOADS: Final = {"8x256": "8 requests", "256x128": "256 requests", "512x128": "512 requests"}
_ARMS: Final = {
    "idle": "idle", "capture-1": "capture, one layer", "capture-all": "capture, all layers",
    "probes-16x4": f"16 probes {TIMES} 4 layers", "steer": "steering",
}  # fmt: skip
_HTTP_ARMS: Final = {
    "capture-1": "capture, one layer, on the same host",
    "capture-1-tcp": "the same, from another host", "probes-16x4": _ARMS["probes-16x4"],
}  # fmt: skip
_EVALS: Final = {
    "256 connections": "256 connections", "32 connections": "32 connections",
    "agent of 20 turns": "agents, 20 turns",
}  # fmt: skip
_EVAL_ARMS: Final = {
    "idle": "nothing asked", "capture": "capture", "capture-scored": "capture and score",
    "probe-scored": "probe in the engine",
}  # fmt: skip
_INCLUDES: Final = {
    "plain-scored": "Inspect's provider with `includes()`", "idle-scored": "ours with `includes()`",
}  # fmt: skip
_START: Final = "start"
"""What labels of starts end with."""
_ASKS: Final = "vLLM 0.30"
"""What vllm-lens 1.3.0 asks for; its rows say on what it ran."""
_TECHNIQUES: Final = {
    "program": "ablate, clamp and add",
    "programs-256": "the same three, in 256 different programs",
    "ablate-all": "ablate a direction at all 32 layers",
    "gate": "add a vector where a probe fires",
    "swap": "swap two directions",
    "rotate": "rotate a plane",
    "latent": "set a latent of a sparse autoencoder",
    "low-rank": "a low-rank edit of 8 directions",
    "replace": "mix in a stored row",
    "renormalise": "add a vector and give the norm back",
    "qk-1": "queries and keys",
    "logit-lens": "logit lens of 4 layers, top 5",
}

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
    def marks(self) -> tuple[float, ...]:
        """Where the picture has a dot."""
        return (self.middle,)

    @property
    def text(self) -> str:
        """The median, and the least and the largest where there are several runs."""
        digits = 3 if max(self.ratios) < 2 else 1
        said = f"{self.middle:.{digits}f}"
        if len(self.ratios) > 1:
            said += f" ({min(self.ratios):.{digits}f} to {max(self.ratios):.{digits}f})"
        return said


@dataclass(frozen=True)
class Use:
    """All rows of one use, with one line in the picture and in the table."""

    label: str
    rows: tuple[Row, ...]
    in_readme: bool

    @property
    def ratios(self) -> tuple[float, ...]:
        """Those of all rows."""
        return tuple(ratio for row in self.rows for ratio in row.ratios)

    @property
    def marks(self) -> tuple[float, ...]:
        """The median of each row."""
        return tuple(row.middle for row in self.rows)

    @property
    def typical(self) -> str:
        """The least and the largest of the medians."""
        return _from_to(self.marks, digits=2)

    @property
    def text(self) -> str:
        """The medians, and the worst run."""
        return f"{self.typical}, worst {max(self.ratios):.2f}"


@dataclass(frozen=True)
class Section:
    """Rows with one denominator."""

    what: str
    over: str
    """What the ratios are divided by."""
    rows: tuple[Row, ...] | tuple[Use, ...]

    @property
    def title(self) -> str:
        """What was measured, over what."""
        return f"{self.what}, over {self.over}"


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
        Row(f"{requests}: {said}", _spread(read, _ENGINE, load, arm))
        for load, requests in _LOADS.items()
        for arm, said in _ARMS.items()
    ]
    cost += [Row(f"{said}: {_START}", (ratio,)) for said, ratio in _starts(read)]
    served = [
        Row(f"256 requests: {said}", _spread(read, _HTTP, "256x128", arm))
        for arm, said in _HTTP_ARMS.items()
    ]  # fmt: skip
    peers = [
        Row(f"{_peer(read, _OTHERS)}, {n} requests", _ratios(read, _OTHERS, load, "vllm-lens"))
        for load, n in (("8x256", 8), ("256x128", 256), ("1000x128", 1000))
    ]
    for arm, said in (("eager", "vLLM, eager mode"), ("hf", "transformers with a hook")):
        ratios = _ratios(read, ("others-h200-eager-hf",), "8x256", arm)
        peers.append(Row(f"{said}, 8 requests", ratios))
    loses = [
        Row(f"512 requests: {said}", _spread(read, _file_of(arm), "512x128", arm))
        for arm, said in (
            ("programs-256", "256 edit programs"), ("qk-1", "queries and keys"),
            ("router-1", "router logits"), ("logit-lens", "logit lens, 4 layers"),
        )
    ]  # fmt: skip
    sweep = read("cpu")["steering_sweep"]["median_seconds"]
    of_evals = [
        Row(f"{said}: {what}", _eval_ratios(read, load, arm, "plain"))
        for load, said in _EVALS.items()
        for arm, what in _EVAL_ARMS.items()
    ]
    of_evals.append(
        Row(f"256: {_peer(read, (_PEER_EVAL,))}, capture",
            _eval_ratios(read, "256 connections", "peer", "plain", _PEER_EVAL))
    )  # fmt: skip
    over_idle = [
        Row(f"{said}: {what}", _eval_ratios(read, load, arm, "idle"))
        for load, said in _EVALS.items()
        for arm, what in _EVAL_ARMS.items()
        if arm != "idle"
    ]
    plain, whole = "vLLM without the lens", "Whole Inspect eval"
    return (
        Section("Offline engine", plain, tuple(cost)),
        Section(whole, "Inspect's vllm provider without the lens", tuple(of_evals)),
        Section(whole, "our provider with the lens idle", tuple(over_idle)),
        Section("HTTP server", "vLLM's server without the lens", tuple(served)),
        Section(f"Other tools (vllm-lens asks for {_ASKS})", plain, tuple(peers)),
        Section("Dearest edits and readouts", plain, tuple(loses)),
        Section(
            "Steering sweep of a small model on a CPU", "hooks in transformers",
            (Row("2000 generations", (sweep["engine"] / sweep["hooks"],)),),
        ),
    )  # fmt: skip


def _peer(read: Read, names: Sequence[str]) -> str:
    environments = [read(name)["environment"] for name in names]
    (on,) = {(e.get("versions") or e)["vllm"].removesuffix(".0") for e in environments}
    return f"vllm-lens 1.3.0 on vLLM {on}"


def _starts(read: Read) -> Iterator[tuple[str, float]]:
    """Seconds until an engine is ready with the lens over those without, started side by side."""
    for name in (_ENGINE, _HTTP, _LARGE):
        engines = read(name)["engines"]
        for model in dict.fromkeys(key.partition("/")[0] for key in engines):
            took = [engines[f"{model}/{kind}"]["cold_start_seconds"] for kind in ("lens", "plain")]
            served = ", server" if name == _HTTP else ""
            yield f"{_MODELS[model]}{served}", took[0] / took[1]


def _ratios(read: Read, names: Sequence[str], load: str, arm: str) -> tuple[float, ...]:
    found = [
        run["ratio_to_default"]
        for name in names
        for run in read(name)["runs"]
        if run["load"] == load and run["arm"] == arm and run["ratio_to_default"] is not None
    ]
    return tuple(found)


def _file_of(arm: str) -> str:
    """The file that measured an edit or a readout."""
    return _ENGINE if arm == "logit-lens" else _EDITS


def _spread(read: Read, name: str, load: str, arm: str, model: str = "") -> tuple[float, ...]:
    """Each run of an arm over the median of `default` of the same file, as in evals."""
    runs = [r for r in read(name)["runs"] if r["load"] == load and model in ("", r["model"])]
    (found,) = [run for run in runs if run["arm"] == arm]
    (plain,) = [r for r in runs if (r["arm"], r["model"]) == ("default", found["model"])]
    divisor = statistics.median(plain["seconds"])
    return tuple(value / divisor for value in found["seconds"])


def _eval_ratios(
    read: Read, load: str, arm: str, over: str, name: str = "eval"
) -> tuple[float, ...]:
    """Each run of an arm over the median of another, so that the median is that of the file."""
    seconds: dict[str, list[float]] = {}
    for run in read(name)["runs"]:
        if run["load"] == load:
            seconds.setdefault(run["arm"], []).append(run["seconds"])
    divisor = statistics.median(seconds[over])
    return tuple(value / divisor for value in seconds[arm])


def in_short(read: Read = read_result) -> tuple[Section, ...]:
    """One line for each use.

    Args:
        read: gives a result by its name.
    """
    engine, inspect, idle, http, *_ = sections(read)
    evals = (
        ("run an eval with capture and a scorer", ("capture-scored",), True),
        ("run an eval with the probe in the engine", ("probe-scored",), False),
    )
    uses = (
        (engine, _ARMS, (
            ("start an engine or a server", (_START,), False),
            ("install the lens and ask for nothing", ("idle",), False),
            ("capture one layer, steer or run 16 probes, offline",
             ("capture-1", "steer", "probes-16x4"), True),
            ("capture all 32 layers, offline", ("capture-all",), True),
        )),
        (http, _HTTP_ARMS, (
            ("capture one layer over HTTP, on the same host", ("capture-1",), True),
            ("capture one layer over HTTP, from another host", ("capture-1-tcp",), False),
        )),
        (inspect, _EVAL_ARMS, evals),
        (idle, _EVAL_ARMS, evals),
    )  # fmt: skip

    def chosen(section: Section, endings: tuple[str, ...]) -> tuple[Row, ...]:
        rows = (row for row in section.rows if isinstance(row, Row))
        return tuple(row for row in rows if row.label.endswith(endings))

    return tuple(
        Section(section.what, section.over, tuple(
            Use(label, chosen(section, tuple(f": {arms.get(a, a)}" for a in asked)), in_readme)
            for label, asked, in_readme in lines
        ))
        for section, arms, lines in uses
    )  # fmt: skip


def costs_markdown(*, short: bool = False) -> str:
    """The table of what each use costs, and over what.

    Args:
        short: only the rows that README shows.
    """
    lines = ["| what you do | divided by | typical | worst run |", "|---|---|---|---|"]
    for section in in_short():
        for use in section.rows:
            if isinstance(use, Use) and (use.in_readme or not short):
                worst = f"{max(use.ratios):.2f}"
                lines.append(f"| {use.label} | {section.over} | {use.typical} | {worst} |")
    return "\n".join(lines)


def peers_markdown(read: Read = read_result) -> str:
    """The table of other tools that capture one layer, and of this package in the same files.

    Args:
        read: gives a result by its name.
    """
    (peers,) = (section for section in sections(read) if section.what.startswith("Other tools"))
    lines = [f"| capture one layer with | time over {peers.over} |", "|---|---|"]
    for row in peers.rows:
        lines.append(f"| {row.label} | {_from_to(row.ratios, digits=1)} |")
    for load, said in {**_LOADS, "1000x128": "1000 requests"}.items():
        ratios = _ratios(read, _OTHERS, load, "capture-1")
        if ratios:
            spread = _from_to(ratios, digits=2)
            lines.append(f"| this package, in the same files, {said} | {spread} |")
    return "\n".join(lines)


def _from_to(ratios: Sequence[float], *, digits: int) -> str:
    low, high = (f"{f(ratios):.{digits}f}" for f in (min, max))
    return low if low == high else f"{low} to {high}"


_STEPS: Final = {
    "doctor": "check with `doctor`",
    "server": "start the server, without the download of weights",
    "collect_train_400": "collect 400 answers to train on",
    "collect_control_500": "collect 500 harmless answers",
    "collect_heldout_200": "collect 200 held-out answers",
    "train": "train the probe on three layers",
    "eval_200_samples": "score an eval of 200 samples",
    "view": "write the page of all tokens",
}


def walk_markdown(read: Read = read_result) -> str:
    """The table of seconds that each step of the page on a first real model took.

    Args:
        read: gives a result by its name.
    """
    seconds = read("eval")["walk"]["seconds"]
    lines = ["| step | seconds |", "|---|---|"]
    lines += [f"| {said} | {seconds[step]} |" for step, said in _STEPS.items()]
    return "\n".join([*lines, f"| in all | {sum(seconds[step] for step in _STEPS)} |"])


def evals_markdown(read: Read = read_result) -> str:
    """The table of whole evals, once over each denominator.

    Args:
        read: gives a result by its name.
    """
    summary = read("eval")["summary"]
    lines = [
        "| eval | rounds | what it does | over Inspect's `vllm` provider | over ours, idle | "
        "event loop, s |",
        "|---|---|---|---|---|---|",
    ]
    for load, said in _EVALS.items():
        for arm, what in {**_INCLUDES, **_EVAL_ARMS}.items():
            numbers = [
                f"{statistics.median(_eval_ratios(read, load, arm, over)):.2f}"
                for over in ("plain", "idle")
            ]
            facts = summary[load][arm]
            numbers.append(f"{facts['loop_cpu_s']:.1f}")
            lines.append(f"| {said} | {facts['n']} | {what} | {' | '.join(numbers)} |")
    return "\n".join(lines)


def techniques_markdown(read: Read = read_result) -> str:
    """The table of edits and readouts, over vLLM without the lens.

    Args:
        read: gives a result by its name.
    """
    lines = ["| what each request asks for | 8 | 256 | 512 |", "|---|---|---|---|"]
    for arm, said in _TECHNIQUES.items():
        ratios = (
            f"{statistics.median(_spread(read, _file_of(arm), load, arm)):.2f}" for load in _LOADS
        )
        lines.append(f"| {said} | {' | '.join(ratios)} |")
    return "\n".join(lines)


def large_models_markdown(read: Read = read_result) -> str:
    """The table of larger models, over vLLM without the lens on as many GPUs.

    Args:
        read: gives a result by its name.
    """
    lines = [
        "| model | what each request asks for | 64 requests | 256 requests |",
        "|---|---|---|---|",
    ]
    for model in dict.fromkeys(run["model"] for run in read(_LARGE)["runs"]):
        for arm in ("idle", "capture-1", "probes-16x4", "steer"):
            asks = "nothing" if arm == "idle" else _ARMS[arm]
            found = (_spread(read, _LARGE, n, arm, model) for n in ("64x128", "256x128"))
            lines.append(f"| {_MODELS[model]} | {asks} | {' | '.join(map(_range, found))} |")
    return "\n".join(lines)


def _range(ratios: Sequence[float]) -> str:
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


_PALETTES: Final = {
    "light": {"text": "#1f2430", "faint": "#5b6472", "line": "#c9ced6", "dot": "#1f5fa8",
              "other": "#a8480b", "back": "#ffffff"},
    "dark": {"text": "#e6e9ef", "faint": "#a9b1bd", "line": "#4a505c", "dot": "#7db4f5",
             "other": "#f0a35e", "back": "#1e2129"},
}  # fmt: skip
_WIDTH, _ROW, _HEAD, _LEFT, _RIGHT = 820, 18, 30, 310, 640
_LOW: Final = 0.8
_AXES: Final = ((1.0, 1.1, 1.2, 1.3, 1.4), (1.0, 1.5, 2.0, 3.0, 5.0, 10.0))
"""Ticks of an axis, which ends with the last; the first one is drawn that holds all ratios."""


def draw(shown: Sequence[Section], palette: str) -> str:
    """One axis for all sections, as SVG.

    Args:
        shown: what `sections` gives.
        palette: `light` or `dark`.
    """
    colour = _PALETTES[palette]
    most = max(ratio for section in shown for row in section.rows for ratio in row.ratios)
    ticks = next(ticks for ticks in _AXES if ticks[-1] >= most)
    height = 44 + sum(_HEAD + _ROW * len(section.rows) for section in shown)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img" '
        'font-family="system-ui, sans-serif" font-size="12">',
        "<title>Wall time as a ratio; each heading names what it is divided by</title>",
        f'<rect width="{_WIDTH}" height="{height}" fill="{colour["back"]}"/>',
    ]
    for tick in ticks:
        x = _x(tick, ticks[-1])
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
            dot = colour["other" if other else "dot"]
            lines += _row(row, y + 4, colour["text"], dot, ticks[-1])
            y += _ROW
    return "\n".join([*lines, "</svg>", ""])


def _row(row: Row | Use, y: int, text: str, dot: str, most: float) -> Iterator[str]:
    yield _text(20, y + 4, row.label, text, "start")
    low, high = _x(min(row.ratios), most), _x(max(row.ratios), most)
    yield f'<line x1="{low}" x2="{high}" y1="{y}" y2="{y}" stroke="{dot}" stroke-width="3"/>'
    for mark in row.marks:
        yield f'<circle cx="{_x(mark, most)}" cy="{y}" r="4.5" fill="{dot}"/>'
    yield _text(_RIGHT + 14, y + 4, row.text, text, "start")


def _x(ratio: float, most: float) -> float:
    share = math.log(ratio / _LOW) / math.log(most / _LOW)
    return round(_LEFT + share * (_RIGHT - _LEFT), 1)


def _text(x: float, y: float, said: str, fill: str, anchor: str, *, bold: bool = False) -> str:
    weight = ' font-weight="600"' if bold else ""
    return (
        f'<text x="{x}" y="{y}" fill="{fill}" text-anchor="{anchor}"{weight}>{escape(said)}</text>'
    )


def figure_files() -> dict[str, str]:
    """Content of each file of the figures, by its name."""
    made = {"benchmarks": in_short(), "measurements": sections()}
    return {
        f"{figure}-{name}.svg": draw(shown, name)
        for figure, shown in made.items()
        for name in _PALETTES
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the figures."""
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
