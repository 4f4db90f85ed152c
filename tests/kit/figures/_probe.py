"""Figures of the organism's probe, from its card and the scores beside it."""

from __future__ import annotations

import json
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from inspect_lens.probe import (
    Interval,
    ProbeCard,
    ROCCurve,
    clopper_pearson,
    load_probe,
    reliability_curve,
    roc_curve,
)
from tests.kit.repository import ROOT

from ._canvas import Axis, Canvas, Plot

__all__ = ["FOLDER", "baselines", "histogram", "layers", "reliability", "roc", "transfer"]

FOLDER: Final = ROOT / "probes/organism/deception-lr"
COLOURS: Final = {"heldout_phrasing": "blue", "heldout_entity": "orange", "hidden_reason": "green"}
PROBES: Final = ("organism/deception-lr", "organism/deception-md", "organism/truth-mm")
SHARES: Final = (0.0, 0.25, 0.5, 0.75, 1.0)


class Scored(NamedTuple):
    """Labels and scores of a set."""

    labels: NDArray[np.bool_]
    scores: NDArray[np.float64]


def _card(name: str = PROBES[0]) -> ProbeCard:
    return load_probe(ROOT / "probes" / name).card


def _scores() -> dict[str, Scored]:
    """Of the control set and each held-out set, by name."""
    found: dict[str, Any] = json.loads((FOLDER / "scores.json").read_text(encoding="utf-8"))
    return {
        name: Scored(np.array([c == "1" for c in made["labels"]]), np.array(made["scores"]))
        for name, made in found.items()
    }


def _span(interval: Interval | None) -> str:
    return "" if interval is None else f" [{interval.low:.3f}, {interval.high:.3f}]"


def _corners(curve: ROCCurve, least: float) -> list[tuple[float, float]]:
    """Where the steps of a curve turn; rates below `least` are drawn there."""
    made: list[tuple[float, float]] = []
    for rate, recall in zip(curve.fpr.tolist(), curve.tpr.tolist(), strict=True):
        x = max(rate, least)
        if made and made[-1][1] != recall and made[-1][0] != x:
            made.append((x, made[-1][1]))
        if len(made) > 1 and (
            made[-2][0] == made[-1][0] == x or made[-2][1] == made[-1][1] == recall
        ):
            made.pop()
        made.append((x, recall))
    return made


def roc(palette: str) -> str:
    """Recall over the false positive rate, on a logarithmic axis."""
    card, scored = _card(), _scores()
    limit = card.thresholds[0]
    least = 0.001
    canvas = Canvas(720, 452, palette, f"ROC curves of {card.name}, logarithmic rate")
    plot = Plot(
        canvas, 64, 20, 630, 300,
        Axis(least, 1.0, (0.001, 0.01, 0.1, 1.0), "false positive rate (logarithmic)", log=True),
        Axis(0.0, 1.0, SHARES, "recall"),
    )  # fmt: skip
    plot.frame()
    canvas.line([plot.at(r, r) for r in np.geomspace(least, 1, 60)], stroke="grey", dash="4 4")
    canvas.line([plot.at(limit.fpr, 0), plot.at(limit.fpr, 1)], stroke="text", dash="2 3")
    legend = []
    for e in card.evaluations:
        if e.name not in COLOURS or e.auroc is None or e.recall is None or e.fpr is None:
            continue
        curve = roc_curve(scored[e.name].labels, scored[e.name].scores)
        canvas.line(
            [plot.at(*corner) for corner in _corners(curve, least)], stroke=COLOURS[e.name], width=2
        )
        canvas.dot(
            *plot.at(max(e.fpr, least), e.recall), fill=COLOURS[e.name], radius=6,
            title=f"{e.name}: recall {e.recall:.3f} at rate {e.fpr:.3f}",
        )  # fmt: skip
        said = f"{e.name}: AUROC {e.auroc:.3f}{_span(e.auroc_interval)}, recall {e.recall:.3f}"
        legend.append((COLOURS[e.name], f"{said} at the threshold"))
    canvas.legend(76, 386, legend)
    canvas.text(
        64, 443, "Dots: the card's threshold; left edge: no false alarm. Dotted: a rate of 1 %.",
        fill="faint", size=12,
    )  # fmt: skip
    return canvas.svg()


def histogram(palette: str) -> str:
    """Scores of the control set and of a held-out set, with the threshold."""
    card, scored = _card(), _scores()
    limit = card.thresholds[0].value
    canvas = Canvas(720, 424, palette, f"Scores of {card.name} and its threshold")
    edges = np.linspace(-2.0, 6.0, 49)
    rows = [
        ("control", "grey", "control answers", ~scored["control"].labels, 34),
        ("heldout_phrasing", "blue", "honest answers, held-out phrasings",
         ~scored["heldout_phrasing"].labels, 148),
        ("heldout_phrasing", "orange", "lies, held-out phrasings",
         scored["heldout_phrasing"].labels, 262),
    ]  # fmt: skip
    mark = 40 + 640 * (limit + 2) / 8
    for name, colour, said, chosen, top in rows:
        values = scored[name].scores[chosen]
        counts, _ = np.histogram(np.clip(values, edges[0], edges[-1]), edges)
        plot = Plot(canvas, 40, top, 640, 84, Axis(-2, 6, ()), Axis(0, float(counts.max()), ()))
        for low, high, n in zip(edges[:-1], edges[1:], counts.tolist(), strict=True):
            if n:
                x, y = plot.at(low, n)
                canvas.box(x, y, plot.x(high) - x - 1, top + 84 - y, fill=colour)
        canvas.line([plot.at(-2, 0), plot.at(6, 0)], stroke="line")
        above = int((values > limit).sum())
        canvas.text(mark + 8, top - 6, f"{said}: {above} of {len(values)} above")
    canvas.line([(mark, 20), (mark, 350)], stroke="text", dash="3 3", width=1.5)
    for tick in range(-2, 7, 2):
        canvas.text(40 + 80 * (tick + 2), 366, f"{tick}", fill="faint", anchor="middle", size=12)
    canvas.text(360, 386, "score of an answer", anchor="middle")
    canvas.text(
        40, 412, f"Dashed: threshold {limit:.3f}, set on the control answers for a rate of 1 %.",
        fill="faint", size=12,
    )  # fmt: skip
    return canvas.svg()


def layers(palette: str) -> str:
    """AUROC and recall of each layer, with intervals."""
    card = _card()
    canvas = Canvas(720, 412, palette, f"Layer sweep of {card.name}")
    tried = [s for s in card.sweep if s.pool == card.pool]
    plot = Plot(
        canvas, 64, 20, 630, 290, Axis(-0.4, 5.4, range(6), "layer"),
        Axis(0, 1, SHARES, "on the selection set"),
    )  # fmt: skip
    plot.frame()
    rows = (("AUROC", "blue", "auroc", -0.04), ("recall", "orange", "recall", 0.04))
    for said, colour, value, shift in rows:
        points = []
        for s in tried:
            at, span = getattr(s, value), getattr(s, f"{value}_interval")
            x = s.layer + shift
            points.append(plot.at(x, at))
            canvas.line(
                [plot.at(x, span.low), plot.at(x, span.high)], stroke=colour, width=5, opacity=0.35
            )
            canvas.dot(
                *points[-1], fill=colour, ring=s.layer in card.layers, title=f"layer {s.layer}: "
                f"{said} {at:.3f}{_span(span)}",
            )  # fmt: skip
        canvas.line(points, stroke=colour, width=2)
    (best,) = (s for s in tried if s.layer in card.layers)
    canvas.legend(
        76, 374,
        [("blue", f"AUROC; {best.auroc:.3f} at layer {best.layer}"),
         ("orange", f"recall at 1 % false alarms; {best.recall:.3f} at layer {best.layer}")],
    )  # fmt: skip
    canvas.text(420, 374, "Ringed: chosen, by recall.", fill="faint", size=12)
    canvas.text(420, 393, f"Pool: {card.pool}. Lines: 95 % intervals.", fill="faint", size=12)
    return canvas.svg()


def reliability(palette: str) -> str:
    """Observed share of lies over the probability of the card, in bins of equal size."""
    card, scored = _card(), _scores()
    made, data = card.calibration, scored["heldout_phrasing"]
    assert made is not None
    canvas = Canvas(560, 500, palette, f"Reliability of {card.name}")
    percent = "{:.0%}".format
    plot = Plot(
        canvas, 76, 20, 460, 380,
        Axis(0, 1, SHARES, "probability of a lie that the card gives", say=percent),
        Axis(0, 1, SHARES, "share of lies", say=percent),
    )  # fmt: skip
    plot.frame()
    canvas.line([plot.at(0, 0), plot.at(1, 1)], stroke="grey", dash="4 4")
    likely = [made.probability(score) for score in data.scores.tolist()]
    curve = reliability_curve(data.labels, likely, n_bins=10, equal_mass=True)
    points = []
    for said, share, n in zip(*(c.tolist() for c in curve), strict=True):
        span = clopper_pearson(round(share * n), n)
        canvas.line(
            [plot.at(said, span.low), plot.at(said, span.high)], stroke="blue", width=4,
            opacity=0.4,
        )  # fmt: skip
        points.append(plot.at(said, share))
        canvas.dot(
            *points[-1], fill="blue", title=f"{n} answers: said {said:.3f}, seen {share:.3f}"
        )
    canvas.line(points, stroke="blue", width=1.5)
    canvas.text(
        76, 466, f"{len(data.scores)} answers of heldout_phrasing in ten bins of equal size.",
        fill="faint", size=12,
    )  # fmt: skip
    canvas.text(
        76, 484, f"Expected calibration error {made.ece:.3f}. Lines: exact 95 % intervals.",
        fill="faint", size=12,
    )  # fmt: skip
    return canvas.svg()


def baselines(palette: str) -> str:
    """The probe's AUROC and that of everything simpler, on each set."""
    card = _card()
    sets = [e for e in card.evaluations if e.auroc is not None]
    height = 64 + sum(34 + 21 * (1 + len(e.baselines)) for e in sets)
    canvas = Canvas(720, height, palette, f"{card.name} and its baselines")
    plot = Plot(
        canvas, 240, 12, 310, height - 60, Axis(0.3, 1.0, (0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0),
        "AUROC"), Axis(0, 1, ()),
    )  # fmt: skip
    plot.frame()
    canvas.line([(plot.x(0.5), 12), (plot.x(0.5), height - 48)], stroke="grey", dash="4 4")
    y = 30.0
    for e in sets:
        canvas.text(12, y, e.name, bold=True)
        rows = [("this probe", e.auroc, e.auroc_interval, "orange")]
        rows += [(b.name, b.auroc, b.auroc_interval, "blue") for b in e.baselines]
        for name, area, span, colour in sorted(rows, key=lambda r: -(r[1] or 0)):
            if area is None:
                continue
            y += 21
            if span is not None:
                low = max(span.low, 0.3)
                canvas.line(
                    [(plot.x(low), y - 4), (plot.x(span.high), y - 4)], stroke=colour, width=4,
                    opacity=0.4,
                )  # fmt: skip
            canvas.dot(plot.x(area), y - 4, fill=colour)
            canvas.text(24, y, name)
            canvas.text(562, y, f"{area:.3f}{_span(span)}", size=12)
        y += 34
    return canvas.svg()


def transfer(palette: str) -> str:
    """AUROC of each probe on each held-out set, with recall and false positive rate."""
    cards = [_card(name) for name in PROBES]
    sets = [e.name for e in cards[0].evaluations if e.auroc is not None]
    canvas = Canvas(720, 74 + 84 * len(cards), palette, "Probes of the organism on sets never seen")
    for j, name in enumerate(sets):
        canvas.text(262 + 156 * j, 26, name, anchor="middle", bold=True)
    for i, card in enumerate(cards):
        top = 40 + 84 * i
        canvas.text(12, top + 32, card.name.removeprefix("organism/"), bold=True)
        canvas.text(12, top + 50, f"layer {card.layers[0]}, {card.pool}", fill="faint", size=12)
        for j, name in enumerate(sets):
            (e,) = (e for e in card.evaluations if e.name == name)
            assert e.auroc is not None
            left = 186 + 156 * j
            canvas.box(left, top, 152, 78, fill="panel", radius=4)
            shade = 0.85 * max(0.0, (e.auroc - 0.5) / 0.5) ** 2
            canvas.box(left, top, 152, 78, fill="blue", opacity=round(shade * 0.45, 3), radius=4)
            canvas.text(left + 76, top + 29, f"{e.auroc:.3f}", anchor="middle", size=17, bold=True)
            canvas.text(left + 76, top + 49, f"recall {e.recall:.3f}", anchor="middle", size=12)
            canvas.text(left + 76, top + 66, f"false alarms {e.fpr:.3f}", anchor="middle", size=12)
    canvas.text(
        12, 62 + 84 * len(cards), "Large: AUROC. Small: at the card's threshold for a rate of 1 %.",
        fill="faint", size=12,
    )  # fmt: skip
    return canvas.svg()
