"""The figures of a report, each as PNG."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from inspect_lens.probe import (
    Calibration,
    ProbeCard,
    auroc,
    clopper_pearson,
    reliability_curve,
    roc_band,
    roc_curve,
)

from ._report_sets import COLOURS, ReportSet, cases, colour_scale

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_NEGATIVE, _POSITIVE = "#7f8c8d", "#D55E00"


def figures(card: ProbeCard, sets: Sequence[ReportSet], *, n_resamples: int) -> dict[str, bytes]:
    """Draw what the data allow."""
    made: dict[str, bytes] = {}
    both = [s for s in sets if s.both]
    if both:
        made["roc"] = _roc(card, both, n_resamples)
    if sets:
        made["scores"] = _scores(card, sets)
    if card.sweep:
        made["layers"] = _layers(card)
    if card.calibration is not None and both:
        made["calibration"] = _calibration(card.calibration, both)
    if card.baselines:
        made["baselines"] = _baselines(card)
    shown = [s for s in sets if s.tokens]
    if shown:
        made["tokens"] = _tokens(shown[0])
    return made


def empty_figure(width: float, height: float, layout: Any = "constrained") -> Figure:
    """A figure in inches; matplotlib is imported here, when the first one is drawn."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=130, layout=layout)
    FigureCanvasAgg(figure)
    return figure


def _figure(width: float, height: float) -> tuple[Figure, Any]:
    figure = empty_figure(width, height)
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def to_png(figure: Figure) -> bytes:
    """The bytes of a figure."""
    buffer = io.BytesIO()
    # No software name: the same data give the same bytes.
    figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()


def _roc(card: ProbeCard, sets: Sequence[ReportSet], n_resamples: int) -> bytes:
    """Recall over the false positive rate, whose axis is logarithmic: alarms are rare in use."""
    own = card.thresholds_for(card.answer)
    figure, axes = _figure(6.2, 4.8)
    least = 0.5 / max(int((~s.labels).sum()) for s in sets)
    grid = np.geomspace(least, 1.0, 200)
    axes.plot(grid, grid, color="#bbbbbb", lw=1, ls="--")
    for data, colour in zip(sets, COLOURS * 9, strict=False):
        curve = roc_curve(data.labels, data.scores)
        label = f"{data.title} ({auroc(data.labels, data.scores):.3f})"
        x = np.maximum(curve.fpr, least)
        axes.step(x, curve.tpr, where="post", color=colour, lw=1.6, label=label)
        if n_resamples and not data.no_band:
            at, low, high = roc_band(
                data.labels, data.scores, groups=data.groups, n_resamples=n_resamples, grid=grid
            )
            axes.fill_between(at, low, high, step="post", color=colour, alpha=0.13, lw=0)
        if own:
            flagged = data.scores > own[0].value
            rate = max(float(flagged[~data.labels].mean()), least)
            recall = float(flagged[data.labels].mean())
            axes.plot(rate, recall, "o", ms=8, mfc=colour, mec="white", mew=1.2, clip_on=False)
    if own:
        axes.axvline(own[0].fpr, color="black", lw=1, ls=":")
    axes.set(
        xscale="log", xlim=(least, 1.0), ylim=(0, 1.01),
        xlabel="false positive rate (logarithmic; leftmost: none)"
        + ("; dotted: the rate asked for" if own else ""),
        ylabel="recall" + (" (dot: at the threshold)" if own else ""),
    )  # fmt: skip
    _legend(figure, axes, "AUROC")
    return to_png(figure)


def _legend(figure: Figure, axes: Any, title: str) -> None:
    """Below the axes, where it hides nothing."""
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(
        handles, labels, title=title, frameon=False, fontsize=8, title_fontsize=8,
        loc="outside lower center", ncols=2,
    )  # fmt: skip


def _scores(card: ProbeCard, sets: Sequence[ReportSet]) -> bytes:
    own = card.thresholds_for(card.answer)
    figure = empty_figure(6.4, 1.0 + 1.25 * len(sets))
    values = np.concatenate([s.scores for s in sets])
    low, high = np.quantile(values, [0.002, 0.998])
    threshold = own[0].value if own else None
    if threshold is not None:
        low, high = min(low, threshold), max(high, threshold)
    edges = np.linspace(low, high if high > low else low + 1.0, 46)
    handles: dict[str, Any] = {}
    for i, data in enumerate(sets):
        axes = figure.add_subplot(len(sets), 1, i + 1)
        axes.spines[["top", "right", "left"]].set_visible(False)
        counts = []
        for side, colour, name in (
            (~data.labels, _NEGATIVE, "negative"),
            (data.labels, _POSITIVE, "positive"),
        ):
            if side.any():
                clipped = np.clip(data.scores[side], edges[0], edges[-1])
                _, _, bars = axes.hist(
                    clipped, bins=edges.tolist(), color=colour, alpha=0.55, label=name
                )
                handles[name] = bars
                counts.append(f"{int(side.sum())} {name}")
        if threshold is not None:
            handles["threshold"] = axes.axvline(threshold, color="black", lw=1, ls=":")
        axes.set_title(f"{data.title}: {', '.join(counts)}", fontsize=9, loc="left")
        axes.set_yticks([])
        if i + 1 < len(sets):
            axes.set_xticklabels([])
    axes.set_xlabel("score")
    names = [f"threshold ({threshold:.4g})" if n == "threshold" else n for n in handles]
    figure.legend(
        list(handles.values()), names, frameon=False, fontsize=8, ncols=3,
        loc="outside lower center",
    )  # fmt: skip
    return to_png(figure)


def _layers(card: ProbeCard) -> bytes:
    """AUROC and, where it chose, recall of every layer, with intervals; one line per pool."""
    figure, axes = _figure(6.4, 4.0)
    pools = list(dict.fromkeys(s.pool for s in card.sweep))
    kinds = [("AUROC", COLOURS[0], "auroc", "auroc_interval")]
    if any(s.recall is not None for s in card.sweep):
        kinds.append(("recall at the rate", COLOURS[1], "recall", "recall_interval"))
    for p, pool in enumerate(pools):
        points = [s for s in card.sweep if s.pool == pool]
        for k, (name, colour, value, interval) in enumerate(kinds):
            shown = [s for s in points if getattr(s, value) is not None]
            x = np.array([s.layer for s in shown]) + 0.06 * (2 * p + k)
            y = np.array([getattr(s, value) for s in shown], dtype=np.float64)
            spans = [getattr(s, interval) for s in shown]
            axes.vlines(
                [at for at, i in zip(x, spans, strict=True) if i is not None],
                [i.low for i in spans if i is not None],
                [i.high for i in spans if i is not None], color=colour, alpha=0.35, lw=2,
            )  # fmt: skip
            label = f"{name}, {pool}" if len(pools) > 1 else name
            style = ("-", "--", ":", "-.")[p % 4]
            axes.plot(x, y, color=colour, marker="o", ms=3.5, lw=1.4, ls=style, label=label)
            for at, value_at, s in zip(x, y, shown, strict=True):
                if s.layer in card.layers and s.pool in ("", card.pool):
                    axes.plot(at, value_at, "o", ms=11, mfc="none", mec="black", mew=1.4)
    axes.axhline(0.5, color="#bbbbbb", lw=1, ls="--")
    axes.set(xlabel="layer (ringed: chosen)", ylabel="on the selection set", ylim=(-0.02, 1.03))
    axes.xaxis.get_major_locator().set_params(integer=True)
    _legend(figure, axes, "")
    return to_png(figure)


def _calibration(calibration: Calibration, sets: Sequence[ReportSet]) -> bytes:
    """Observed share over predicted probability, in bins of equal size with exact intervals."""
    figure, axes = _figure(5.0, 4.9)
    axes.plot([0, 1], [0, 1], color="#bbbbbb", lw=1, ls="--")
    for data, colour in zip(sets, COLOURS * 9, strict=False):
        likely = [calibration.probability(score) for score in data.scores.tolist()]
        curve = reliability_curve(data.labels, likely, n_bins=10, equal_mass=True)
        spans = [
            clopper_pearson(round(share * n), n)
            for share, n in zip(curve.observed.tolist(), curve.size.tolist(), strict=True)
        ]
        axes.vlines(
            curve.predicted, [i.low for i in spans], [i.high for i in spans],
            color=colour, alpha=0.4, lw=1.5,
        )  # fmt: skip
        axes.plot(
            curve.predicted, curve.observed, "o-", ms=4, color=colour, lw=1.2, label=data.title
        )
    axes.set(
        xlabel=f"probability ({calibration.method}, fitted on {calibration.set})",
        ylabel="share of positives", xlim=(-0.02, 1.02), ylim=(-0.02, 1.02),
    )  # fmt: skip
    _legend(figure, axes, "")
    return to_png(figure)


def _baselines(card: ProbeCard) -> bytes:
    """The probe's AUROC and that of everything simpler, on each set, with intervals."""
    sets = [e for e in card.evaluations if e.auroc is not None and e.baselines]
    n = sum(1 + len(e.baselines) for e in sets) + len(sets)
    figure, axes = _figure(6.6, 0.7 + 0.2 * n)
    y, ticks, names = 0.0, [], []
    for e in sets:
        axes.text(0.0, y, e.name, transform=axes.get_yaxis_transform(), fontsize=8, va="center")
        rows = [("probe", e.auroc, e.interval, COLOURS[1])]
        known = [b for b in e.baselines if b.auroc is not None]
        rows += [
            (b.name, b.auroc, b.auroc_interval, COLOURS[0])
            for b in sorted(known, key=lambda b: -(b.auroc or 0.0))
        ]
        for name, area, interval, colour in rows:
            y -= 1.0
            if interval is not None:
                axes.hlines(y, interval.low, interval.high, color=colour, alpha=0.45, lw=2.5)
            axes.plot(area, y, "o", ms=5, color=colour)
            ticks.append(y)
            names.append(name)
        y -= 1.2
    axes.axvline(0.5, color="#bbbbbb", lw=1, ls="--")
    axes.set_yticks(ticks, names, fontsize=7.5)
    axes.set(xlabel="AUROC", xlim=(min(0.35, axes.get_xlim()[0]), 1.01), ylim=(y + 0.6, 0.8))
    return to_png(figure)


def _tokens(data: ReportSet) -> bytes:
    """The best and worst cases as rows of coloured tokens."""
    rows = cases(data)
    figure = empty_figure(7.5, 0.25 + 0.27 * len(rows), layout=None)
    canvas: Any = figure.canvas
    top, renderer = colour_scale(data), canvas.get_renderer()
    inches = figure.get_size_inches()
    for i, case in enumerate(rows):
        y = 1.0 - (i + 0.75) / (len(rows) + 0.4)
        head = figure.text(0.01, y, f"{case.verdict} ({case.score:.2f})  ", fontsize=7)
        x = head.get_window_extent(renderer).x1 / (inches[0] * figure.dpi)
        for piece, score in zip(case.tokens, case.token_scores, strict=True):
            strength = float(np.clip(score / top, -1, 1))
            colour = (0.84, 0.37, 0.0) if strength > 0 else (0.0, 0.45, 0.7)
            shade = {"facecolor": (*colour, 0.75 * abs(strength)), "edgecolor": "none", "pad": 0.6}
            written = piece.replace("\n", "⏎").replace("$", r"\$")
            text = figure.text(x, y, written, fontsize=7, family="monospace", bbox=shade)
            x = text.get_window_extent(renderer).x1 / (inches[0] * figure.dpi)
            if x > 0.97:
                break
    return to_png(figure)
