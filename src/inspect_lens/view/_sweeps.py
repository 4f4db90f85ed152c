"""Figures and pages of sweeps: dose and response, a cascade of probe and judge, probes compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from inspect_lens._base.artifact import write_atomic
from inspect_lens.errors import SpecError
from inspect_lens.probe import AnyProbe, Evaluation, Interval
from inspect_lens.vector import DoseResponse

from ._page import render
from ._report import COLOURS, empty_figure, to_png

if TYPE_CHECKING:
    from inspect_lens.train import CascadePoint

__all__ = ["draw_cascade", "draw_transfer", "write_dose_response"]

_GREYS: Final = {"random": "#7f8c8d", "orthogonal": "#b07aa1"}
_MARKS: Final = {"random": "s", "orthogonal": "^"}


def _drawn(
    curves: Mapping[str, DoseResponse],
    value: str,
    title: str,
    extra: Mapping[str, DoseResponse] | None,
    extra_value: str,
) -> bytes:
    """Mean value over scale as a PNG, with the interval of each point."""
    if not curves:
        raise SpecError("curves: is empty; allowed is one or more; run steering_sweep first")
    panels = [(curves, value)] + ([(extra, extra_value)] if extra else [])
    figure = empty_figure(6.4, 3.9 if len(panels) == 1 else 5.8)
    ratios = {"height_ratios": [2.2, 1.0]} if len(panels) == 2 else {}
    every = figure.subplots(len(panels), 1, sharex=True, squeeze=False, gridspec_kw=ratios)[:, 0]
    for axes, (shown, name) in zip(every, panels, strict=True):
        axes.spines[["top", "right"]].set_visible(False)
        axes.axvline(0.0, color="#bbbbbb", lw=1, ls="--")
        own = 0
        for kind, curve in shown.items():
            # With the name of the vector behind it, or the layer, where there are several.
            base = kind.partition("@")[0].partition(":")[0]
            colour = _GREYS.get(base) or COLOURS[own % len(COLOURS)]
            own += base not in _GREYS
            x = [p.scale for p in curve.points]
            low = [p.interval.low for p in curve.points]
            high = [p.interval.high for p in curve.points]
            axes.fill_between(x, low, high, color=colour, alpha=0.15, lw=0)
            label = f"{kind} (Spearman {_number(curve.spearman)})" if axes is every[0] else kind
            axes.plot(
                x, [p.mean for p in curve.points], color=colour, marker=_MARKS.get(base, "o"),
                ms=3.5, lw=1.0 if base in _GREYS else 1.8, label=label,
            )  # fmt: skip
        axes.set_ylabel(name)
    every[-1].set_xlabel("scale (dashed: unsteered)")
    every[0].legend(frameon=False, fontsize=8, loc="best")
    if title:
        every[0].set_title(title, fontsize=10, loc="left")
    return to_png(figure)


def write_dose_response(
    curves: Mapping[str, DoseResponse],
    path: str | Path,
    *,
    value: str = "mean value",
    title: str = "",
    extra: Mapping[str, DoseResponse] | None = None,
    extra_value: str = "",
) -> Path:
    """Write a figure of mean value over scale with intervals, or a page with it and its numbers.

    Args:
        curves: by kind, as `dose_curves` gives them; controls are drawn in grey.
        path: ends in `.png` or `.html`; its folder is made when missing.
        value: name of the axis.
        title: of the figure.
        extra: a second panel below, such as the share of coherent answers.
        extra_value: name of its axis.

    Raises:
        SpecError: there is no curve, or another ending.

    Example:
        ```python
        from inspect_lens.view import write_dose_response
        from inspect_lens.vector import Response, dose_response

        answers = [Response(p, s, float(s > 0)) for p in "abc" for s in (-1.0, 0.0, 1.0)]
        curves = {"vector": dose_response(answers, n_resamples=100)}
        assert write_dose_response(curves, "sweep.html", value="share of true answers").exists()
        ```
    """
    target = Path(path)
    if target.suffix not in (".png", ".html"):
        raise SpecError(f"path={str(path)!r}; allowed endings are .png and .html")
    png = _drawn(curves, value, title, extra, extra_value)
    content = png if target.suffix == ".png" else _page(curves, png, value, title).encode()
    target.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(target, content)
    return target


def _page(curves: Mapping[str, DoseResponse], png: bytes, value: str, title: str) -> str:
    rows = [
        [
            kind, c.n_prompts, _with(c.spearman, c.spearman_interval),
            _with(c.effect, c.effect_interval), _with(c.flip_rate, c.flip_rate_interval),
        ]
        for kind, c in curves.items()
    ]  # fmt: skip
    scales = [p.scale for p in next(iter(curves.values())).points]
    means = [
        [kind, *(f"{p.mean:.3f}" for p in curve.points)]
        for kind, curve in curves.items()
        if [p.scale for p in curve.points] == scales
    ]
    return render(
        "dose.html", title=title or "Dose and response", value=value, png=png, curves=rows,
        scales=[f"{s:g}" for s in scales], means=means,
    )  # fmt: skip


def _with(value: float, interval: Interval) -> str:
    has_ends = np.isfinite([interval.low, interval.high]).all()
    return f"{_number(value)} {interval:.2f}" if has_ends else _number(value)


def _number(value: float) -> str:
    return f"{value:.2f}" if np.isfinite(value) else "n/a"


_MARKS_FRONTIER: Final = {True: "✓", False: "✗", None: "?"}


def draw_cascade(
    points: Sequence[CascadePoint], *, unit: str = "judge calls", title: str = ""
) -> bytes:
    """Draw recall and false positive rate over the cost of a cascade, with intervals, as PNG.

    Args:
        points: of `inspect_lens.train.cascade_frontier`.
        unit: of the cost of a sample, such as `tokens of the judge`.
        title: of the figure.

    Raises:
        SpecError: there is no point.

    Example:
        ```python
        import numpy as np

        from inspect_lens.view import draw_cascade
        from inspect_lens.train import cascade_frontier

        rng = np.random.default_rng(0)
        labels = np.arange(200) % 2
        probe, judge = (rng.standard_normal(200) + strength * labels for strength in (1.0, 4.0))
        points = cascade_frontier(labels, probe, judge, probe_threshold=0.5, judge_threshold=2.0)
        assert draw_cascade(points)[1:4] == b"PNG"
        ```
    """
    if not points:
        raise SpecError("points: is empty; allowed is one or more; make them with cascade_frontier")
    figure = empty_figure(6.4, 4.2)
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    x = [p.cost for p in points]
    kinds = (
        ("recall", COLOURS[1], [p.recall for p in points], [p.recall_interval for p in points]),
        ("false positive rate", COLOURS[0], [p.fpr for p in points],
         [p.fpr_interval for p in points]),
    )  # fmt: skip
    for name, colour, values, spans in kinds:
        axes.fill_between(
            x, [s.low for s in spans], [s.high for s in spans], color=colour, alpha=0.15, lw=0
        )
        axes.plot(x, values, "o-", color=colour, ms=4, lw=1.6, label=name)
    for end, says in ((points[0], "probe alone"), (points[-1], "judge alone")):
        if end.share in (0.0, 1.0):
            axes.annotate(
                says, (end.cost, end.recall), xytext=(0, 9), textcoords="offset points",
                ha="left" if end is points[0] else "right", fontsize=8,
            )  # fmt: skip
    level = points[0].recall_interval.confidence
    axes.set(
        xlabel=f"cost of a sample: {unit} (bands: {level:.0%} intervals)",
        ylabel="share that is flagged", ylim=(-0.02, 1.08),
    )  # fmt: skip
    axes.legend(frameon=False, fontsize=8, loc="center right")
    if title:
        axes.set_title(title, fontsize=10, loc="left")
    return to_png(figure)


def draw_transfer(probes: Mapping[str, AnyProbe] | Sequence[AnyProbe]) -> bytes:
    """Draw as PNG which probe works on which set: a matrix of AUROC and recall at the threshold.

    Numbers and verdicts are those of the cards (`evaluate_probe`, `transfer_statement`). A mark
    says whether the probe transfers to the set: it does, it does not, or nobody can tell.

    Args:
        probes: each with a card that has evaluations; by name, or named by their cards.

    Raises:
        SpecError: no card has an evaluation with both classes, or two have one name.

    Example:
        ```python
        from inspect_lens.probe import load_probe
        from inspect_lens.view import draw_transfer

        probes = [load_probe(f"organism/{name}") for name in ("deception-lr", "deception-md")]
        assert draw_transfer(probes)[1:4] == b"PNG"
        ```
    """
    named = probes if isinstance(probes, Mapping) else {p.name: p for p in probes}
    if len(named) < len(probes):
        raise SpecError(
            f"probes: {len(probes)} with the names {[*named]}; allowed are names of their own; "
            "pass a dict"
        )
    found: dict[str, dict[str, Evaluation]] = {
        name: {e.name: e for e in probe.card.evaluations if e.auroc is not None}
        for name, probe in named.items()
    }
    sets = list(dict.fromkeys(name for row in found.values() for name in row))
    if not sets:
        raise SpecError(
            "probes: no card has an evaluation with both classes; allowed are cards with "
            "evaluations; measure them with evaluate_probe or train_probe(held_out=…)"
        )
    areas = np.array([
        [row[name].auroc if name in row else np.nan for name in sets] for row in found.values()
    ], dtype=np.float64)  # fmt: skip
    figure = empty_figure(2.2 + 1.5 * len(sets), 1.3 + 0.7 * len(named))
    axes = figure.add_subplot()
    image = axes.imshow(areas, vmin=0.0, vmax=1.0, cmap="PuOr", aspect="auto")
    for i, (name, row) in enumerate(found.items()):
        verdicts = {t.set: t.transfers for t in named[name].card.transfers}
        for j, judged in enumerate(sets):
            if judged in row:
                dark = abs(areas[i, j] - 0.5) > 0.35
                axes.text(
                    j, i, _cell(row[judged], verdicts), ha="center", va="center", fontsize=7.5,
                    color="white" if dark else "black",
                )  # fmt: skip
    axes.set_xticks(range(len(sets)), sets, fontsize=8, rotation=20, ha="right")
    axes.set_yticks(range(len(named)), list(named), fontsize=8)
    axes.tick_params(length=0)
    figure.colorbar(image, ax=axes, label="AUROC (empty: not measured)", shrink=0.9)
    return to_png(figure)


def _cell(found: Evaluation, verdicts: Mapping[str, bool | None]) -> str:
    text = f"{found.auroc:.3f}"
    if found.auroc_interval is not None:
        text += f"\n{found.auroc_interval:.2f}"
    if found.recall is not None:
        text += f"\nrecall {found.recall:.2f}"
    return f"{text} {_MARKS_FRONTIER[verdicts[found.name]]}" if found.name in verdicts else text
