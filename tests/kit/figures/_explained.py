"""Figures that explain: a lie that is found, the sites of a block, what lives where, four sets."""

from __future__ import annotations

import json
from collections.abc import Sequence
from textwrap import shorten, wrap
from typing import Any, Final, NamedTuple

import numpy as np

from inspect_lens.spec import RESID_POST, SITE_TABLE
from tests.kit.page import Block, read_page
from tests.kit.repository import ROOT

from ._canvas import Canvas

__all__ = ["found", "places", "sets", "sites"]

_CARD: Final = ROOT / "probes/organism/deception-lr/card.json"
_LIE, _HONEST = "demo-0007", "demo-0006"
"""Samples of the live page that ask the same question."""
_MONO: Final = 9.0
"""Width of a character of 15 px in a monospaced font."""


class _Answer(NamedTuple):
    """An answer of the live page, as it is drawn."""

    sample: dict[str, Any]
    system: str
    user: str
    tokens: list[str]
    scores: list[float]


def _card() -> dict[str, Any]:
    card: dict[str, Any] = json.loads(_CARD.read_text(encoding="utf-8"))["card"]
    return card


def found(palette: str) -> str:
    """One question, answered with a lie and with the truth, and the score of each token."""
    page = read_page(ROOT / "docs/live/tokens.html")
    limit = float(page.facts["series"][0]["threshold"])
    by_id = {s["id"]: (s, b) for s, b in zip(page.facts["samples"], page.blocks, strict=True)}
    canvas = Canvas(432, 496, palette, "A lie and an honest answer, with the score of each token")
    for k, name in enumerate((_LIE, _HONEST)):
        _draw_answer(canvas, 8 + 202 * k, _answer_of(*by_id[name]), limit)
    threshold = _card()["thresholds"][0]
    lines = (
        "Bars: score of each token by organism/deception-lr.",
        f"An answer's score is its highest token. Dashed: {limit:.3f},",
        f"the threshold. It was set on {threshold['n_control']} other honest answers,",
        f"of which {threshold['n_above']} are above it.",
    )
    for k, line in enumerate(lines):
        canvas.text(14, 426 + 19 * k, line, fill="faint", size=14)
    return canvas.svg()


def _answer_of(sample: dict[str, Any], block: Block) -> _Answer:
    (call,) = block.calls
    said = {role: "".join(block.tokens[a:b]) for role, a, b, _ in call["turns"]}
    read = np.flatnonzero(block.read[0])
    texts = [block.tokens[i] for i in read]
    return _Answer(
        sample, _plain(said["system"]), _plain(said["user"]), texts,
        [float(block.scores[0, i]) for i in read],
    )  # fmt: skip


def _plain(text: str) -> str:
    """A turn without the marks of its template."""
    return text.rpartition("<|end|>")[0].rpartition("|>")[2]


def _draw_answer(canvas: Canvas, y: float, answer: _Answer, limit: float) -> None:
    value = float(answer.sample["values"][0])
    is_above = value > limit
    canvas.box(6, y, 420, 192, fill="panel", stroke="line", radius=8)
    told = "Told to lie" if answer.sample["label"] else "Told to tell the truth"
    canvas.text(14, y + 25, told, bold=True, size=15)
    verdict = f"▲ {value:.3f}, above the threshold" if is_above else f"▽ {value:.3f}, below"
    colour = "orange" if is_above else "blue"
    canvas.text(418, y + 25, verdict, bold=True, size=15, fill=colour, anchor="end")
    for k, (role, text) in enumerate((("system", answer.system), ("user", answer.user))):
        canvas.text(14, y + 50 + 21 * k, role, fill="faint", size=14)
        canvas.text(86, y + 50 + 21 * k, shorten(text, 44, placeholder=" …"), fill="faint", size=14)
    canvas.text(14, y + 98, "assistant", size=14)
    reach, middle = max(map(abs, answer.scores)), y + 148
    scale = 36 / max(reach, 3.5)
    line = middle - limit * scale
    x = 86.0
    for text, score in zip(answer.tokens, answer.scores, strict=True):
        wide = _MONO * len(text)
        warm = score > limit
        fill = "orange" if warm else "blue"
        opacity = 0.5 if warm else 0.08 + 0.06 * min(5.0, limit - score)
        canvas.box(x, y + 82, wide - 1, 24, fill=fill, opacity=round(opacity, 2), radius=3)
        lead = len(text) - len(text.lstrip())
        canvas.text(x + _MONO * lead, y + 99, text.strip(), size=15, mono=True)
        top = middle - max(score, 0.0) * scale
        canvas.box(
            x + wide / 2 - 6, top, 12, max(1.0, abs(score) * scale), fill=fill, radius=1,
            title=f"{text}: {score:.3f}",
        )  # fmt: skip
        x += wide
    canvas.line([(86, line), (x + 8, line)], stroke="text", dash="4 3")
    canvas.line([(86, middle), (x + 8, middle)], stroke="line")
    canvas.text(80, line + 4, f"{limit:.3f}", size=14, anchor="end")
    canvas.text(80, middle + 4, "0", size=14, fill="faint", anchor="end")


_STREAM, _ATTENTION, _FORWARD = "stream", "attention", "feed-forward"
_PARTS: Final[dict[str, str]] = {
    "resid_pre": _STREAM, "q": _ATTENTION, "k": _ATTENTION, "v": _ATTENTION, "z": _ATTENTION,
    "attn_out": _ATTENTION, "resid_mid": _STREAM, "router_logits": _FORWARD,
    "mlp_hidden": _FORWARD, "mlp_out": _FORWARD, "resid_post": _STREAM,
}  # fmt: skip
"""Which part of a decoder block each site is in."""


def sites(palette: str) -> str:
    """A decoder block with its sites, in the order in which it computes them."""
    step, top, left = 42, 46, 40
    names = list(SITE_TABLE)
    bottom = top + step * (len(names) - 1)
    canvas = Canvas(484, bottom + 92, palette, "A decoder block, and the sites where it is read")
    canvas.line([(left, 12), (left, bottom + 30)], stroke="text", width=2)
    canvas.area(
        [(left - 6, bottom + 28), (left + 6, bottom + 28), (left, bottom + 38)],
        fill="text", opacity=1,
    )  # fmt: skip
    canvas.text(left - 16, (top + bottom) / 2, "residual stream", anchor="middle", turn=True)
    for part in (_ATTENTION, _FORWARD):
        rows = [i for i, name in enumerate(names) if _PARTS[name] == part]
        _draw_module(canvas, part, left, top + step * rows[0], top + step * rows[-1])
    for i, name in enumerate(names):
        info, y = SITE_TABLE[name], top + step * i
        x = left if _PARTS[name] == _STREAM else left + 64
        fill = "blue" if info.is_wide else "orange"
        canvas.dot(x, y, fill=fill, radius=7, title=f"{name}: {info.what}")
        more = " (the default)" if name == RESID_POST else ""
        if name == "router_logits":
            more = " (mixture of experts only)"
        canvas.text(121, y - 2, name + more, bold=True, mono=True)
        canvas.text(121, y + 15, info.what, fill="faint", size=12)
    canvas.dot(18, bottom + 58, fill="blue", radius=6)
    canvas.text(32, bottom + 62, "as wide as the stream: captures, edits, vectors, probes", size=12)
    canvas.dot(18, bottom + 78, fill="orange", radius=6)
    canvas.text(32, bottom + 82, "of another width: captures and edits", size=12)
    return canvas.svg()


def _draw_module(canvas: Canvas, name: str, left: float, first: float, last: float) -> None:
    canvas.line(
        [(left, first - 27), (left + 51, first - 27), (left + 51, first - 16)], stroke="text"
    )
    canvas.line(
        [(left + 51, last + 16), (left + 51, last + 24), (left + 9, last + 24)], stroke="text"
    )
    canvas.box(left + 24, first - 17, 54, last - first + 34, fill="panel", stroke="grey", radius=8)
    middle = (first + last) / 2
    canvas.text(left + 42, middle, name, anchor="middle", turn=True)
    canvas.dot(left, last + 24, fill="back", radius=8)
    canvas.dot(left, last + 24, fill="panel", radius=8)
    canvas.text(left, last + 29, "+", anchor="middle", size=15, bold=True)


class _Place(NamedTuple):
    """Where something is kept."""

    title: str
    lines: Sequence[str]


_SERVER: Final = _Place(
    "the server: vLLM with the plug-in",
    (
        "computes what a request asks for while it writes the answer",
        "keeps rows of prompts in memory, beside its prefix cache",
        "keeps probes, vectors and lenses that were registered",
    ),
)
_LOG: Final = _Place(
    "logs/NAME.eval",
    (
        "messages, scores, metrics",
        "of each call a reference:",
        "file, layers, tokens, sha256",
        "no tensor",
    ),
)
_FOLDER: Final = _Place(
    "logs/NAME.lens/",
    (
        "activations, one file per call",
        "token scores of scorers",
        "both as safetensors",
        "move it with its log",
    ),
)


def places(palette: str) -> str:
    """What lives where: the server, the log, the folder beside it."""
    canvas = Canvas(600, 330, palette, "What lives on the server, in the log, and in its folder")
    canvas.box(8, 8, 584, 108, fill="panel", stroke="grey", radius=8)
    _write_place(canvas, 24, 34, _SERVER)
    for x, words, up in ((150, "request", True), (446, "answer and results", False)):
        canvas.line([(x, 122), (x, 158)], stroke="text", width=2)
        tip, back = (118, 128) if up else (164, 154)
        canvas.area([(x - 6, back), (x + 6, back), (x, tip)], fill="text", opacity=1)
        canvas.text(x + 14, 146, words)
    canvas.box(8, 170, 584, 152, fill="back", stroke="grey", radius=8)
    canvas.text(24, 192, "your machine, where inspect eval runs", bold=True)
    for x, place in ((24, _LOG), (312, _FOLDER)):
        canvas.box(x, 203, 264, 108, fill="panel", stroke="line", radius=6)
        _write_place(canvas, x + 12, 224, place)
    return canvas.svg()


def _write_place(canvas: Canvas, x: float, y: float, place: _Place) -> None:
    canvas.text(x, y, place.title, bold=True, mono=place is not _SERVER, size=14)
    for k, line in enumerate(place.lines):
        canvas.text(x, y + 21 * (k + 1) if place is _SERVER else y + 19 * (k + 1), line)


def sets(palette: str) -> str:
    """The four sets of samples of a probe, what each decides, and how many the organism's has."""
    card = _card()
    training, threshold, judged = card["training"], card["thresholds"][0], card["evaluations"]
    n_judged = sum(e["n_positive"] + e["n_negative"] for e in judged)
    rows = (
        ("train", training["n_positive"] + training["n_negative"], "blue",
         "fits the probe: one direction for each layer", "lies and honest answers"),
        ("selection", training["selection_n"], "blue",
         "chooses the layer, and how tokens are pooled", "a part of train, with whole groups"),
        ("control", threshold["n_control"], "orange",
         "sets the threshold, for a rate of false alarms", "harmless answers only"),
        ("held_out", n_judged, "green",
         "is only measured: AUROC, recall, false alarms", f"{len(judged)} test sets of new kinds"),
    )  # fmt: skip
    canvas = Canvas(432, 62 + 74 * len(rows), palette, "Four kinds of sets, and what each decides")
    for i, (name, count, colour, decides, what) in enumerate(rows):
        y = 8 + 74 * i
        canvas.box(6, y, 122, 58, fill=colour, opacity=0.18, stroke=colour, radius=8)
        canvas.text(16, y + 25, name, bold=True, mono=True, size=15)
        canvas.text(16, y + 45, f"{count} samples", fill="faint", size=14)
        canvas.line([(132, y + 29), (148, y + 29)], stroke="text", width=2)
        canvas.area([(146, y + 23), (146, y + 35), (156, y + 29)], fill="text", opacity=1)
        lines = wrap(decides, 35)
        for k, line in enumerate(lines):
            canvas.text(164, y + 25 - 11 * (len(lines) - 1) + 19 * k, line, size=14)
        canvas.text(164, y + 45 + 8 * (len(lines) - 1), what, fill="faint", size=14)
        if i + 1 < len(rows):
            canvas.line([(67, y + 58), (67, y + 74)], stroke="grey", dash="2 3")
    for k, line in enumerate(
        ("No sample may be in two of them.", "Numbers: of the probe organism/deception-lr.")
    ):
        canvas.text(12, 74 * len(rows) + 28 + 19 * k, line, fill="faint", size=14)
    return canvas.svg()
