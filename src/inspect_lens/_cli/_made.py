"""A probe that a command made or measured, as JSON and in lines for people."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from inspect_lens.probe import AnyProbe, Baseline, Evaluation, Transfer, format_p_value

CHOSEN_HERE: Final = (
    "* was chosen on the samples that its row is measured on, so its figures are too high: measure "
    "it on held-out ones."
)


@dataclass(frozen=True, kw_only=True)
class Made:
    """A probe, and what a command has to say of it."""

    probe: AnyProbe
    folder: str
    evaluations: tuple[Evaluation, ...]
    transfers: tuple[Transfer, ...] = ()
    """Whether what was learned on the training set holds on each of the others."""
    report: str = ""

    @property
    def baselines(self) -> tuple[Baseline, ...]:
        """On the samples of `evaluations`; those of the card may be of other sets."""
        return tuple(b for e in self.evaluations for b in e.baselines)

    @property
    def warnings(self) -> tuple[str, ...]:
        """Those of the card, with `evaluations` in the place of its own."""
        shown = self.probe.card
        if self.evaluations:
            shown = shown.model_copy(update={"evaluations": self.evaluations})
        copies = shown.training.near_duplicates if shown.training else ()
        return (*shown.warnings, *copies, *self._unmeasured())

    def _unmeasured(self) -> Iterator[str]:
        if not self.evaluations and not self.probe.card.evaluations:
            yield (
                "Nothing was measured: there is no held-out set, so what the probe finds in new "
                "samples is not known; name one with --heldout, or run probe evaluate."
            )

    def result(self) -> dict[str, Any]:
        """The facts as a dict for JSON."""
        card = self.probe.card
        return {
            "probe": self.probe.name,
            "folder": self.folder,
            "sha256": self.probe.sha256,
            "layers": list(card.layers),
            "thresholds": [t.model_dump(mode="json") for t in card.thresholds],
            "calibration": card.calibration.model_dump(mode="json") if card.calibration else None,
            "evaluations": [e.model_dump(mode="json") for e in self.evaluations],
            "baselines": [b.model_dump(mode="json") for b in self.baselines],
            "transfers": [t.model_dump(mode="json") for t in self.transfers],
            "warnings": list(self.warnings),
            "report": self.report,
        }

    def lines(self) -> Iterator[str]:
        """For people."""
        yield f"{self.probe.name}: layer {', '.join(map(str, self.probe.layers))}, {self.folder}"
        for text in self.warnings:
            yield f"  WARNING: {text}"
        for t in self.probe.card.thresholds:
            few = f", {t.few_groups}" if t.few_groups else ""
            rest = f" ({t.n_left_out} positive ones left out)" if t.n_left_out else ""
            of = "tokens of " if t.unit == "tokens" else ""
            above = t.claim or f"{t.n_above} of {t.n_control} {of}{t.control}{rest} above it"
            yield f"  threshold {t.value:.5g} for {t.holds_for}: {above}{few}"
        for e in self.evaluations:
            yield from self._of_set(e)
        for b in self.baselines:
            area = "n/a" if b.auroc is None else f"{b.auroc:.4f}"
            test = f", {b.test}" if b.test and b.p_value is None else ""
            if b.p_value is not None:
                test = f", p {format_p_value(b.p_value)} that the probe is no better"
            yield f"    {b.set} / {b.name}: {area}{test}"
        for verdict in self.transfers:
            yield f"  {verdict.statement}"
        if self.report:
            yield f"  report: {self.report}"

    def _of_set(self, e: Evaluation) -> Iterator[str]:
        """What was measured on one set."""
        area = "one class" if e.auroc is None else f"AUROC {e.auroc:.4f}"
        if e.interval is not None:
            area += f" [{e.interval.low:.4f}, {e.interval.high:.4f}]"
        recall = "" if e.recall is None else f", recall {e.recall:.3f}"
        if e.recall_interval is not None:
            recall += f" [{e.recall_interval.low:.3f}, {e.recall_interval.high:.3f}]"
        rate = "" if e.fpr is None else f", false positive rate {e.fpr:.3f}"
        if e.fpr_interval is not None:
            rate += f" [{e.fpr_interval.low:.3f}, {e.fpr_interval.high:.3f}]"
        yield f"  {e.name}: {area}{recall}{rate}"
        for r in e.rates:
            if r.rate is not None and r.interval is not None:
                share = f"{r.rate:.3f} [{r.interval.low:.3f}, {r.interval.high:.3f}]"
                yield f"    for {r.statistic}, set for {r.nominal:g}: {share} of honest answers"
        if e.recalls:
            at = ", ".join(f"{r.recall:.3f} at {r.fpr:g}" for r in e.recalls)
            yield f"    recall {at} of {e.recalls[0].control}"
        if e.control_shift is not None and e.control_shift.statement:
            yield f"    {e.control_shift.statement}"
        if e.not_judged:
            yield f"    {e.not_judged}: no verdict can rest on it"
        if e.n_seen is None:
            yield "    whether the probe has seen these samples cannot be told: " + (
                "its card does not list its own"
                if self.probe.card.seen is None
                else "the store does not say what they are; collect it anew"
            )
        elif e.n_seen:
            yield f"    {e.n_seen} of them took part in making the probe"
