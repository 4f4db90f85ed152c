"""The report of a probe: one HTML file, its figures, and the sets and cases that it shows."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from inspect_lens._base.arguments import judged_arguments
from inspect_lens._base.artifact import with_interval
from inspect_lens.errors import SpecError
from inspect_lens.probe import (
    BESIDE_AUROC,
    AnyProbe,
    Calibration,
    Evaluation,
    ProbeCard,
    Validity,
    auroc,
    clopper_pearson,
    count_groups,
    format_p_value,
    reliability_curve,
    roc_band,
    roc_curve,
    write_atomic,
)

from ._page import render

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Case", "ReportSet", "cases", "write_report"]


@dataclass(frozen=True, eq=False, kw_only=True)
class ReportSet:
    """One set that a probe scored.

    Args:
        name: of the set.
        labels: (samples,) 0 and 1.
        scores: (samples,) float.
        groups: (samples,) clusters for the bootstrap; None draws samples. Too few
            (`inspect_lens.probe.count_groups`) draw none, and the ROC curve has no band.
        ids: (samples,) names.
        tokens: (samples,) texts of the tokens that were read, for the heat map.
        token_scores: (samples,) their scores.
        n_seen: samples that took part in making the probe; None where nobody can tell. A set with
            some of them is marked wherever it is shown.

    Raises:
        SpecError: lengths disagree.
    """

    name: str
    labels: NDArray[np.bool_]
    scores: NDArray[np.float64]
    groups: Sequence[str] | None = None
    ids: Sequence[str] = ()
    tokens: Sequence[Sequence[str]] = field(default=())
    token_scores: Sequence[NDArray[np.float64]] = field(default=())
    n_seen: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "labels", np.asarray(self.labels).astype(bool))
        object.__setattr__(self, "scores", np.asarray(self.scores, dtype=np.float64))
        lengths = {"scores": len(self.scores), "tokens": len(self.tokens)}
        lengths |= {"token_scores": len(self.token_scores), "ids": len(self.ids)}
        n = len(self.labels)
        wrong = {k: v for k, v in lengths.items() if v != n and not (v == 0 and k != "scores")}
        if wrong or len(self.tokens) != len(self.token_scores):
            raise SpecError(
                f"{self.name}: {lengths} for {n} samples; allowed is one each, or none of tokens, "
                "token_scores and ids"
            )

    @property
    def both(self) -> bool:
        """There are samples of both classes, and so a ROC curve."""
        return bool(self.labels.any()) and not self.labels.all()

    @property
    def title(self) -> str:
        """Its name, and how many of its samples the probe knows, if it knows some."""
        seen = f" ({self.n_seen} of {len(self.labels)} seen)" if self.n_seen else ""
        return self.name + seen

    @property
    def no_band(self) -> str:
        """Why its ROC curve has no band, as `GroupCounts.too_few` says it; empty where it has."""
        return count_groups(self.labels, self.groups).too_few


class Case(NamedTuple):
    """A sample in the report's token heat map, with tokens and their scores."""

    verdict: str
    id: str
    score: float
    tokens: Sequence[str]
    token_scores: NDArray[np.float64]


def cases(data: ReportSet, *, each: int = 3) -> list[Case]:
    """The clearest and the worst cases of both classes.

    Args:
        data: a set with tokens.
        each: cases of a kind.

    Returns:
        Positives of the highest score, positives of the lowest (missed first), negatives of the
        highest (worst alarms), negatives of the lowest.

    Example:
        ```python
        from inspect_lens.view import ReportSet, cases

        data = ReportSet(
            name="test",
            labels=[True, True, False, False],
            scores=[2.0, -1.0, 1.5, -2.0],
            ids=list("abcd"),
            tokens=[["It", " is"]] * 4,
            token_scores=[[2.0, 2.0], [-1.0, -1.0], [1.5, 1.5], [-2.0, -2.0]],
        )
        for case in cases(data, each=1):
            print(case.verdict, case.id, case.score)
        ```
    """
    order = np.argsort(data.scores, kind="stable")
    positive = [int(i) for i in order if data.labels[i]]
    negative = [int(i) for i in order if not data.labels[i]]
    kinds = (
        ("positive, best", positive[::-1][:each]),
        ("positive, worst", positive[:each]),
        ("negative, worst", negative[::-1][:each]),
        ("negative, best", negative[:each]),
    )
    ids = data.ids or [str(i) for i in range(len(data.labels))]
    seen: set[int] = set()
    made = []
    for verdict, indices in kinds:
        for i in indices:
            if i not in seen:
                seen.add(i)
                score = float(data.scores[i])
                made.append(Case(verdict, ids[i], score, data.tokens[i], data.token_scores[i]))
    return made


def colour_scale(data: ReportSet) -> float:
    """Token score that gets the full colour."""
    every = np.abs(np.concatenate([np.asarray(s) for s in data.token_scores]))
    return float(np.quantile(every, 0.98)) or 1.0


# Told apart by people who see colours differently (Okabe and Ito).
COLOURS: Final = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")


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
        made["baselines"] = _baselines_figure(card)
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


def _baselines_figure(card: ProbeCard) -> bytes:
    """The probe's AUROC and that of everything simpler, on each set, with intervals."""
    sets = [e for e in card.evaluations if e.auroc is not None and e.baselines]
    n = sum(1 + len(e.baselines) for e in sets) + len(sets)
    figure, axes = _figure(6.6, 0.7 + 0.2 * n)
    y, ticks, names = 0.0, [], []
    for e in sets:
        axes.text(0.0, y, e.name, transform=axes.get_yaxis_transform(), fontsize=8, va="center")
        rows = [("probe", e.auroc, e.auroc_interval, COLOURS[1])]
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


@judged_arguments
def write_report(
    probe: AnyProbe, folder: str | Path, sets: Sequence[ReportSet], *, n_resamples: int = 500
) -> Path:
    """Write `report.html`, complete in one file, and `figures/*.png`.

    Args:
        probe: with its card; evaluations, baselines, sweep and transfers are those of the card.
        folder: made when missing.
        sets: scored sets, held-out ones first; those with tokens get a heat map.
        n_resamples: of the band around each ROC curve; 0 leaves it out, as do too few groups,
            which the caption names.

    Raises:
        SpecError: a set is wrong.

    Example:
        ```python
        from inspect_lens.view import ReportSet, write_report
        from inspect_lens.train import ActivationSet, LDAProbe, train_probe

        train, control, test = (
            ActivationSet.load(f"acts/{name}.safetensors") for name in ("train", "control", "test")
        )
        probe = train_probe(LDAProbe(), train, name="mine/lda", control=control)
        shown = ReportSet(name="test", labels=test.labels, scores=test.scores(probe), ids=test.ids)
        assert write_report(probe, "report", [shown], n_resamples=20).name == "report.html"
        ```
    """
    target = Path(folder)
    images = figures(probe.card, sets, n_resamples=n_resamples)
    (target / "figures").mkdir(parents=True, exist_ok=True)
    for name, png in images.items():
        write_atomic(target / "figures" / f"{name}.png", png)
    html = _html(probe.card, sets, images, sha256=probe.sha256, bands=n_resamples > 0)
    write_atomic(target / "report.html", html.encode())
    return target / "report.html"


def _html(
    card: ProbeCard, sets: Sequence[ReportSet], images: Mapping[str, bytes], *, sha256: str,
    bands: bool,
) -> str:  # fmt: skip
    own = card.thresholds_for(card.answer)
    return render(
        "report.html", title=card.name, card=card, warnings=card.warnings,
        rate=f" for a rate of {own[0].fpr:g}" if own else "",
        introduction=_introduction(card), summary=_summary(card), seen=_seen(card, sets),
        decisive=[_decisive(e) for e in card.evaluations], beside=BESIDE_AUROC,
        measured=[_measured(e) for e in card.evaluations], notes=_notes(card), images=images,
        bands=_bands(sets, bands), baselines=_baselines(card),
        heat=[
            (data.title, [(case, _shades(case, colour_scale(data))) for case in cases(data)])
            for data in sets
            if data.tokens
        ],
        provenance=_provenance(card, sha256),
    )  # fmt: skip


def _decisive(e: Evaluation) -> list[str]:
    """What a reader looks for first: the AUROC, the recall, and what stands beside them."""
    return [
        e.name,
        with_interval(e.auroc, e.auroc_interval),
        with_interval(e.recall, e.recall_interval),
        *Validity.of(e),
    ]


def _bands(sets: Sequence[ReportSet], drawn: bool) -> str:
    """What the caption says of the bands around ROC curves."""
    if not drawn:
        return "."
    left_out = [f"{s.name} has no band: {s.no_band}." for s in sets if s.both and s.no_band]
    return " ".join([", with pointwise 95% bootstrap bands.", *left_out])


def _introduction(card: ProbeCard) -> str:
    """What the page is about, for somebody who sees a report for the first time."""
    model = "a model" if card.model is None else card.model.name
    layers = ", ".join(map(str, card.layers))
    several = "s" if len(card.layers) > 1 else ""
    parts = [f"This probe reads the activations of {model} at layer{several} {layers}, and gives "
             "each answer a score."]  # fmt: skip
    own = card.thresholds_for(card.answer)
    if own:
        parts.append(
            f"An answer whose score is above {own[0].value:.4g}, its threshold, is flagged."
        )
    if card.evaluations:
        parts.append(
            "The table has one line for each set that the probe was measured on. AUROC says how "
            "well its scores tell positives from negatives: 1 is without a mistake, and 0.5 is "
            "chance. Recall is the share of positives that are flagged. Beside them stands what "
            "an AUROC alone does not show: how many negatives are flagged, too, and what is "
            "reached without looking into the model."
        )
    return " ".join(parts)


def _summary(card: ProbeCard) -> str:
    layers = ", ".join(map(str, card.layers))
    text = f"Layer {layers}, {card.pool} over {card.positions} tokens, {card.method}."
    for t in card.thresholds_for(card.answer)[:1]:
        said = t.claim or (
            f"set on {t.n_control} samples of {t.control}: "
            f"{with_interval(t.n_above / t.n_control, t.interval)} of them lie above it"
        )
        text += f" Threshold {t.value:.4g} for a false positive rate of {t.fpr:g}, {said}."
        text += f" There are {t.few_groups}." if t.few_groups else ""
        text += f" {t.guarantee}"
    return text


def _seen(card: ProbeCard, sets: Sequence[ReportSet]) -> list[str]:
    """Sets that the probe knows in part."""
    known = {s.name: (s.n_seen, len(s.labels)) for s in sets if s.n_seen}
    known |= {e.name: (e.n_seen, e.n_positive + e.n_negative) for e in card.evaluations if e.n_seen}
    return [f"{name}: {k} of {n} samples" for name, (k, n) in known.items()]


def _measured(e: Evaluation) -> list[str | int]:
    return [
        e.name, e.n_positive, e.n_negative, e.disjoint_by,
        "unknown" if e.n_seen is None else e.n_seen, _at(e, 0.01), _at(e, 0.05),
        with_interval(e.auroc_control), with_interval(e.partial_auroc),
        with_interval(e.average_precision), with_interval(e.balanced_accuracy),
    ]  # fmt: skip


def _notes(card: ProbeCard) -> list[str]:
    notes = [
        f"{e.name}: {e.too_few}; no verdict can rest on it." for e in card.evaluations if e.too_few
    ]
    if card.training and card.training.ties:
        notes.append(card.training.ties)
    shifts = [(e.name, e.control_shift) for e in card.evaluations]
    return notes + [f"{name}: {s.statement}" for name, s in shifts if s is not None and s.statement]


def _at(evaluation: Evaluation, rate: float) -> str:
    found = next((r for r in evaluation.recalls if r.fpr == rate), None)
    return "n/a" if found is None else with_interval(found.recall, found.interval)


def _baselines(card: ProbeCard) -> list[list[str]]:
    ours = {e.name: e for e in card.evaluations}
    return [
        [
            b.set, b.name, with_interval(b.auroc, b.auroc_interval),
            with_interval(ours[b.set].auroc if b.set in ours else None), format_p_value(b.p_value),
            b.test, b.note,
        ]
        for b in card.baselines
    ]  # fmt: skip


def _shades(case: Case, top: float) -> list[tuple[str, float, str]]:
    """Tokens with their scores and colours: orange above 0, blue below."""
    made = []
    for piece, score in zip(case.tokens, case.token_scores, strict=True):
        strength = float(np.clip(score / top, -1.0, 1.0))
        colour = "213,94,0" if strength > 0 else "0,114,178"
        made.append((piece, float(score), f"{colour},{abs(strength) * 0.75:.2f}"))
    return made


def _provenance(card: ProbeCard, sha256: str) -> list[tuple[str, str]]:
    facts = [("probe sha256", sha256), ("source", card.source)]
    if card.model:
        facts += [("model", card.model.name), ("model sha256", card.model.sha256 or "not recorded")]
    if card.training:
        t = card.training
        facts += [
            ("training set", f"{t.dataset}, sha256 {t.sha256}"),
            ("training samples", f"{t.n_positive} positive, {t.n_negative} negative, "
             f"{t.n_tokens} tokens, {t.n_groups} groups"),
            ("selection samples", str(t.selection_n)),
            ("left out", str(t.dropped)),
            ("on-policy", "yes" if t.on_policy else "no"),
        ]  # fmt: skip
    facts += [(f"{e.name} sha256", e.sha256) for e in card.evaluations]
    facts += [("inspect_lens", card.inspect_lens_version), ("command", card.command)]
    facts += [("created", card.created.isoformat()), *(("note", n) for n in card.notes)]
    return [(name, value) for name, value in facts if value]
