"""The three files of a probe: tensors, card, and the card for people."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from inspect_lens._base.artifact import ArtifactKind, decode_tensors, markdown_table, with_interval
from inspect_lens.probe.statistics._compare import format_p_value
from inspect_lens.probe.statistics._measured import (
    BESIDE_AUROC,
    Baseline,
    Evaluation,
    Interval,
    RealisedRate,
    Validity,
)

from ._card import SEEN_ROLES, CaptureFacts, ProbeCard, Threshold


def render_card(card: ProbeCard, *, sha256: str) -> str:
    parts: list[str] = []
    if card.thresholds:
        parts += ["## Thresholds", *(_threshold(t, card) for t in card.thresholds)]
    if card.evaluations:
        beside = [
            [e.name, with_interval(e.auroc, e.auroc_interval), *Validity.of(e)]
            for e in card.evaluations
        ]
        parts += ["## Evaluation", _evaluations(card.evaluations)]
        parts += [markdown_table(["set", "AUROC", *BESIDE_AUROC], beside)]
        parts += [_realised(card.evaluations), _at_rates(card.evaluations)]
        shifts = [(e.name, e.control_shift.statement) for e in card.evaluations if e.control_shift]
        parts += [f"{name}: {statement}" for name, statement in shifts if statement]
    parts += [f"**{t.statement}**" for t in card.transfers]
    if card.baselines:
        parts += ["## Baselines on the same samples", _baselines(card.baselines)]
    if c := card.calibration:
        error = "" if c.ece is None else f" Expected calibration error elsewhere: {c.ece:.3f}."
        fitted = f"Probabilities by {c.method}, fitted on {c.n} samples of `{c.set}`."
        parts += ["## Calibration", fitted + error]
    if card.sweep:
        parts += ["## Layer sweep (selection set)", _CHOSEN, _sweep(card)]
    digest = ("probe sha256", sha256)
    return card.render(_facts(card), parts, digest=digest, warnings=card.warnings)


_CHOSEN: Final = (
    "The layer was chosen on these samples, so the figures of its row are too high; what it does "
    "on others stands under the held-out sets."
)
_ROWS: Final = {
    "tokens": "one per token",
    "mean": "one per sample, the mean of its tokens",
    "last": "one per sample, its last token",
}


def _facts(card: ProbeCard) -> list[tuple[str, str]]:
    rows = [
        ("method", card.method),
        ("layers", ", ".join(map(str, card.layers))),
        ("site", card.site),
        ("positions", str(card.positions)),
        ("pool", card.pool),
        ("selection", f"`{card.selection}`" if card.selection else ""),
        ("follow-up question", card.follow_up.question if card.follow_up else ""),
        ("hidden", str(card.hidden)),
    ]
    if card.capture:
        rows += _capture(card.capture)
    if card.training:
        t = card.training
        rows += [
            ("training set", f"{t.dataset} (sha256 {t.sha256})"),
            ("training samples", f"{t.n_positive} positive, {t.n_negative} negative"),
            ("training tokens", str(t.n_tokens)),
            ("training rows", _ROWS.get(t.rows or "", "")),
            ("groups", f"{t.n_groups} by {t.group_key}; none shared with the selection set"),
            ("selection samples", str(t.selection_n)),
            ("dropped samples", str(t.dropped)),
            ("on-policy", "yes" if t.on_policy else "no"),
        ]
    if card.seen:
        counts = ", ".join(f"{card.seen.count(r)} {r}" for r in SEEN_ROLES if card.seen.count(r))
        rows.append(("samples listed", f"{counts}, by {card.seen.by}"))
    return rows


def _capture(c: CaptureFacts) -> list[tuple[str, str]]:
    sampling = ""
    if c.temperature is not None:
        how = "greedy" if c.temperature == 0.0 else f"temperature {c.temperature:g}, seed {c.seed}"
        sampling = f"{how}, up to {c.max_tokens} tokens"
    hashed = f" (vocabulary sha256 {c.tokenizer_sha256})" if c.tokenizer_sha256 else ""
    return [
        ("engine", c.engine),
        ("dtype", c.dtype),
        ("quantisation", c.quantization or ""),
        ("dtype of the KV cache", c.kv_cache_dtype or ""),
        ("tokenizer", c.tokenizer + hashed),
        ("chat template sha256", c.chat_template_sha256 or ""),
        ("sampling of the answers", sampling),
    ]


def _threshold(t: Threshold, card: ProbeCard) -> str:
    left_out = f" ({t.n_left_out} positive ones left out)" if t.n_left_out else ""
    counted = t.claim or (
        f"{t.n_above} of {t.n_control} {t.unit} of `{t.control}`{left_out} lie above it "
        f"({with_interval(t.n_above / t.n_control, t.interval)}, {t.interval.method})"
    )
    return (
        f"- **{t.value:.6g}** for {t.holds_for}, at a false positive rate of {t.fpr:g}: {counted}."
        + (f" There are {t.few_groups}." if t.few_groups else "")
        + (f" It was set with {differs}." if (differs := card.set_with(t)) else "")
        + f" {t.guarantee}"
    )


def _evaluations(evaluations: tuple[Evaluation, ...]) -> str:
    head = ["set", "positive", "negative", "disjoint by", "AUROC", "recall at τ", "FPR at τ"]
    rows = [
        [e.name, str(e.n_positive), str(e.n_negative), e.disjoint_by,
         with_interval(e.auroc, e.auroc_interval), with_interval(e.recall, e.recall_interval),
         with_interval(e.fpr, e.fpr_interval)]
        for e in evaluations
    ]  # fmt: skip
    notes = [f"{e.name}: {e.too_few}; no verdict can rest on it." for e in evaluations if e.too_few]
    notes.append(
        "Intervals are two-sided, 95% unless `card.json` says other; those of the AUROC are "
        "DeLong's (or Hanley and McNeil's, where that is wider), or Obuchowski's, which is "
        "DeLong's by group, where groups hold several samples. Of perfect separation and of too "
        "few groups they are exact ones that count groups."
    )
    return "\n\n".join([markdown_table(head, rows), *notes])


def _realised(evaluations: tuple[Evaluation, ...]) -> str:
    """What each threshold does on honest answers that decided nothing."""
    head = ["set", "threshold for", "set for", "honest answers above it", "positives above it",
            "tokens of an honest answer", "holds for"]  # fmt: skip
    rows = [
        [e.name, r.statistic, f"{r.nominal:g}", _of(r, r.rate, r.interval),
         _of(r, r.recall, r.recall_interval), _lengths(r.n_tokens), _lengths(r.holds_for)]
        for e in evaluations
        for r in e.rates
    ]  # fmt: skip
    return markdown_table(head, rows) if rows else ""


def _of(r: RealisedRate, value: float | None, interval: Interval | None) -> str:
    """A share of answers, or of their tokens, which is said then."""
    return with_interval(value, interval) + (
        " of tokens" if r.unit != "answers" and value is not None else ""
    )


def _lengths(span: tuple[int, int] | None) -> str:
    return "n/a" if span is None else f"{span[0]} to {span[1]}"


def _at_rates(evaluations: tuple[Evaluation, ...]) -> str:
    """Recall at stated rates of the control set, and what else a ranking has."""
    rates = sorted({r.fpr for e in evaluations for r in e.recalls})
    head = ["set", *(f"recall at {r:.0%} of control" for r in rates), "AUROC against control",
            "partial AUROC to 5%", "average precision", "balanced accuracy at τ"]  # fmt: skip
    rows = []
    for e in evaluations:
        at = {r.fpr: r for r in e.recalls}
        recalls = [with_interval(at[r].recall, at[r].interval) if r in at else "n/a" for r in rates]
        others = (e.partial_auroc, e.average_precision, e.balanced_accuracy)
        control = with_interval(e.auroc_control, e.auroc_control_interval)
        rows.append([e.name, *recalls, control, *map(with_interval, others)])
    known = any(cell != "n/a" for row in rows for cell in row[1:])
    return markdown_table(head, rows) if known else ""


def _baselines(baselines: tuple[Baseline, ...]) -> str:
    head = ["set", "baseline", "AUROC", "probe better by", "p (probe no better)", "test", "note"]
    rows = [
        [b.set, b.name, with_interval(b.auroc, b.auroc_interval),
         "n/a" if b.difference is None else f"{b.difference:.3f}",
         format_p_value(b.p_value), b.test, b.note]
        for b in baselines
    ]  # fmt: skip
    return markdown_table(head, rows)


def _sweep(card: ProbeCard) -> str:
    rows = [
        [f"**{s.layer}**" if s.layer in card.layers and s.pool in ("", card.pool) else str(s.layer),
         s.pool, with_interval(s.auroc, s.auroc_interval),
         with_interval(s.recall, s.recall_interval), with_interval(s.auroc_control),
         f"{s.separation:.2f}"]
        for s in card.sweep
    ]  # fmt: skip
    head = ["layer", "pool", "AUROC", "recall at the rate", "AUROC against control", "separation"]
    said = {
        "recall": "The layer was chosen by recall: the mean over draws of the selection and the "
        "control set, each with its own threshold.",
        "auroc": "The layer was chosen by AUROC.",
    }
    parts = [markdown_table(head, rows)]
    if card.training:
        parts += [said.get(card.training.selected_by, ""), card.training.ties]
    return "\n\n".join(filter(None, parts))


PROBE: Final = ArtifactKind(
    name="probe",
    folder="probes",
    tensors="probe.safetensors",
    format="inspect_lens.probe/1",
    writer="Probe.save",
    example="organism/deception-lr",
)
_LINEAR = ("weight", "bias", "mean", "scale")
_NEURAL = ("value", "bias", "mean", "scale")


def decode_probe(content: bytes, card: ProbeCard, folder: Path) -> dict[str, NDArray[np.float32]]:
    """Read `probe.safetensors` and compare it with the card."""
    linear = card.kind == "linear"
    return decode_tensors(
        PROBE,
        content,
        card.header(),
        folder,
        allowed=_LINEAR if linear else _NEURAL,
        exact=linear,
        what=f"a {card.kind} probe",
    )
