"""One HTML file with everything in it."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Final

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
from ._report_sets import STYLE, Case, ReportSet, cases, colour_scale

__all__ = [
    "render_html",
    "write_report",
]

_CAPTIONS: Final = {
    "roc": "ROC curves of the sets that have both classes, dots at the threshold",
    "scores": "Scores by class. A score right of the dotted line is flagged.",
    "baselines": "The probe beside what is simpler, with 95% intervals.",
    "layers": "Every layer that was tried, on the selection set, with 95% intervals; no test set "
    "took part.",
    "calibration": "Predicted probability and observed frequency, in bins of equal size with exact "
    "95% intervals.",
}


def render_html(
    card: ProbeCard,
    sets: Sequence[ReportSet],
    images: Mapping[str, bytes],
    *,
    sha256: str,
    bands: bool = True,
) -> str:
    """Render a report."""
    parts = [
        f"<h1>{escape(card.name)}</h1>",
        f'<p class="lead">{escape(card.description)}</p>',
        _box(card),
        _summary(card),
        *(
            f'<p class="say{"" if t.transfers else " no"}">{escape(t.statement)}</p>'
            for t in card.transfers
        ),
        *_heading(card, sets),
        _evaluations(card) if card.evaluations else "",
    ]
    captions = {**_CAPTIONS, "roc": _CAPTIONS["roc"] + _bands(sets, bands)}
    shown = [name for name in ("roc", "scores") if name in images]
    parts.append(
        f'<div class="pair">{"".join(_image(n, images[n], captions) for n in shown)}</div>'
    )
    if card.baselines:
        parts += ["<h2>Baselines on the same samples</h2>"]
        parts += [_image("baselines", images["baselines"], captions)] * ("baselines" in images)
        parts.append(_baselines(card))
    for name, title in (("layers", "Layer sweep"), ("calibration", "Calibration")):
        if name in images:
            parts += [f"<h2>{title}</h2>", _image(name, images[name], captions)]
    for data in sets:
        if data.tokens:
            top = colour_scale(data)
            title = f"Tokens: best and worst cases of {escape(data.title)}"
            parts += [f"<h2>{title}</h2>", *(_case(c, top) for c in cases(data))]
    parts += ["<h2>Provenance</h2>", _provenance(card, sha256)]
    body = "\n".join(part for part in parts if part)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(card.name)}</title>\n<style>{STYLE}</style>\n</head>\n"
        f"<body>\n{body}\n</body>\n</html>\n"
    )


def _bands(sets: Sequence[ReportSet], drawn: bool) -> str:
    """What the caption says of the bands around ROC curves."""
    if not drawn:
        return "."
    left_out = [f"{s.name} has no band: {s.no_band}." for s in sets if s.both and s.no_band]
    return " ".join([", with pointwise 95% bootstrap bands.", *left_out])


def _image(name: str, png: bytes, captions: Mapping[str, str]) -> str:
    data = base64.b64encode(png).decode()
    caption = captions.get(name, "")
    return (
        f'<figure><img alt="{escape(caption or name)}" src="data:image/png;base64,{data}">'
        f"<figcaption>{escape(caption)}</figcaption></figure>"
    )


def _box(card: ProbeCard) -> str:
    """What decides whether to trust the probe: warnings first, then four numbers of each set."""
    warned = list(card.warnings) + list(card.training.near_duplicates if card.training else ())
    said = "".join(
        f'<p class="say no"><b>Warning.</b> {escape(text)}</p>' for text in dict.fromkeys(warned)
    )
    rows = []
    for e in card.evaluations:
        best = e.best_baseline
        other = "not measured" if best is None else f"{best.name}: {best.auroc:.3f}"
        rows.append(
            [
                e.name, _share(e.auroc, e.interval), _share(e.recall, e.recall_interval),
                _share(e.fpr, e.fpr_interval), other if e.auroc is not None else "n/a",
            ]
        )  # fmt: skip
    if not rows:
        nothing = "Nothing was measured: there is no held-out set."
        return f'<div class="box"><p class="say no"><b>Warning.</b> {nothing}</p>{said}</div>'
    own = card.thresholds_for(card.answer)
    rate = f" of {own[0].fpr:g}" if own else ""
    head = ["Set", "AUROC", "Recall at the threshold", f"Realised false positive rate{rate}",
            "Best baseline"]  # fmt: skip
    return f'<div class="box">{said}{_table(head, rows, numbers={1, 2, 3})}</div>'


def _summary(card: ProbeCard) -> str:
    layers = ", ".join(map(str, card.layers))
    text = f"Layer {layers}, {card.pool} over {card.positions} tokens, {card.method}."
    for t in card.thresholds_for(card.answer)[:1]:
        share = _share(t.n_above / t.n_control, t.interval)
        text += (
            f" Threshold {t.value:.4g} for a false positive rate of {t.fpr:g}, set on "
            f"{t.n_control} samples of {t.control}: {share} of them lie above it."
        )
        text += f" There are {t.few_groups}." if t.few_groups else ""
        text += f" {t.guarantee}"
    return f"<p>{escape(text)}</p>"


def _heading(card: ProbeCard, sets: Sequence[ReportSet]) -> list[str]:
    """What the sets are: held out, or known to the probe in part."""
    known = {s.name: (s.n_seen, len(s.labels)) for s in sets if s.n_seen}
    known |= {e.name: (e.n_seen, e.n_positive + e.n_negative) for e in card.evaluations if e.n_seen}
    if not known:
        return ["<h2>Held-out sets</h2>"]
    said = "; ".join(f"{name}: {k} of {n} samples" for name, (k, n) in known.items())
    return [
        "<h2>Sets, some with samples that made the probe</h2>",
        f'<p class="say no">{escape(said)} took part in making the probe. What is measured on them '
        "says nothing of new samples.</p>",
    ]


def _evaluations(card: ProbeCard) -> str:
    head = [
        "set", "positive", "negative", "disjoint by", "seen", "recall at 1% of control",
        "recall at 5%", "AUROC against control", "partial AUROC to 5%", "average precision",
        "balanced accuracy",
    ]  # fmt: skip
    rows = [
        [
            e.name, str(e.n_positive), str(e.n_negative), e.disjoint_by,
            "unknown" if e.n_seen is None else str(e.n_seen),
            *(_at(e, rate) for rate in (0.01, 0.05)), _share(e.auroc_control, None),
            *(_share(v, None) for v in (e.partial_auroc, e.average_precision,
                                        e.balanced_accuracy)),
        ]
        for e in card.evaluations
    ]  # fmt: skip
    notes = [
        f"<p>{escape(f'{e.name}: {e.not_judged}; no verdict can rest on it.')}</p>"
        for e in card.evaluations
        if e.not_judged
    ]
    notes += [
        f"<p>{escape(f'{e.name}: {e.control_shift.statement}')}</p>"
        for e in card.evaluations
        if e.control_shift is not None and e.control_shift.statement
    ]
    return _table(head, rows, numbers={1, 2, *range(4, 11)}) + "".join(notes)


def _at(evaluation: Evaluation, rate: float) -> str:
    found = next((r for r in evaluation.recalls if r.fpr == rate), None)
    return "n/a" if found is None else _share(found.recall, found.interval)


def _baselines(card: ProbeCard) -> str:
    ours = {e.name: e for e in card.evaluations}
    rows = []
    for b in card.baselines:
        e = ours.get(b.set)
        rows.append(
            [
                b.set, b.name, _share(b.auroc, b.auroc_interval),
                _share(e.auroc if e else None, None),
                format_p_value(b.p_value), b.test, b.note,
            ]
        )  # fmt: skip
    table = _table(
        ["set", "baseline", "AUROC", "probe", "p (probe no better)", "test", "note"],
        rows,
        numbers={2, 3, 4},
    )
    return table


def _case(case: Case, top: float) -> str:
    spans = []
    for piece, score in zip(case.tokens, case.token_scores, strict=True):
        strength = float(np.clip(score / top, -1.0, 1.0))
        colour = "213,94,0" if strength > 0 else "0,114,178"
        shade = f"background:rgba({colour},{abs(strength) * 0.75:.2f})"
        spans.append(f'<span title="{score:.3f}" style="{shade}">{escape(piece)}</span>')
    head = f"{escape(case.verdict)} · {escape(case.id)} · score {case.score:.3f}"
    return f'<div class="case"><b>{head}</b><div class="t">{"".join(spans)}</div></div>'


def _provenance(card: ProbeCard, sha256: str) -> str:
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
    return _table(["fact", "value"], [[k, v] for k, v in facts if v], code={1})


def _share(value: float | None, interval: Interval | None) -> str:
    if value is None:
        return "n/a"
    return f"{value:.3f}" + (f" [{interval.low:.3f}, {interval.high:.3f}]" if interval else "")


def _table(
    head: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    numbers: Iterable[int] = (),
    code: Iterable[int] = (),
) -> str:
    right, mono = set(numbers), set(code)

    def cell(tag: str, i: int, text: str) -> str:
        inner = f"<code>{escape(text)}</code>" if tag == "td" and i in mono else escape(text)
        return f"<{tag}{' class=n' if i in right else ''}>{inner}</{tag}>"

    lines = ["".join(cell("th", i, t) for i, t in enumerate(head))]
    lines += ["".join(cell("td", i, t) for i, t in enumerate(row)) for row in rows]
    return "<table>" + "".join(f"<tr>{line}</tr>" for line in lines) + "</table>"


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
    html = render_html(probe.card, sets, images, sha256=probe.sha256, bands=n_resamples > 0)
    write_atomic(target / "report.html", html.encode())
    return target / "report.html"
