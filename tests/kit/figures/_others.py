"""Figures of steering, the oracle, the logit lens, conformance, and positions."""

from __future__ import annotations

import json
import re
from typing import Any, Final, Literal

from inspect_lens.spec import resolve_positions
from tests.kit.repository import ROOT

from ._canvas import Axis, Canvas, Plot
from ._probe import SHARES

__all__ = ["conformance", "lens", "oracle", "positions", "steering"]

_KINDS: Final = {
    "vector": ("blue", "the vector", 2.5),
    "random": ("orange", "random, same length", 4.5),
    "orthogonal": ("green", "orthogonal, same length", 1.5),
}
_Named = Literal["all", "prompt", "completion", "last_prompt"]
_CONTROLS: Final = ("text_only", "shuffled", "random", "other_sample")


def _read(path: str) -> Any:
    return json.loads((ROOT / path).read_text(encoding="utf-8"))


def _page(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def steering(palette: str) -> str:
    """Share of true and of coherent answers over the scale of the vector, with controls."""
    found = _read("vectors/organism/truth/sweep.json")
    canvas = Canvas(720, 572, palette, "True and coherent answers by scale of organism/truth")
    ticks = (-0.6, -0.3, 0.0, 0.3, 0.6)
    shown = (("curves", "true answers", 20, 230, ""),
             ("coherent", "coherent answers", 288, 150, "scale of the vector (0: unsteered)"),
             )  # fmt: skip
    percent = "{:.0%}".format
    high = max(p["scale"] for p in found["curves"]["vector"]["points"])
    for key, name, top, height, across in shown:
        plot = Plot(
            canvas, 76, top, 620, height,
            Axis(-0.62, high + 0.02, [*ticks, *((0.9,) if high >= 0.9 else ())], across),
            Axis(0, 1, SHARES, name, say=percent),
        )  # fmt: skip
        plot.frame()
        for kind, (colour, said, width) in _KINDS.items():
            points = found[key][kind]["points"]
            band = [plot.at(p["scale"], p["low"]) for p in points]
            band += [plot.at(p["scale"], p["high"]) for p in reversed(points)]
            canvas.area(band, fill=colour, opacity=0.14)
            canvas.line(
                [plot.at(p["scale"], p["mean"]) for p in points], stroke=colour, width=width
            )
            for p in points:
                canvas.dot(
                    *plot.at(p["scale"], p["mean"]), fill=colour, radius=width / 2 + 1.5,
                    title=f"{said}: {p['mean']:.3f} at {p['scale']:g}",
                )  # fmt: skip
    flips = found["prompts_flipped_at_any_scale"]
    canvas.legend(
        88, 508,
        [(colour, f"{said}: changed {flips[kind]['flipped']} of {flips[kind]['of']} answers")
         for kind, (colour, said, _) in _KINDS.items()],
    )  # fmt: skip
    canvas.text(450, 508, "Bands: 95 %, bootstrap of prompts.", fill="faint", size=12)
    canvas.text(450, 527, f"Layer {found['layer']}, {found['split']}.", fill="faint", size=12)
    return canvas.svg()


def oracle(palette: str) -> str:
    """Accuracy of the organism's oracle against its best control, by question."""
    rows = [
        r for r in _read("oracles/organism/card.json")["results"]
        if r["split"] == "heldout_phrasing" and r["wording"] == "trained"
        and r["inputs"] == "completion" and r["layer"] in (3, 4)
    ]  # fmt: skip
    rows = [r for r in rows if r["task"] != "lying" or r["layer"] == 4]
    height = 78 + 27 * len(rows)
    canvas = Canvas(720, height, palette, "Answers of the oracle, and of its best control")
    plot = Plot(
        canvas, 110, 12, 340, height - 76, Axis(0, 1, SHARES, "share of right answers",
        say="{:.0%}".format), Axis(0, 1, ()),
    )  # fmt: skip
    plot.frame()
    for i, r in enumerate(rows):
        y = 32 + 27 * i
        name = max(_CONTROLS, key=lambda c: r[c]["accuracy"])
        canvas.text(12, y + 4, r["task"], bold=True)
        canvas.line(
            [(plot.x(r[name]["accuracy"]), y), (plot.x(r["oracle"]["accuracy"]), y)], stroke="line",
            width=3,
        )  # fmt: skip
        for key, colour in ((name, "grey"), ("oracle", "orange")):
            canvas.line(
                [(plot.x(r[key]["low"]), y), (plot.x(r[key]["high"]), y)], stroke=colour, width=5,
                opacity=0.4,
            )  # fmt: skip
            canvas.dot(plot.x(r[key]["accuracy"]), y, fill=colour, radius=5)
        said = f"{r['oracle']['accuracy']:.2f} against {r[name]['accuracy']:.2f}"
        canvas.text(466, y + 4, f"{said} ({name.replace('_', ' ')})", size=12)
    canvas.text(
        12, height - 10, "Orange: the oracle. Grey: the best of four prompts with other "
        "activations or none.", fill="faint", size=12,
    )  # fmt: skip
    return canvas.svg()


def lens(palette: str) -> str:
    """The token that each layer points to, from the output that the tutorial shows."""
    found = re.findall(
        r"^layer (\d)   honest: (\w+) +lie: (\w+)$", _page("docs/how-to/lenses.md"), re.MULTILINE
    )
    said = re.findall(r"^The town Velosh was founded by (\w+)\.$", _page("docs/how-to/lenses.md"),
                      re.MULTILINE)  # fmt: skip
    canvas = Canvas(
        720, 92 + 44 * len(found), palette, "What each layer points to, honest or lying"
    )
    canvas.text(280, 26, f"told the truth: {said[0]}", anchor="middle", bold=True)
    canvas.text(540, 26, f"told to lie: {said[1]}", anchor="middle", bold=True)
    for i, (layer, *names) in enumerate(reversed(found)):
        y = 42 + 44 * i
        canvas.text(12, y + 24, f"after layer {layer}")
        for j, name in enumerate(names):
            colour = "green" if name == said[0] else "orange" if name == said[1] else "grey"
            left = 160 + 260 * j
            canvas.box(left, y, 240, 36, fill="panel", radius=5)
            canvas.box(left, y, 240, 36, fill=colour, opacity=0.3, stroke=colour, radius=5)
            canvas.text(left + 120, y + 23, name, anchor="middle", mono=True)
    canvas.text(
        12, 72 + 44 * len(found), f"Green: the true founder, {said[0]}. Orange: a lie, {said[1]}.",
        fill="faint", size=12,
    )  # fmt: skip
    return canvas.svg()


def conformance(palette: str) -> str:
    """Ten tests, both packages, from the table of the page."""
    results = _page("docs/coverage.md").partition("## Results")[2]
    rows = re.findall(r"^\| \d+ \| ([^|]+) \| (pass|fail): [^|]+\| (pass|fail): ", results,
                      re.MULTILINE)  # fmt: skip
    canvas = Canvas(720, 66 + 30 * len(rows), palette, "Ten tests of two packages on vLLM 0.32")
    for j, name in enumerate(("inspect_lens", "vllm-lens 1.3.0")):
        n = sum(row[1 + j] == "pass" for row in rows)
        canvas.text(400 + 190 * j, 26, f"{name}: {n} of {len(rows)}", anchor="middle", bold=True)
    for i, (test, *verdicts) in enumerate(rows):
        y = 42 + 30 * i
        canvas.text(12, y + 17, f"{i + 1}  {test}")
        for j, verdict in enumerate(verdicts):
            colour = "green" if verdict == "pass" else "orange"
            left = 320 + 190 * j
            canvas.box(left, y, 160, 25, fill="panel", radius=4)
            canvas.box(left, y, 160, 25, fill=colour, opacity=0.35, radius=4)
            canvas.text(left + 80, y + 17, verdict, anchor="middle")
    return canvas.svg()


def positions(palette: str) -> str:
    """Which tokens a selection means, for a prompt of six tokens and a completion of five."""
    words = ("<user>", "Who", "founded", "Velosh", "?", "<assistant>",
             "It", "was", "Ruvan", ".", "<end>")  # fmt: skip
    n_prompt, n_fed = 6, len(words) - 1
    shown: tuple[_Named, ...] = ("all", "prompt", "completion", "last_prompt")
    canvas = Canvas(
        820, 98 + 36 * len(shown), palette, "Tokens, and the rows that selections return"
    )
    for i, word in enumerate(words):
        x = 108 + 64 * i
        fill = "blue" if i < n_prompt else "orange"
        opacity = 0.28 if i < n_fed else 0.08
        canvas.box(x, 28, 61, 32, fill=fill, opacity=opacity, stroke=fill, radius=4)
        canvas.text(x + 30.5, 48, word, anchor="middle", size=10 if len(word) > 8 else 12)
        canvas.text(x + 30.5, 20, str(i), anchor="middle", fill="faint", size=12)
    canvas.text(12, 20, "position", fill="faint", size=12)
    canvas.text(12, 49, "token")
    for k, name in enumerate(shown):
        y = 78 + 36 * k
        read = resolve_positions(name, n_prompt=n_prompt, n_max=n_fed, field="positions")
        canvas.text(12, y + 15, name, mono=True, size=12)
        for i in read:
            canvas.box(108 + 64 * i, y, 61, 22, fill="green", opacity=0.55, radius=4)
    canvas.text(
        12, 86 + 36 * len(shown), "Blue: prompt. Orange: sampled. The last sampled token is never "
        "fed to the model, so it has no row.", fill="faint", size=12,
    )  # fmt: skip
    return canvas.svg()
