"""The report of a probe: one HTML file, and its figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from inspect_lens.probe import (
    AnyProbe,
    Evaluation,
    Interval,
    ProbeCard,
    format_p_value,
    write_atomic,
)

from ._figures import figures
from ._report_sets import Case, ReportSet, cases, colour_scale
from ._templates import render


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

    Returns:
        Path of the HTML file.

    Raises:
        SpecError: a set is wrong.

    Example:
        ```python
        from inspect_lens.view import ReportSet, write_report
        from inspect_lens.train import ActivationSet, LDAProbe, train_probe

        train, control, test = (
            ActivationSet.load(f"acts/{name}.safetensors") for name in ("train", "control", "test")
        )
        probe = train_probe(LDAProbe(), train, name="mine/lda", control=control, n_resamples=100)
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
    warned = list(card.warnings) + list(card.training.near_duplicates if card.training else ())
    own = card.thresholds_for(card.answer)
    return render(
        "report.html", title=card.name, card=card, warnings=list(dict.fromkeys(warned)),
        rate=f" of {own[0].fpr:g}" if own else "", summary=_summary(card), seen=_seen(card, sets),
        decisive=[_decisive(e) for e in card.evaluations],
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
    """The four numbers of a set that a reader looks for first."""
    best = e.best_baseline
    other = "not measured" if best is None else f"{best.name}: {best.auroc:.3f}"
    return [
        e.name, _share(e.auroc, e.interval), _share(e.recall, e.recall_interval),
        _share(e.fpr, e.fpr_interval), other if e.auroc is not None else "n/a",
    ]  # fmt: skip


def _bands(sets: Sequence[ReportSet], drawn: bool) -> str:
    """What the caption says of the bands around ROC curves."""
    if not drawn:
        return "."
    left_out = [f"{s.name} has no band: {s.no_band}." for s in sets if s.both and s.no_band]
    return " ".join([", with pointwise 95% bootstrap bands.", *left_out])


def _summary(card: ProbeCard) -> str:
    layers = ", ".join(map(str, card.layers))
    text = f"Layer {layers}, {card.pool} over {card.positions} tokens, {card.method}."
    for t in card.thresholds_for(card.answer)[:1]:
        said = t.claim or (
            f"set on {t.n_control} samples of {t.control}: "
            f"{_share(t.n_above / t.n_control, t.interval)} of them lie above it"
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
        _share(e.auroc_control), _share(e.partial_auroc), _share(e.average_precision),
        _share(e.balanced_accuracy),
    ]  # fmt: skip


def _notes(card: ProbeCard) -> list[str]:
    notes = [
        f"{e.name}: {e.not_judged}; no verdict can rest on it."
        for e in card.evaluations
        if e.not_judged
    ]
    shifts = [(e.name, e.control_shift) for e in card.evaluations]
    return notes + [f"{name}: {s.statement}" for name, s in shifts if s is not None and s.statement]


def _at(evaluation: Evaluation, rate: float) -> str:
    found = next((r for r in evaluation.recalls if r.fpr == rate), None)
    return "n/a" if found is None else _share(found.recall, found.interval)


def _baselines(card: ProbeCard) -> list[list[str]]:
    ours = {e.name: e for e in card.evaluations}
    return [
        [
            b.set, b.name, _share(b.auroc, b.auroc_interval),
            _share(ours[b.set].auroc if b.set in ours else None), format_p_value(b.p_value),
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


def _share(value: float | None, interval: Interval | None = None) -> str:
    if value is None:
        return "n/a"
    return f"{value:.3f}" + (f" [{interval.low:.3f}, {interval.high:.3f}]" if interval else "")
