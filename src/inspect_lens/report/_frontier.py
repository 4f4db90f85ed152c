"""Figures that compare: a cascade of probe and judge, and probes by the sets they are judged on."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Final, Protocol

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from inspect_lens.errors import SpecError
from inspect_lens.probe import AnyProbe, Evaluation, Interval

from ._style import COLOURS

__all__ = ["CascadeLike", "draw_cascade", "draw_transfer"]

_MARKS: Final = {True: "✓", False: "✗", None: "?"}


class CascadeLike(Protocol):
    """What is drawn of a point of `cascade_frontier`."""

    @property
    def share(self) -> float:
        """Of samples that the judge reads."""

    @property
    def cost(self) -> float:
        """Per sample."""

    @property
    def recall(self) -> float:
        """Share of positives that are flagged."""

    @property
    def fpr(self) -> float:
        """Share of negatives that are flagged."""

    @property
    def recall_interval(self) -> Interval:
        """Of the recall."""

    @property
    def fpr_interval(self) -> Interval:
        """Of the false positive rate."""


def draw_cascade(
    points: Sequence[CascadeLike], *, unit: str = "judge calls", title: str = ""
) -> bytes:
    """Draw recall and false positive rate over the cost of a cascade, with intervals.

    Args:
        points: of `inspect_lens.train.cascade_frontier`.
        unit: of the cost of a sample, such as `tokens of the judge`.
        title: of the figure.

    Returns:
        PNG.

    Raises:
        SpecError: there is no point.

    Example:
        ```python
        import numpy as np

        from inspect_lens.report import draw_cascade
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
    figure = Figure(figsize=(6.4, 4.2), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
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
    return _png(figure)


def draw_transfer(probes: Mapping[str, AnyProbe] | Sequence[AnyProbe]) -> bytes:
    """Draw which probe works on which set: a matrix of AUROC and recall at the threshold.

    Numbers and verdicts are those of the cards (`evaluate_probe`, `transfer_statement`). A mark
    says whether the probe transfers to the set: it does, it does not, or nobody can tell.

    Args:
        probes: each with a card that has evaluations; by name, or named by their cards.

    Returns:
        PNG.

    Raises:
        SpecError: no card has an evaluation with both classes.

    Example:
        ```python
        from inspect_lens.probe import load_probe
        from inspect_lens.report import draw_transfer

        probes = [load_probe(f"organism/{name}") for name in ("deception-lr", "deception-md")]
        assert draw_transfer(probes)[1:4] == b"PNG"
        ```
    """
    named = probes if isinstance(probes, Mapping) else {p.name: p for p in probes}
    found: dict[str, dict[str, Evaluation]] = {
        name: {e.name: e for e in probe.card.evaluations if e.auroc is not None}
        for name, probe in named.items()
    }
    sets = list(dict.fromkeys(name for row in found.values() for name in row))
    if not sets:
        raise SpecError(
            "probes: no card has an evaluation with both classes; allowed are cards with "
            "evaluations; measure them with evaluate_probe or train_probe(heldout=…)"
        )
    areas = np.full((len(named), len(sets)), np.nan)
    for i, row in enumerate(found.values()):
        for j, name in enumerate(sets):
            if name in row:
                areas[i, j] = row[name].auroc
    size = (2.2 + 1.5 * len(sets), 1.3 + 0.7 * len(named))
    figure = Figure(figsize=size, dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
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
    return _png(figure)


def _cell(found: Evaluation, verdicts: Mapping[str, bool | None]) -> str:
    text = f"{found.auroc:.3f}"
    if found.interval is not None:
        text += f"\n[{found.interval.low:.2f}, {found.interval.high:.2f}]"
    if found.recall is not None:
        text += f"\nrecall {found.recall:.2f}"
    return f"{text} {_MARKS[verdicts[found.name]]}" if found.name in verdicts else text


def _png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    # No software name: the same data give the same bytes.
    figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()
